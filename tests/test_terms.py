"""Rules, and terms one by one and together, against loops; each refuses what does not fit."""

from __future__ import annotations

import math

import pytest
import torch

import locant.terms
from locant import Positions, attention
from locant.terms import (
    Clip,
    Distance,
    LogBucket,
    LogitMap,
    LowRankBias,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    Rule,
    SignedLogBucket,
    Untied,
    WeightScale,
)

B, H, Q, J, D, E = 2, 3, 7, 11, 8, 5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def operands(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return (
        normal(B, H, Q, D, seed=1, dtype=dtype),
        normal(B, H, J, D, seed=2, dtype=dtype),
        normal(B, H, J, E, seed=3, dtype=dtype),
    )


# --- rules ---


def test_clipped_rows():
    offsets = torch.tensor([-500, -5, -4, -1, 0, 3, 4, 5, 500])
    assert Clip(4).row(offsets).tolist() == [0, 0, 0, 3, 4, 7, 8, 8, 8]
    assert Clip(4, "zero").row(offsets).tolist() == [9, 9, 0, 3, 4, 7, 8, 9, 9]
    assert (Clip(4).num_rows, Clip(4, "zero").num_rows) == (9, 10)
    assert Distance(4).row(offsets).tolist() == [4, 4, 4, 1, 0, 3, 4, 4, 4] and Distance(4).num_rows == 5


def test_buckets_of_both_directions():
    # https://github.com/lucidrains/x-transformers/pull/10
    want = {
        0: 0,
        -1: 1,
        -8: 8,
        -11: 8,
        -12: 9,
        -16: 10,
        -64: 14,
        -90: 14,
        -91: 15,
        1: 17,
        8: 24,
        12: 25,
        16: 26,
        91: 31,
    }
    assert LogBucket(32, 128).row(torch.tensor(list(want))).tolist() == list(want.values())


def test_buckets_of_the_past():
    # https://github.com/lucidrains/x-transformers/pull/10
    want = {5: 0, -15: 15, -16: 16, -18: 16, -19: 17, -128: 31, -100_000: 31}
    assert LogBucket(32, 128, causal=True).row(torch.tensor(list(want))).tolist() == list(want.values())


def test_signed_buckets_are_linear_near_and_logarithmic_far():
    linear, far = SignedLogBucket(4), SignedLogBucket(8, 32)
    assert linear.row(torch.tensor([-9, -3, 0, 3, 4, 9])).tolist() == [7, 7, 4, 1, 0, 0]
    assert SignedLogBucket(4, flip=True).row(torch.tensor([-9, -3, 0, 3])).tolist() == [0, 1, 4, 7]
    x = 20
    want = 4 + math.ceil(math.log(x / 4) / math.log(31 / 4) * 3)
    assert far.row(torch.tensor([-x, x, -4, 4])).tolist() == [want + 8, 8 - want, 12, 4]


def test_special_tokens_have_rows_of_their_own():
    # https://github.com/lucidrains/x-transformers/issues/6: an index of its own for [CLS]
    rows = Untied(Clip(2), from_row=5, to_row=6).rows(Positions.arange(4))
    assert rows.tolist() == [[5, 5, 5, 5], [6, 2, 3, 4], [6, 1, 2, 3], [6, 0, 1, 2]]
    assert Untied(Clip(2), 5, 6).num_rows == 7 and not Untied.offset_only


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LogBucket(7, 128), "num_buckets=7 and max_distance=128"),
        (lambda: LogBucket(2, 128), "num_buckets=2 .* num_buckets >= 4"),
        (lambda: LogBucket(32, 8), "max_distance=8 leave .* max_distance > 8"),
        (lambda: LogBucket(32, 16, causal=True), "max_distance=16 leave .* max_distance > 16"),
    ],
)
def test_buckets_without_a_logarithmic_part_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_bare_rule_says_nothing():
    with pytest.raises(NotImplementedError):
        _ = Rule().num_rows
    with pytest.raises(NotImplementedError):
        Rule().row(torch.tensor([0]))


