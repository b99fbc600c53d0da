"""The course of a training run on disk: the model at some of its steps, each in a folder of its own.

<run>/checkpoints/step-0000800/    the model with what is attached to it, its tokenizer, and checkpoint.json
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

FOLDER, FACTS = "checkpoints", "checkpoint.json"


@dataclass(frozen=True)
class Milestone:
    """One kept step. ``tokens``: read until then; ``loss``: validation at the trained length, nats per token."""

    step: int
    tokens: int
    loss: float


def keep(run: Path, model: Any, tokenizer: Any, milestone: Milestone, state: dict[str, Tensor] | None = None) -> Path:
    """Write the model at one step below a run's folder; it appears whole or not at all. Returns its folder.

    ``state``: the weights, where the model holds but a share of them. Raises: OSError where it cannot be written.
    """
    target = run / FOLDER / f"step-{milestone.step:07d}"
    fresh = target.with_name(f".{target.name}")
    try:
        fresh.mkdir(parents=True)
        model.save_pretrained(fresh, state_dict=state)
        tokenizer.save_pretrained(fresh)
        (fresh / FACTS).write_text(json.dumps(asdict(milestone)) + "\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)  # of a run that was stopped behind it and does it again
        fresh.rename(target)
    except SafetensorError as error:  # which hides that a disk is full
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def forget(run: Path) -> None:
    """Take away what an earlier, interrupted run left in the same folder."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def kept(run: Path) -> tuple[tuple[Milestone, Path], ...]:
    """The milestones of a run with their folders, in the order of their steps; none for a folder without.

    Raises: ValueError for a checkpoint.json that is cut off or lacks a number.
    """
    found = []
    for folder in sorted((run / FOLDER).glob("step-*")):
        try:
            body = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            found.append((Milestone(int(body["step"]), int(body["tokens"]), float(body["loss"])), folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"checkpoints: {folder / FACTS} does not tell step, tokens and loss ({error!r}); train the run anew"
            ) from error
    return tuple(sorted(found, key=lambda item: item[0].step))
