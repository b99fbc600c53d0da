"""A saved model with its tokenizer, ready to be analyzed, or a run with its checkpoints. Nothing is downloaded."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from locant.analysis.course import over_checkpoints
from locant.analysis.model import read_model
from locant.analysis.phase_shift import MinimalPair, blimp_pairs
from locant.analysis.protocols import Analysis, Progress, analyze, chosen_protocols, free_memory
from locant.analysis.scoring import make_scorer
from locant.analysis.windows import text_windows
from locant.hf.course import Milestone, kept
from locant.hf.lengths import load_with_head
from locant.hf.weights import weight_files, weight_shapes

VOCABULARIES = ("tokenizer*", "vocab*", "*.model")  # what a tokenizer is made of; without, transformers makes up one
USUAL = 128  # tokens of a window where the model has room for them
FOLLOWED = 8  # windows in which heads are looked at, at every checkpoint
GGUF = ".gguf"


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, the name it goes by, the longest window it serves (None: no limit), and its run."""

    model: nn.Module
    tokenizer: Any
    name: str
    longest: int | None
    milestones: tuple[tuple[Milestone, Path], ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """Name and number of parameters: what tells whose analysis a folder holds."""
        return {"name": self.name, "parameters": sum(p.numel() for p in self.model.parameters())}

    def checkpoints(self, progress: Progress | None = None) -> Iterator[tuple[int, nn.Module, float | None]]:
        """(step, model, validation loss) of each checkpoint of its run, one model at a time."""
        for done, (milestone, folder) in enumerate(self.milestones):
            yield milestone.step, _open(folder, str(folder))[0], milestone.loss
            if progress is not None:
                progress("over_training", done + 1, len(self.milestones))


def load_model(source: str | os.PathLike[str]) -> Loaded:
    """A model from a folder or a GGUF file, the last one of a run's folder, or an id from the hub's cache.

    Raises: ValueError where there is none, where it has no tokenizer, where its weights are cut off, or exceed the free
    memory.
    """
    path = Path(source)
    if path.suffix == GGUF and path.is_file():
        return _load_gguf(path)
    milestones = kept(path) if path.is_dir() else ()
    folder = milestones[-1][1] if milestones else _folder(source)
    if not any(file for pattern in VOCABULARIES for file in folder.glob(pattern)):
        raise ValueError(f"analyze: {str(folder)!r} holds no tokenizer; save the model's tokenizer beside it")
    files = weight_files(folder)
    _check_size(folder, sum(file.stat().st_size for file in files))
    weight_shapes(files)  # a file that is cut off is named here
    model, tokenizer = _open(folder, str(source))
    name = path.name or folder.resolve().name
    return Loaded(model, tokenizer, name, read_model(model).trained_length, milestones)


def _open(folder: Path, source: str) -> tuple[nn.Module, Any]:
    from transformers import AutoTokenizer

    try:
        return load_with_head(folder)[0], AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, KeyError, ValueError) as error:
        raise _unloadable(source, error) from error