def test_tables_refuse_real_valued_ids():
    with pytest.raises(ValueError, match=r"clip rule: ids are torch\.float32, but a table needs integer ids"):
        Clip(2).rows(Positions.from_ids(torch.tensor([0.0, 0.5])))


# --- terms against loops ---

TERMS = {
    "scale": lambda: RelativeScale(normal(H, 7, seed=4), Clip(3)),
    "gate": lambda: RelativeGate(normal(H, 7, D, seed=5), Clip(3)),
    "gate, one head": lambda: RelativeGate(normal(1, 4, D, seed=5), Distance(3)),
    "bias": lambda: RelativeBias(normal(H, 7, seed=6), Clip(3)),
    "bias, scaled": lambda: RelativeBias(normal(1, 7, seed=6), Clip(3), scaled=True),
    "query": lambda: RelativeQuery(normal(H, 7, D, seed=7), Clip(3)),
    "query, unscaled": lambda: RelativeQuery(normal(1, 7, D, seed=7), Clip(3), scaled=False),
    "key": lambda: RelativeKey(normal(1, 7, D, seed=8), Clip(3)),
    "key, unscaled": lambda: RelativeKey(normal(H, 9, D, seed=8), Untied(Clip(3), 7, 8), scaled=False),
    "pair": lambda: PairBias(normal(H, Q, J, seed=9)),
    "pair, batch": lambda: PairBias(normal(B, 1, Q, J, seed=9), scaled=True),
    "pair, function": lambda: PairBias(lambda p: -0.1 * p.offsets().abs()[..., None, :, :].double()),
    "low rank": lambda: LowRankBias(normal(1, H, Q, 3, seed=10), normal(B, 1, J, 3, seed=11)),
    "value": lambda: RelativeValue(normal(H, 7, E, seed=12), Clip(3)),
    "value, one head": lambda: RelativeValue(normal(1, 9, E, seed=12), Untied(Clip(3), 7, 8)),
    "weights": lambda: WeightScale(normal(H, Q, J, seed=13)),
    "weights, function": lambda: WeightScale(lambda p: 1 / (1.0 + p.offsets().abs()[..., None, :, :].double())),
    "map": lambda: LogitMap(lambda content, bias, positions, allowed: torch.tanh(content) + 2 * bias),
    "map, row": lambda: LogitMap(lambda content, bias, positions, allowed: content.cumsum(-1) + bias, reach="row"),
}
TOGETHER = [
    ("gate", "scale", "bias", "query", "key", "low rank", "pair, batch", "map", "weights", "value"),
    ("map, row", "bias, scaled", "bias", "value, one head"),
    ("weights", "weights, function", "value", "value, one head"),
    ("query, unscaled", "key, unscaled", "pair"),
]


def row(rule: Rule, i: int, j: int) -> int:
    if isinstance(rule, Untied):
        return rule.from_row if i == 0 else rule.to_row if j == 0 else row(rule.rule, i, j)
    if isinstance(rule, Distance):
        return min(abs(j - i), rule.clip)
    assert isinstance(rule, Clip)
    return max(-rule.clip, min(rule.clip, j - i)) + rule.clip


def pick(tensor: torch.Tensor, b: int, h: int) -> torch.Tensor:
    tensor = tensor if tensor.dim() == 4 else tensor[None]
    return tensor[b if tensor.shape[0] > 1 else 0, h if tensor.shape[1] > 1 else 0]


