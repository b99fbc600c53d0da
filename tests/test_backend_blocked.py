"""Backend `blocked` equals `reference` in output and in every gradient, whatever the tiles, ids and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck

import locant
from locant.attention import attention
from locant.backends import BACKENDS, Call, blocked
from locant.encoding import Layer
from locant.positions import Positions
from locant.terms import (
    Clip,
    Distance,
    LogBucket,
    LogitMap,
    LowRankBias,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    SignedLogBucket,
    Untied,
    WeightScale,
)
from tests.names import ENCODERS

B, H, D, E = 2, 3, 8, 6
SIZES = {"num_heads": H, "head_dim": D, "model_dim": 24, "max_length": 64}
ENCODINGS = {
    **{name: (name, {}) for name in ENCODERS},
    "shaw, clip, values": ("shaw", {"clip": 3, "values": True}),
    "shaw, no keys, per head": ("shaw", {"clip": 4, "keys": False, "values": True, "share_heads": False}),
    "shaw, tied, zero outside": ("shaw", {"clip": 2, "values": True, "tie_kv": True, "outside": "zero"}),
    "shaw, untied cls": ("shaw", {"clip": 3, "values": True, "untie_cls": True}),
    "shaw, unscaled": ("shaw", {"clip": 3, "scaled": False}),
    "m1, clip": ("huang_m1", {"clip": 3, "std": 0.3}),
    "m2, one table": ("huang_m2", {"clip": 5, "share_heads": True, "std": 0.3}),
    "m3, clip": ("huang_m3", {"clip": 3, "std": 0.3}),
    "m3, per head": ("huang_m3", {"clip": 2, "share_heads": False, "std": 0.3}),
    "m4, clip": ("huang_m4", {"clip": 3}),
    "m4, per head": ("huang_m4", {"clip": 1, "share_heads": False}),
    "m4, untied cls": ("huang_m4", {"clip": 3, "untie_cls": True}),
    "xlnet, clamp": ("xlnet", {"clamp": 3}),
    "deberta v1, clip": ("deberta", {"clip": 3}),
    "deberta, paper": ("deberta", {"clip": 4, "p2c_index": "paper", "log_buckets": True}),
    "t5, causal": ("t5", {"causal": True}),
    "tisa, scaled": ("tisa", {"scaled": True}),
    "alibi, trainable": ("alibi", {"trainable": True}),
    "m4 + t5": ("huang_m4+t5", {"clip": 3}),
    "m1 + m2 + m3": ("huang_m1+huang_m2+huang_m3", {"std": 0.3}),
}


def qkv(num_queries: int, num_keys: int, dtype: torch.dtype = torch.float64, width: int = E) -> list[torch.Tensor]:
    shapes = ((B, H, num_queries, D), (B, H, num_keys, D), (B, H, num_keys, width))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def gapped(num_queries: int, num_keys: int) -> Positions:
    ids = torch.arange(num_keys) * 2 + torch.tensor([[0], [3]])
    return Positions.from_ids(ids[:, num_keys - num_queries :], ids, length=64)


def padded(num_queries: int, num_keys: int) -> tuple[Positions, dict]:
    mask = torch.arange(num_keys) >= torch.tensor([[3], [0]])
    return Positions.from_mask(mask, num_queries), {"mask": mask[:, None, None]}


SITUATIONS = {
    "square": lambda: (Positions.arange(13), {}),
    "cached": lambda: (Positions.arange(7, 13), {}),
    "one query": lambda: (Positions.arange(1, 13), {}),
    "one token": lambda: (Positions.arange(1), {}),
    "causal": lambda: (Positions.arange(13), {"causal": True}),
    "causal, cached": lambda: (Positions.arange(7, 13), {"causal": True}),
    "left padding": lambda: padded(13, 13),
    "contiguous, masked": lambda: (Positions.arange(13), {"mask": torch.rand(B, H, 13, 13) > 0.4}),
    "blind rows": lambda: (Positions.arange(9, 13), {"mask": (torch.arange(9) > 2)[:, None].expand(9, 13)}),
    "gaps": lambda: (gapped(9, 13), {}),
    "packed": lambda: (Positions.packed(torch.tensor([[0] * 5 + [1] * 8, [0] * 13])), {"causal": True}),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, several groups of heads and several blocks of gates even at the sizes of a test."""
    monkeypatch.setattr(blocked, "BLOCK", 6)
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 6 * 13 * 2)
    monkeypatch.setattr(blocked.keys, "KEY_CHUNK", 3)
    monkeypatch.setattr(blocked.gate, "GATE_ELEMENTS", 300)


def outcomes(
    backend: str, make: Callable, inputs: list[torch.Tensor], parameters: list[torch.Tensor], **options: object
) -> list[torch.Tensor | None]:
    """Output, and the gradients of all inputs and parameters under one fixed loss."""
    out = make(backend)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    return [out, *torch.autograd.grad(loss, inputs + parameters, allow_unused=True)]