def _load_gguf(path: Path) -> Loaded:
    """A quantized language model of llama.cpp, its weights made plain float32 numbers, as transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from gguf import GGUFReader

        numbers = sum(int(tensor.n_elements) for tensor in GGUFReader(path).tensors)
        _check_size(path, 4 * numbers)
        where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype="float32", **where).eval()
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    except ImportError as error:
        raise ValueError(
            f"analyze: {str(path)!r} needs the package gguf to be read; pip install 'locant[gguf]'"
        ) from error
    except (OSError, KeyError, ValueError, IndexError) as error:
        raise error if str(error).startswith("analyze: ") else _unloadable(str(path), error) from error
    return Loaded(model, tokenizer, path.stem, read_model(model).trained_length)


def _unloadable(source: str, error: BaseException) -> ValueError:
    return ValueError(f"analyze: {source!r} does not load: {' '.join(str(error).split())[:300]}")


def common_length(loaded: list[Loaded]) -> int:
    """The window that all of them serve: 128 tokens, or what the shortest table has."""
    return min([USUAL, *(one.longest for one in loaded if one.longest is not None)])


def analyze_saved(
    loaded: Loaded,
    texts: Sequence[str],
    *,
    only: Iterable[str] | None = None,
    length: int = USUAL,
    pairs: Sequence[dict[str, str]] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Analysis:
    """`analyze` on a loaded model and, where it is a run with checkpoints, its translation invariance over training.

    ``pairs``: rows of BLiMP (see `read_pairs`). Raises: ValueError as `analyze`, and for pairs that this model or these
    protocols cannot score.
    """
    found = analyze(
        loaded.model,
        loaded.tokenizer,
        texts,
        only=only,
        length=length,
        pairs=_encoded(loaded, pairs, only) if pairs else (),
        seed=seed,
        name=loaded.name,
        progress=progress,
    )
    if not loaded.milestones:
        return found
    windows = text_windows(loaded.tokenizer, texts, length, limit=FOLLOWED)
    course = over_checkpoints(loaded.checkpoints(progress), length=length, windows=windows, seed=seed)
    return replace(found, over_training=course)


def _encoded(loaded: Loaded, pairs: Sequence[dict[str, str]], only: Iterable[str] | None) -> tuple[MinimalPair, ...]:
    if "phase_shift" not in chosen_protocols(only):
        raise ValueError(f"analyze: got {len(pairs)} pairs but only={only!r} leaves out phase_shift, which reads them")
    try:
        make_scorer(read_model(loaded.model), loaded.tokenizer)
    except ValueError as error:
        raise ValueError(
            f"analyze: {loaded.name!r} cannot tell which of {len(pairs)} pairs is better: {error}"
        ) from error
    return blimp_pairs(pairs, lambda text: loaded.tokenizer(text)["input_ids"])


def read_pairs(path: str | os.PathLike[str], each: int) -> list[dict[str, str]]:
    """The first ``each`` minimal pairs of every BLiMP file (.jsonl, .jsonl.gz) in a folder, or of one file.

    Raises: ValueError for a path without such files, a line that is no pair, or ``each`` below 1.
    """
    root = Path(path)
    if each < 1:
        raise ValueError(f"pairs: got {each} pairs of each file; give 1 or more")
    files = [root] if root.is_file() else sorted((*root.glob("*.jsonl"), *root.glob("*.jsonl.gz")))
    if not files:
        raise ValueError(f"pairs: {str(root)!r} holds no .jsonl or .jsonl.gz file; give the folder of BLiMP's data")
    return [row for file in files for row in _rows(file, each)]


def _rows(file: Path, each: int) -> list[dict[str, str]]:
    rows = []
    opener: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(rows) == each:
                break
            try:
                row = json.loads(line)
                rows.append({key: str(row[key]) for key in ("sentence_good", "sentence_bad", "UID")})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"pairs: line {number} of {str(file)!r} is no pair ({error!r}); a line is JSON with sentence_good, "
                    "sentence_bad and UID"
                ) from error
    return rows


def _folder(source: str | os.PathLike[str]) -> Path:
    folder = Path(source)
    if folder.is_dir():
        for place in (folder, folder / "model"):  # a saved model, or what `locant pretrain` left
            if (place / "config.json").is_file():
                return place
        raise ValueError(f"analyze: {str(source)!r} {_instead(folder)}")
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(str(source), "config.json", local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"analyze: {str(source)!r} is no folder and not in the hub's cache; give the folder of a saved model"
        ) from error
    return Path(str(file)).parent


def _instead(folder: Path) -> str:
    """What a folder without a config.json is, and what to give."""
    if runs := sorted(run.name for run in folder.glob("runs/*") if (run / "checkpoints").is_dir()):
        return f"is a whole comparison; give one of its runs: {', '.join(f'runs/{name}' for name in runs)}"
    if (folder / "run.json").is_file() or any(folder.glob("runs/*/run.json")):
        return "was trained without checkpoints; train it with train.checkpoints=10, and give the folder of a run"
    if files := sorted(file.name for file in folder.glob(f"*{GGUF}")):
        return f"holds {', '.join(files)}; give the path of the file"
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
    return f"holds {found}, needed a config.json; give the folder of a saved model"


def _check_size(place: Path, size: int) -> None:
    free = free_memory()
    if free is not None and size > free:
        raise ValueError(
            f"analyze: the weights in {str(place)!r} take {size / 1e9:.1f} GB but {free / 1e9:.1f} GB are free; "
            "analyze a smaller model, or free memory"
        )