def looped(terms, q, k, v, positions, s) -> torch.Tensor:
    """The order of arithmetic of `locant.terms`, pair by pair."""
    query, key = (ids.expand(B, -1).tolist() for ids in (positions.query, positions.key))
    content, bias = torch.zeros(B, H, Q, J, dtype=torch.float64), torch.zeros(B, H, Q, J, dtype=torch.float64)
    scales = s.expand(B, Q).tolist() if isinstance(s, torch.Tensor) else [[s] * Q] * B
    for b in range(B):
        for h in range(H):
            for t in range(Q):
                for u in range(J):
                    i, j, scale = query[b][t], key[b][u], scales[b][t]
                    a, c = q[b, h, t], k[b, h, u]
                    at = lambda term, i=i, j=j, h=h: term.table[h if len(term.table) > 1 else 0, row(term.rule, i, j)]  # noqa: E731
                    gate = [at(x) for x in terms if isinstance(x, RelativeGate)]
                    total = (a * c * (gate[0] if gate else 1)).sum() * scale
                    for term in (x for x in terms if isinstance(x, RelativeScale)):
                        total = total * at(term)
                    added = {True: 0.0, False: 0.0}
                    for term in terms:
                        if isinstance(term, RelativeBias):
                            number = at(term)
                        elif isinstance(term, RelativeQuery):
                            number = a @ at(term)
                        elif isinstance(term, RelativeKey):
                            number = c @ at(term)
                        elif isinstance(term, PairBias):
                            number = pick(
                                term.bias if isinstance(term.bias, torch.Tensor) else term.bias(positions), b, h
                            )[t, u]
                        elif isinstance(term, LowRankBias):
                            number = pick(term.query, b, h)[t] @ pick(term.key, b, h)[u]
                        else:
                            continue
                        added[term.scaled] += number
                    content[b, h, t, u] = total + scale * added[True]
                    bias[b, h, t, u] = added[False]
    for term in terms:
        if isinstance(term, LogitMap):
            content, bias = term.fn(content, bias, positions, None), torch.zeros_like(bias)
    weights = (content + bias).softmax(-1)
    for term in terms:
        if isinstance(term, WeightScale):
            factor = term.scale if isinstance(term.scale, torch.Tensor) else term.scale(positions)
            weights = weights * (factor if factor.dim() == 4 else factor[None])
    out = weights @ v
    for term in terms:
        if isinstance(term, RelativeValue):
            for b in range(B):
                for h in range(H):
                    table = term.table[h if len(term.table) > 1 else 0]
                    rows = torch.tensor([[row(term.rule, i, j) for j in key[b]] for i in query[b]])
                    out[b, h] += (weights[b, h, :, :, None] * table[rows]).sum(1)
    return out


@pytest.mark.parametrize("names", [*((name,) for name in TERMS), *TOGETHER], ids=" + ".join)
def test_terms_do_what_their_equations_say(names):
    q, k, v = operands()
    terms = tuple(TERMS[name]() for name in names)
    per_row = 0.3 + normal(B, 1, Q, seed=14).abs()
    for positions, factor in (
        (Positions.arange(Q, J), 0.7),
        (Positions.from_ids(torch.randint(9, (B, Q)), torch.randint(9, (B, J))), per_row[0, 0]),
        (Positions.from_ids(torch.randint(9, (Q,)), torch.randint(9, (J,))), per_row),
    ):
        s = (factor[:, 0] if isinstance(factor, torch.Tensor) and factor.dim() == 3 else factor) / math.sqrt(D)
        have = attention(q, k, v, terms, positions, logit_factor=factor, backend="reference")
        torch.testing.assert_close(have, looped(terms, q, k, v, positions, s), rtol=0, atol=1e-12)
        auto = attention(q, k, v, terms, positions, logit_factor=factor)
        torch.testing.assert_close(auto, have, rtol=0, atol=1e-12)


@pytest.mark.parametrize("elements", [1, 700, 5000])
def test_the_gate_is_the_same_in_any_blocks(monkeypatch, elements):
    q, k, v = (t.requires_grad_() for t in operands())
    term = RelativeGate(normal(H, 7, D, seed=5).requires_grad_(), Clip(3))
    results = []
    for size in (1 << 23, elements):
        monkeypatch.setattr(locant.terms, "GATE_BLOCK_ELEMENTS", size)
        out = attention(q, k, v, (term,), backend="reference")
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, term.table))))
    for have, want in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [n for n in TERMS if not n.startswith(("map", "low"))])
