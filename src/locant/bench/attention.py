"""Time and memory of attention with position terms, against plain SDPA without positions in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from locant.attention import attention
from locant.backends import BACKENDS
from locant.bench.timing import (
    BASELINE,
    Timing,
    device_peak,
    fresh_peak,
    peak_of,
    summarize,
    synchronizer,
    take_turns,
)
from locant.catalog import load
from locant.encoding import Encoding, Layer
from locant.positions import Positions

CASES: dict[str, tuple[str, dict[str, Any]]] = {  # what is shown: (encoding, options)
    "none": ("none", {}),
    "m4": ("huang_m4", {}),
    "m4 clip 64": ("huang_m4", {"clip": 64}),
    "m4 clip 32": ("huang_m4", {"clip": 32}),
    "shaw": ("shaw", {}),
    "shaw clip 64": ("shaw", {"clip": 64}),
    "shaw values clip 64": ("shaw", {"clip": 64, "values": True}),
    "t5": ("t5", {}),
    "tisa": ("tisa", {}),
    "alibi": ("alibi", {}),
    "m1": ("huang_m1", {}),
    "m2": ("huang_m2", {}),
    "tupe_a": ("tupe_a", {}),
    "tupe_r": ("tupe_r", {}),
    "m3 clip 64": ("huang_m3", {"clip": 64}),
}
PASSES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Sizes:
    """Shapes and precision of the operands; ``threads`` of the CPU."""

    batch: int = 4
    heads: int = 12
    length: int = 512
    head_dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "length", "head_dim", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: {name} = {getattr(self, name)}, needed at least 1")
        if self.dtype not in ("float64", "float32", "bfloat16", "float16"):
            raise ValueError(f"bench: dtype = {self.dtype!r}, needed float64, float32, bfloat16 or float16")


@dataclass(frozen=True)
class Row:
    """One case on one backend: timing and peak memory (MB) of each pass, or the reason why it cannot be served."""

    case: str
    backend: str
    length: int
    timings: dict[str, Timing] = field(default_factory=dict)
    peak_mb: dict[str, float | None] = field(default_factory=dict)
    cannot: str = ""


class Variant:
    """One way to compute attention: `forward` runs it, `leaves` are the tensors a training step differentiates."""

    def __init__(self, case: str, backend: str, sizes: Sizes) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (sizes.batch, sizes.heads, sizes.length, sizes.head_dim)
        like = {"dtype": getattr(torch, sizes.dtype), "device": sizes.device}
        q, k, v = (torch.randn(shape, generator=generator).to(**like).requires_grad_() for _ in range(3))
        self.operands, self.backend, self.causal = (q, k, v), backend, sizes.causal
        self.leaves: list[Tensor] = [q, k, v]
        self.dout = torch.randn(shape, generator=generator).to(**like)
        if backend == BASELINE:
            return
        self.encoding = _encoding(case, sizes).to(**like)
        # What all layers share is not one layer's work: it is prepared once, and enters as a leaf with a gradient.
        positions = self.encoding.prepare(Positions.arange(sizes.length, device=sizes.device))
        shared = {owner: value.detach() for owner, value in positions.shared.items()}
        leaves = [value.clone().requires_grad_() for value in shared.values()]
        self.fixed = replace(positions, shared=shared)
        self.training = replace(positions, shared=dict(zip(shared, leaves, strict=True)))
        self.leaves += leaves or list(self.encoding.parameters())

    def forward(self) -> Tensor:
        """Output of one call."""
        q, k, v = self.operands
        if self.backend == BASELINE:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        positions = self.training if torch.is_grad_enabled() else self.fixed
        q, k = self.encoding.query_key(q, k, positions)
        terms, factor = self.encoding.terms(positions, Layer(q, k)), self.encoding.logit_factor
        out = attention(q, k, v, terms, positions, logit_factor=factor, causal=self.causal, backend=self.backend)
        assert isinstance(out, Tensor)
        return out

    def run(self, name: str) -> None:
        """One pass, by name."""
        if name == "forward":
            with torch.no_grad():
                self.forward()
        else:
            torch.autograd.grad(self.forward(), self.leaves, self.dout)


def _encoding(case: str, sizes: Sizes) -> Encoding:
    name, options = CASES[case]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load(
            name,
            num_heads=sizes.heads,
            head_dim=sizes.head_dim,
            model_dim=sizes.heads * sizes.head_dim,
            max_length=sizes.length,
            causal=sizes.causal,
            **options,
        )


def measure(
    cases: Iterable[str] = tuple(CASES),
    backends: Iterable[str] = ("native", "blocked"),
    sizes: Sizes = Sizes(),
    *,
    passes: Iterable[str] = PASSES,
    repeats: int = 20,
    memory: bool = True,
    on_row: Callable[[Row], None] = lambda row: None,
    on_turn: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All cases on all backends, the variants of a case in turns; rows are told to `on_row` as they come.

    Raises: ValueError for unknown cases, backends and passes.
    """
    for given, known, what in (
        (cases, CASES, "case"),
        (backends, {"auto", *BACKENDS}, "backend"),
        (passes, PASSES, "pass"),
    ):
        for name in given:
            if name not in known:
                raise ValueError(f"bench: unknown {what} {name!r}; choose from {', '.join(known)}")
    torch.set_num_threads(sizes.threads)
    rows = []
    for case in cases:
        for row in _measure_case(case, tuple(backends), sizes, tuple(passes), repeats, memory, on_turn):
            on_row(row)
            rows.append(row)
    return rows


