"""Inference and training step of a BERT with an encoding, against the absolute model on SDPA in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from locant.bench.timing import Timing, fresh_peak, peak_of, summarize, take_turns

BASELINE = "absolute on sdpa"
PASSES = ("inference", "training_step")


@dataclass(frozen=True)
class ModelSizes:
    """A BERT (base: 12 layers of width 768 with 12 heads) and its input; ``threads`` of the CPU."""

    num_layers: int = 12
    model_dim: int = 768
    num_heads: int = 12
    batch: int = 4
    length: int = 512
    threads: int = 1
    dtype: str = "float32"  # bfloat16: autocast

    def __post_init__(self) -> None:
        for name in ("num_layers", "model_dim", "num_heads", "batch", "length", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: {name} = {getattr(self, name)}, needed at least 1")
        if self.model_dim % self.num_heads:
            raise ValueError(f"bench: num_heads = {self.num_heads} does not divide model_dim = {self.model_dim}")


@dataclass(frozen=True)
class ModelRow:
    """One encoding: timing and peak memory (MB) of each pass, against the baseline."""

    encoding: str
    backend: str
    timings: dict[str, Timing]
    peak_mb: dict[str, float | None]


class Host:
    """A model of token ids, its optimizer and a batch."""

    def __init__(self, model: torch.nn.Module, sizes: ModelSizes) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        self.ids = torch.randint(1000, 20000, (sizes.batch, sizes.length))
        self.autocast = sizes.dtype == "bfloat16"

    def run(self, name: str) -> None:
        """One pass, by name."""
        training = name == "training_step"
        self.model.train(training)
        with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            hidden = self.model(self.ids).last_hidden_state
        if training:
            hidden.float().square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def bert(sizes: ModelSizes, **options: Any) -> torch.nn.Module:
    """A BERT without dropout and pooler; ``options`` are those of its configuration."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=sizes.num_layers,
        hidden_size=sizes.model_dim,
        num_attention_heads=sizes.num_heads,
        intermediate_size=4 * sizes.model_dim,
        max_position_embeddings=sizes.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )
    return BertModel(config, add_pooling_layer=False)


def attached(encoding: str, options: dict[str, Any], backend: str, sizes: ModelSizes) -> Host:
    """A BERT with an encoding attached; none for the baseline."""
    from locant import hf

    model = bert(sizes, attn_implementation="sdpa")
    if encoding != BASELINE:
        hf.attach(model, encoding, backend=backend, **options)  # pyright: ignore[reportArgumentType]
    return Host(model, sizes)


def measure(
    encodings: Iterable[str] = ("m4 clip 64",),
    sizes: ModelSizes = ModelSizes(),
    *,
    backend: str = "auto",
    passes: Iterable[str] = PASSES,
    repeats: int = 20,
    memory: bool = True,
    on_turn: Callable[[], None] = lambda: None,
) -> list[ModelRow]:
    """The baseline and every encoding (names of `locant.bench.attention.CASES`, or of encodings), in turns.

    Raises: ValueError for what `locant.hf.attach` refuses.
    """
    torch.set_num_threads(sizes.threads)
    names = [BASELINE, *encodings]
    hosts = {name: attached(*case_of(name), backend, sizes) for name in names}
    timings = {
        name: summarize(take_turns({key: partial(h.run, name) for key, h in hosts.items()}, repeats, on_turn), BASELINE)
        for name in passes
    }
    hosts.clear()
    rows = []
    for key in names:
        facts = {"encoding": key, "backend": backend, "sizes": asdict(sizes)}
        peaks = {
            name: fresh_peak("model", {**facts, "name": name}, sizes.threads) if memory else None for name in passes
        }
        rows.append(ModelRow(key, "sdpa" if key == BASELINE else backend, {n: timings[n][key] for n in passes}, peaks))
    return rows


def case_of(name: str) -> tuple[str, dict[str, Any]]:
    """(encoding, options) behind a shown name."""
    from locant.bench.attention import CASES

    return CASES.get(name, (name, {}))


def peak(encoding: str, backend: str, sizes: dict[str, Any], name: str) -> float:
    """Peak memory of one pass in this process, in MB."""
    torch.set_num_threads(sizes["threads"])
    host = attached(*case_of(encoding), backend, ModelSizes(**sizes))
    return peak_of(lambda: host.run(name))