def test_wide_tables_serve_narrow_operands(name, dtype):
    q, k, v = operands(dtype)
    out = attention(q, k, v, (TERMS[name](),), backend="reference")
    assert out.dtype == dtype
    want = attention(*(t.double() for t in (q, k, v)), (TERMS[name](),), backend="reference")
    torch.testing.assert_close(out.double(), want, rtol=0, atol=30 * torch.finfo(dtype).eps * want.abs().max().item())


def test_a_pair_bias_is_never_expanded_over_the_batch():
    # https://github.com/huggingface/transformers/pull/47014
    assert PairBias(normal(H, Q, J)).tensor(Positions.arange(Q, J)).shape == (1, H, Q, J)
    assert RelativeBias(normal(H, 7), Clip(3)).pairs(Positions.arange(Q, J)).shape == (1, H, Q, J)


@pytest.mark.parametrize(
    "term, message",
    [
        (RelativeScale(normal(2, 7), Clip(3)), "relative scale: the table serves 2 heads but q has 3"),
        (RelativeBias(normal(3, 6), Clip(3)), "relative bias: the table has 6 rows but its rule asks for 7"),
        (RelativeQuery(normal(3, 7, 6), Clip(3)), "relative query: .* head_dim=6 but q, k have head_dim=8"),
        (RelativeKey(normal(3, 8, 8), Clip(3)), "relative key: the table has 8 rows but its rule asks for 7"),
        (RelativeGate(normal(4, 7, 8), Clip(3)), "relative gate: the table serves 4 heads"),
        (RelativeValue(normal(3, 7, 8), Clip(3)), "relative value: .* head_dim=8 but q, k have head_dim=5"),
        (PairBias(normal(H, J, Q)), r"the bias has shape \(3, 11, 7\) but the logits are \(2, 3, 7, 11\)"),
        (PairBias(normal(4, 1, Q, J)), r"the bias has shape \(4, 1, 7, 11\)"),
        (LowRankBias(normal(1, 1, J, 2), normal(1, 1, J, 2)), r"serve \(11, 11\) .* q and k have \(7, 11\)"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_terms_that_do_not_fit_are_refused(term, message):
    with pytest.raises(ValueError, match=message):
        attention(*operands(), (term,))


def test_two_vector_gates_are_refused():
    with pytest.raises(ValueError, match="got 2 vector gates"):
        attention(*operands(), (TERMS["gate"](), TERMS["gate, one head"]()))


@pytest.mark.parametrize("kind", [RelativeQuery, RelativeKey, RelativeValue])
@pytest.mark.parametrize("clip", [3, 10, 11, 40])
def test_rows_out_of_reach_are_left_out_and_change_nothing(kind, clip, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=generator, dtype=torch.float64) for n in (7, 11, 11))
    table = torch.randn(3, 2 * clip + 1, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    gaps = Positions.from_ids(torch.tensor([[0, 3, 4, 5, 6, 7, 9]] * 2), torch.arange(11).expand(2, -1))
    for positions in (Positions.arange(7, 11), gaps):
        short, rule = locant.terms.within_reach(table, Clip(clip), positions)
        assert short.shape[1] == rule.num_rows == 2 * min(clip, 10) + 1
        results = []
        for whole in (False, True):
            with monkeypatch.context() as patch:
                if whole:
                    patch.setattr(locant.terms, "within_reach", lambda table, rule, positions: (table, rule))
                out = attention(q, k, v, (kind(table, Clip(clip)),), positions, backend="reference")
            results += [out, *torch.autograd.grad(out.square().sum(), table)]
        assert torch.allclose(results[0], results[2], atol=1e-12)
        assert torch.allclose(results[1], results[3], atol=1e-12)