def _measure_case(
    case: str,
    backends: tuple[str, ...],
    sizes: Sizes,
    passes: tuple[str, ...],
    repeats: int,
    memory: bool,
    on_turn: Callable[[], None],
) -> list[Row]:
    variants, refused = {BASELINE: Variant(case, BASELINE, sizes)}, []
    for backend in backends:
        try:
            variant = Variant(case, backend, sizes)
            for name in passes:
                variant.run(name)
            synchronizer(sizes.device)()
        except Exception as reason:  # a backend that fails loses its row, with the reason in it, and no other one
            refused.append(Row(case, backend, sizes.length, cannot=_said(reason)))
            continue
        variants[backend] = variant
    wait = synchronizer(sizes.device)
    timings = {
        name: summarize(take_turns({key: partial(v.run, name) for key, v in variants.items()}, repeats, on_turn, wait))
        for name in passes
    }
    found = []
    for backend, variant in variants.items():
        peaks = {name: _peak(variant, case, backend, sizes, name) if memory else None for name in passes}
        found.append(Row(case, backend, sizes.length, {name: timings[name][backend] for name in passes}, peaks))
    return found + refused


def _said(reason: Exception) -> str:
    """A refusal in its own words, anything else with its kind and its first line."""
    text = str(reason).strip()
    return text if type(reason) is ValueError else f"{type(reason).__name__}: {text.splitlines()[0] if text else ''}"


def _peak(variant: Variant, case: str, backend: str, sizes: Sizes, name: str) -> float | None:
    """Peak memory of one pass in MB: of the GPU's allocator, or of a fresh process."""
    if sizes.device.startswith("cuda"):
        return device_peak(partial(variant.run, name))
    facts = {"case": case, "backend": backend, "sizes": asdict(sizes), "name": name}
    return fresh_peak("attention", facts, sizes.threads)


def peak(case: str, backend: str, sizes: dict[str, Any], name: str) -> float:
    """Peak memory of one pass in this process, in MB."""
    torch.set_num_threads(sizes["threads"])
    variant = Variant(case, backend, Sizes(**sizes))
    if backend != BASELINE:  # loading a library is not the call's work
        tiny = torch.zeros(1, 1, 1, 1)
        attention(tiny, tiny, tiny, backend=backend)
    return peak_of(lambda: variant.run(name))