def check(make: Callable, inputs: list[torch.Tensor], parameters: list[torch.Tensor], atol: float = 1e-10) -> None:
    got = outcomes("blocked", make, inputs, parameters)
    want = outcomes("reference", make, inputs, parameters)
    for which, (a, b) in enumerate(zip(got, want, strict=True)):
        if a is None or b is None:
            assert (a is None or not a.any()) and (b is None or not b.any()), which
        else:
            torch.testing.assert_close(a, b, rtol=atol, atol=atol, msg=lambda m, which=which: f"tensor {which}: {m}")


@pytest.mark.parametrize("situation", ["square", "causal, cached", "left padding", "packed"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_equals_reference(encoding: str, situation: str) -> None:
    name, options = ENCODINGS[encoding]
    positions, arguments = SITUATIONS[situation]()
    built = locant.load(name, **SIZES, **options).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    q, k, v = qkv(positions.num_queries, positions.num_keys, width=D)
    if any(isinstance(term, LogitMap) for term in built.terms(built.prepare(positions), Layer(q, k))):
        with pytest.raises(ValueError, match="'blocked' cannot: LogitMap"):
            attention(q, k, v, built.terms(positions, Layer(q, k)), positions, backend="blocked", **arguments)
        return

    def make(backend: str) -> Any:
        ready = built.prepare(positions)
        q2, k2 = built.query_key(q, k, ready)
        terms = built.terms(ready, Layer(q2, k2))
        return attention(q2, k2, v, terms, ready, logit_factor=built.logit_factor, backend=backend, **arguments)

    check(make, [q, k, v], list(built.parameters()))


def table(rows: int, *width: int, heads: int = H) -> torch.Tensor:
    return torch.randn(heads, rows, *width, dtype=torch.float64, requires_grad=True)


def every_term() -> list:
    """Every kind of term, and rules that clip, saturate, mirror and read special tokens."""
    bucket, signed, untied = LogBucket(8, 9), SignedLogBucket(4, 9, flip=True), Untied(Clip(2), 5, 6)
    return [
        RelativeScale(table(4), Distance(3)),
        RelativeScale(table(7, heads=1), untied),
        RelativeGate(table(5, D), Clip(2)),
        RelativeBias(table(8), bucket),
        RelativeBias(table(7, heads=1), untied, scaled=True),
        RelativeQuery(table(8, D), bucket),
        RelativeQuery(table(7, D, heads=1), untied, scaled=False),
        RelativeKey(table(8, D), signed),
        RelativeKey(table(5, D, heads=1), Clip(2), scaled=False),
        RelativeValue(table(4, E), Distance(3)),
        RelativeValue(table(7, E, heads=1), untied),
    ]


def given(num_queries: int, num_keys: int) -> list:
    """Terms whose tensors have the size of the pairs."""
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return [
        PairBias(draw(1, num_queries, num_keys)),
        PairBias(draw(H, num_queries, num_keys), scaled=True),
        PairBias(draw(B, 1, num_queries, num_keys)),
        LowRankBias(draw(B, 1, num_queries, 4), draw(B, 1, num_keys, 4)),
        LowRankBias(draw(1, H, num_queries, 4), draw(1, H, num_keys, 4), scaled=False),
        WeightScale(draw(H, num_queries, num_keys)),
        WeightScale(draw(B, 1, num_queries, num_keys)),
    ]


def leaves(terms: list) -> list[torch.Tensor]:
    return [t for term in terms for t in vars(term).values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize(
    ("situation", "scale"), [*((s, "number") for s in SITUATIONS), ("square", "row"), ("left padding", "batch row")]
)
def test_all_terms_at_once_equal_reference(situation: str, scale: str) -> None:
    positions, arguments = SITUATIONS[situation]()
    num_queries = positions.num_queries
    factor = {"number": 0.7, "row": torch.rand(num_queries) + 0.5, "batch row": torch.rand(B, 1, num_queries) + 0.5}
    terms = every_term() + given(num_queries, positions.num_keys)
    inputs = qkv(num_queries, positions.num_keys)

    def make(backend: str) -> Any:
        return attention(*inputs, tuple(terms), positions, logit_factor=factor[scale], backend=backend, **arguments)

    check(make, inputs, leaves(terms), atol=1e-9)


@pytest.mark.parametrize("term", every_term() + given(7, 11), ids=lambda term: type(term).__name__)
def test_each_term_alone_passes_gradcheck(term: object) -> None:
    inputs = qkv(7, 11)

    def run(*tensors: torch.Tensor) -> Any:
        fields = iter(tensors[3:])
        fresh = {name: next(fields) if isinstance(x, torch.Tensor) else x for name, x in vars(term).items()}
        return attention(*tensors[:3], (type(term)(**fresh),), backend="blocked")

    assert gradcheck(run, (*inputs, *leaves([term])), fast_mode=True)


def test_unwanted_gradients_are_not_made() -> None:
    q, k, v = qkv(7, 7)
    fixed = RelativeBias(torch.randn(H, 5, dtype=torch.float64), Clip(2))
    out = attention(q, k.detach(), v.detach(), (fixed,), backend="blocked")
    (dq,) = torch.autograd.grad(out.sum(), [q])
    want = attention(q, k.detach(), v.detach(), (fixed,), backend="reference")
    torch.testing.assert_close(dq, torch.autograd.grad(want.sum(), [q])[0])


def test_grouped_queries_share_keys() -> None:
    q, k, v = qkv(7, 11)
    few = [k[:, :1].detach().requires_grad_(), v[:, :1].detach().requires_grad_()]
    term = RelativeKey(table(5, D), Clip(2))
    check(lambda backend: attention(q, *few, (term,), backend=backend), [q, *few], leaves([term]))


def test_dropout_keeps_the_mean_and_repeats_in_backward() -> None:
    q, k, v = (t.detach() for t in qkv(40, 40))
    ones = torch.ones(B, H, 40, 40, dtype=torch.float64)
    out = attention(q, k, torch.eye(40, dtype=torch.float64).expand(B, H, 40, 40), dropout=0.3, backend="blocked")
    weights = attention(q, k, torch.eye(40, dtype=torch.float64).expand(B, H, 40, 40), backend="blocked")
    kept = out != 0
    torch.testing.assert_close(out[kept], weights[kept] / 0.7)
    assert abs(kept.double().mean().item() - 0.7) < 0.02
    assert not (kept[0, 0] == kept[1, 0]).all() and not (kept[0, 0] == kept[0, 1]).all()

    terms = [
        RelativeValue(table(5, E), Clip(2)),
        WeightScale(ones[0].requires_grad_()),
        RelativeQuery(table(5, D), Clip(2)),
    ]

    def run(*tensors: torch.Tensor) -> Any:
        torch.manual_seed(3)
        value, scale, query = tensors[3:]
        parts = (RelativeValue(value, Clip(2)), WeightScale(scale), RelativeQuery(query, Clip(2)))
        return attention(*tensors[:3], parts, dropout=0.3, backend="blocked")

    small = [t[:, :, :9].detach().requires_grad_() for t in (q, k, v)]
    terms[1] = WeightScale(ones[0, :, :9, :9].detach().requires_grad_())
    assert gradcheck(run, (*small, *leaves(terms)), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_no_worse_than_reference(dtype: torch.dtype) -> None:
    exact = qkv(13, 13)
    terms = [
        RelativeQuery(table(5, D), Clip(2)),
        RelativeKey(table(5, D), Clip(2)),
        RelativeValue(table(5, E), Clip(2)),
    ]
    tensors = exact + leaves(terms)

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        low = [t.detach().to(dtype).requires_grad_() for t in tensors]
        parts = tuple(type(term)(t, term.rule) for term, t in zip(terms, low[3:], strict=True))
        out = attention(*low[:3], parts, backend=backend)
        assert out.dtype == dtype
        return [out, *torch.autograd.grad(out.double().square().sum(), low)]

    rounded = [t.detach().to(dtype).double() for t in tensors]
    tensors_low, tensors = tensors, [t.requires_grad_() for t in rounded]
    want = run("reference", torch.float64)
    tensors = tensors_low
    for got, ref, exact_one in zip(run("blocked", dtype), run("reference", dtype), want, strict=True):
        assert got.dtype == dtype
        error, allowed = (got - exact_one).abs().max(), (ref - exact_one).abs().max()
        assert error <= 2 * allowed + 1e-6, (error, allowed)


def test_memory_grows_linearly_with_the_length() -> None:
    """No buffer of a call is larger than a tile, or than a multiple of the inputs."""
    q, k, v = (torch.randn(1, 2, 700, 4) for _ in range(3))
    term = RelativeKey(torch.randn(1, 9, 4), Clip(4))
    call = Call(Operands(q, k, v, Positions.arange(700), 0.5), (term,), None, False, 0.0, False)
    loop = blocked.Loop(blocked.Plan.of(call, 0), [q, k, v, term.table], [None] * 4)
    loop.run_forward(torch.empty(1, 2, 700, 4))
    assert max(b.numel() for b in loop.scratch._buffers.values()) < 700 * 700 / 8


def call(*terms: object, **changes: object) -> Call:
    operands = Operands(*qkv(7, 7), Positions.arange(7), 0.5)
    return Call(operands, terms, None, False, 0.0, changes.get("return_weights", False))


def test_what_it_cannot_serve_is_refused_with_the_reason() -> None:
    refuses = BACKENDS["blocked"].refuses
    gate = RelativeGate(table(5, D), Clip(2))
    assert refuses(call(gate)) is None
    assert "several vector gates" in (refuses(call(gate, gate)) or "")
    assert "LogitMap" in (refuses(call(LogitMap(lambda content, bias, positions, allowed: content + bias))) or "")
    assert "weights" in (refuses(call(return_weights=True)) or "")
    operands = Operands(*qkv(7, 7), Positions.arange(7), torch.ones(7, requires_grad=True))
    assert "scale" in (refuses(Call(operands, (), None, False, 0.0, False)) or "")
