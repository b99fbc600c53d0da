"""The door to the backends: masks, causality, grouped queries, dropout, weights, choice, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from locant import Positions, attention, explain
from locant.backends import BACKENDS, dropout
from locant.terms import Clip, LogitMap, PairBias, RelativeBias, RelativeGate, RelativeKey, RelativeQuery, RelativeValue
from tests.unchecked import unchecked

B, H, Q, J, D, E = 2, 3, 7, 11, 8, 5


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(num_queries: int = Q, num_keys: int = J) -> tuple[torch.Tensor, ...]:
    return normal(B, H, num_queries, D, seed=1), normal(B, H, num_keys, D, seed=2), normal(B, H, num_keys, E, seed=3)


def bias() -> RelativeBias:
    return RelativeBias(normal(H, 7, seed=4), Clip(3))


ALL = [name for name in BACKENDS if name not in explain(*operands(), (bias(),)).refused]  # those that know float64


def same(have, want, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backend", ALL)
def test_plain_attention_is_the_textbook_line(backend):
    q, k, v = operands()
    logits = torch.einsum("bhid,bhjd->bhij", q, k)
    same(attention(q, k, v, backend=backend), (logits / math.sqrt(D)).softmax(-1) @ v)
    same(attention(q, k, v, scale=0.3, logit_factor=2.0, backend=backend), (0.6 * logits).softmax(-1) @ v)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("shape", [(B, 1, 1, J), (1, H, Q, 1), (Q, J), (J,), (H, 1, J), (B, H, Q, J)], ids=str)
def test_masks_of_every_broadcastable_shape(backend, shape):
    q, k, v = operands()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.6
    mask.view(-1)[0] = False
    for terms in ((), (bias(),)):
        have = attention(q, k, v, terms, mask=mask, backend=backend)
        full = mask.expand(B, H, Q, J)
        logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(D)
        if terms:
            logits = logits + bias().pairs(Positions.arange(Q, J))
        weights = logits.exp() * full
        total = weights.sum(-1, keepdim=True)
        same(have, torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ v)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("sizes", [(Q, J), (1, J), (J, J)], ids=str)
def test_causality_is_decided_once_and_holds_beside_a_mask(backend, sizes):
    # https://github.com/huggingface/transformers/issues/36150: is_causal without effect when a mask is passed
    q, k, v = operands(*sizes)
    past = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
    same(attention(q, k, v, causal=True, backend=backend), attention(q, k, v, mask=past, backend="reference"))
    padding = torch.ones(B, 1, 1, sizes[1], dtype=torch.bool)
    padding[1, ..., :4] = False
    have = attention(q, k, v, (bias(),), causal=True, mask=padding, backend=backend)
    same(have, attention(q, k, v, (bias(),), mask=past & padding, backend="reference"))
    changed = v.clone()
    changed[:, :, -1] += 100  # the future of all queries but the last
    same(attention(q, k, changed, causal=True, backend=backend)[:, :, :-1], attention(q, k, v, causal=True)[:, :, :-1])


@pytest.mark.parametrize("backend", ALL)
def test_documents_are_kept_apart_on_every_backend(backend):
    # https://github.com/huggingface/transformers/pull/46333
    q, k, v = operands(J, J)
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 10 + [1]])
    out = attention(q, k, v, (bias(),), Positions.packed(documents), backend=backend)
    same(out[:1, :, :4], attention(q[:1, :, :4], k[:1, :, :4], v[:1, :, :4], (bias(),)))
    same(out[1:, :, 10:], v[1:, :, 10:])
    one_row = Positions.packed(documents[0])
    assert attention(q, k, v, (), one_row, backend=backend).shape == (B, H, J, E)


@pytest.mark.parametrize("backend", ALL)
def test_fewer_key_heads_are_shared_by_groups_of_query_heads(backend):
    q, k, v = normal(B, 6, Q, D, seed=1), normal(B, 2, J, D, seed=2), normal(B, 2, J, E, seed=3)
    table = normal(6, 7, D, seed=4)
    terms = (RelativeQuery(table, Clip(3)), RelativeKey(table, Clip(3)))
    have = attention(q, k, v, terms, backend=backend)
    for head in range(6):
        own = tuple(type(t)(table[head : head + 1], Clip(3)) for t in terms)
        want = attention(q[:, head : head + 1], k[:, [head // 3]], v[:, [head // 3]], own, backend="reference")
        same(have[:, head : head + 1], want)


@pytest.mark.parametrize("backend", ALL)
def test_one_number_for_each_query_row_scales_its_logits(backend):
    q, k, v = operands()
    terms = (RelativeQuery(normal(1, 7, D, seed=6), Clip(3)), bias())
    for factor in (torch.linspace(0.2, 2, Q, dtype=torch.float64), normal(B, 1, Q, seed=7).abs()):
        have = attention(q, k, v, terms, logit_factor=factor, backend=backend)
        for t in range(Q):
            for b in range(B):
                number = factor.expand(B, 1, Q)[b, 0, t].item()
                same(have[b, :, t], attention(q, k, v, terms, logit_factor=number, backend="reference")[b, :, t])


def test_weights_come_with_the_output_and_sum_to_one():
    q, k, v = operands()
    mask = torch.ones(Q, J, dtype=torch.bool)
    mask[2] = False
    out, weights = attention(q, k, v, (bias(),), mask=mask, return_weights=True)
    same(weights @ v, out)
    same(weights.sum(-1), torch.ones(B, H, Q, dtype=torch.float64).index_fill(-1, torch.tensor([2]), 0.0))


def many(q, k, v, terms, dropout: float, backend: str) -> torch.Tensor:
    """The mean output of 500 draws."""
    q, k, v = (t.repeat(500, 1, 1, 1) for t in (q, k, v))
    return attention(q, k, v, terms, dropout=dropout, backend=backend).unflatten(0, (500, B)).mean(0)


def test_dropout_falls_on_weights_and_the_value_term_sees_what_is_left():
    q, k, v = operands()
    table = normal(1, 7, E, seed=8)
    terms = (bias(), RelativeValue(table, Clip(3)))
    assert attention(q, k, v, terms, dropout=1.0, backend="reference").abs().max() == 0
    torch.manual_seed(3)
    out, weights = attention(q, k, v, terms, dropout=0.4, return_weights=True, backend="reference")
    torch.manual_seed(3)
    seed, groups = dropout.draw_seed(0.4), torch.arange(B * H)
    kept = weights * dropout.kept(seed, 0.4, groups, torch.arange(Q), J, torch.float64).view(B, H, Q, J)
    assert {round(x, 6) for x in (kept / weights).flatten().tolist()} == {0.0, round(1 / 0.6, 6)}
    rows = Clip(3).rows(Positions.arange(Q, J))
    same(out, kept @ v + (kept[..., None] * table[0][rows]).sum(-2))
    same(many(q, k, v, terms, 0.4, "reference"), attention(q, k, v, terms), tolerance=0.3)


@pytest.mark.parametrize("backend", ["blocked", "native"])
def test_every_backend_drops_the_same_weights(backend):
    q, k, v = (t.float().requires_grad_() for t in operands())
    terms = (
        RelativeQuery(normal(1, 7, D, seed=6).float().requires_grad_(), Clip(3)),
        RelativeBias(normal(H, 7, seed=7).float().requires_grad_(), Clip(3)),
    )
    leaves = [q, k, v, terms[0].table, terms[1].table]
    if backend in explain(q, k, v, terms, dropout=0.4).refused:
        pytest.skip("no C++ compiler here")
    found = []
    for name in ("reference", backend):
        torch.manual_seed(5)
        out = attention(q, k, v, terms, dropout=0.4, backend=name)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for want, have in zip(*found, strict=True):
        same(have, want, tolerance=1e-5 * want.abs().max().item())
    torch.manual_seed(6)
    assert (attention(q, k, v, terms, dropout=0.4, backend=backend) - found[0][0]).detach().abs().max() > 0.1


@pytest.mark.parametrize("backend", ALL)
def test_dropout_is_applied_or_refused(backend):
    q, k, v = operands()
    if backend in explain(q, k, v, (bias(),), dropout=0.5).refused:
        with pytest.raises(ValueError, match=f"{backend!r} cannot: .*dropout"):
            attention(q, k, v, (bias(),), dropout=0.5, backend=backend)
        return
    torch.manual_seed(0)
    assert (
        attention(q, k, v, (bias(),), dropout=0.5, backend=backend) - attention(q, k, v, (bias(),))
    ).abs().max() > 0.1
    same(many(q, k, v, (bias(),), 0.5, backend), attention(q, k, v, (bias(),)), tolerance=0.35)


@pytest.mark.parametrize("backend", ALL)
def test_large_activations_stay_finite_in_half_precision(backend):
    # https://github.com/microsoft/DeBERTa/issues/77: fp16 overflow of the three-term logits
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (100 * t.to(dtype) for t in operands())
        table = 100 * normal(1, 7, D, seed=9).to(dtype)
        terms = (RelativeQuery(table, Clip(3)), RelativeKey(table, Clip(3)))
        out = attention(0.1 * q, 0.1 * k, v, tuple(type(t)(0.1 * table, Clip(3)) for t in terms), backend=backend)
        assert out.isfinite().all()


def test_the_scale_is_applied_before_the_product():
    # https://github.com/microsoft/DeBERTa/issues/77: q.k itself would pass 65504, the scaled logit does not
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert not (q @ q.transpose(-1, -2)).isfinite().all()
    assert attention(q, q, q, backend="reference").isfinite().all()


def test_a_bias_shared_by_rows_is_equal_after_the_softmax():
    # https://github.com/mosaicml/llm-foundry/issues/186: -m (i - j) and m j differ by a row constant
    q, k, v = operands(J, J)
    relative = PairBias(lambda p: 0.3 * p.offsets()[None].double())
    by_key = PairBias(lambda p: (0.3 * p.key.double()).expand(1, J, J))
    same(attention(q, k, v, (relative,), causal=True), attention(q, k, v, (by_key,), causal=True))


@pytest.mark.parametrize("shape", [(H,), (B, H)], ids=str)
def test_slopes_for_each_head_or_each_row_and_head(shape):
    # https://github.com/Dao-AILab/flash-attention/issues/1585
    q, k, v = operands(J, J)
    slopes = normal(*shape, seed=10)
    have = attention(q, k, v, (PairBias(lambda p: -slopes[..., None, None] * p.offsets().abs().double()),))
    for b in range(B):
        for h in range(H):
            m = slopes[h] if len(shape) == 1 else slopes[b, h]
            logits = q[b, h] @ k[b, h].T / math.sqrt(D)
            distance = (torch.arange(J)[:, None] - torch.arange(J)).abs()
            same(have[b, h], (logits - m * distance).softmax(-1) @ v[b, h])


def test_learned_biases_take_the_fused_path_with_their_gradients():
    # https://github.com/lucidrains/x-transformers/issues/347, https://github.com/meta-pytorch/attention-gym/issues/20
    table = normal(H, 7, seed=4).requires_grad_()
    found = []
    for backend in ("sdpa", "reference"):
        out = attention(*operands(), (RelativeBias(table, Clip(3)),), backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), table)[0])
    same(*found)


# --- choice and refusals ---


def test_explain_says_which_and_why_not():
    q, k, v = operands()
    plain = explain(q, k, v, (bias(),))
    assert str(plain).startswith(f"{plain.backend}: chosen") and "sdpa" not in plain.refused
    gated = explain(q, k, v, (RelativeGate(normal(1, 7, D), Clip(3)),))
    assert gated.backend != "sdpa" and "RelativeGate" in gated.refused["sdpa"]
    assert "sdpa: cannot, RelativeGate" in str(gated)
    mapped = explain(q, k, v, (LogitMap(lambda content, bias, positions, allowed: content),), backend="reference")
    assert mapped.backend == "reference"
    assert explain(q, k, v, return_weights=True).refused["sdpa"] == "it does not return weights"


def test_no_backend_falls_back_silently():
    with pytest.raises(ValueError, match="backend 'sdpa' cannot: RelativeGate does not lower"):
        attention(*operands(), (RelativeGate(normal(1, 7, D), Clip(3)),), backend="sdpa")
    with pytest.raises(ValueError, match="unknown backend 'flash'; choose 'auto' or one of 'reference'"):
        attention(*operands(), backend="flash")


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(k=normal(B, H, J, 6)), ValueError, "q has head_dim=8 but k has head_dim=6"),
        (dict(k=normal(B, 2, J, D), v=normal(B, 2, J, E)), ValueError, "3 query heads cannot share 2 key heads"),
        (dict(mask=torch.ones(Q, J)), TypeError, r"dtype is torch\.float32 but True/False is needed"),
        (
            dict(mask=torch.ones(B, J, dtype=torch.bool)),
            ValueError,
            r"shape \(2, 11\) cannot be broadcast .*\(2, 3, 7, 11\)",
        ),
        (dict(mask=torch.ones(1, B, H, Q, J, dtype=torch.bool)), ValueError, r"shape \(1, 2, 3, 7, 11\) cannot be"),
        (
            dict(positions=Positions.arange(Q, 9)),
            ValueError,
            r"key ids have shape \(9,\) but attention has 11 key tokens",
        ),
        (dict(positions=Positions.arange(5, J)), ValueError, r"query ids have shape \(5,\) .* give \[7\] or \[2 7\]"),
        (
            dict(positions=Positions.from_ids(torch.arange(J).expand(3, J)[:, -Q:], torch.arange(J).expand(3, J))),
            ValueError,
            r"query ids have shape \(3, 7\) .* in a batch of 2",
        ),
    ],
    ids=["width", "groups", "dtype", "padding", "axes", "keys", "queries", "batch"],
)
def test_what_does_not_fit_is_refused(change, error, message):
    given = dict(zip("qkv", operands(), strict=True)) | change
    with pytest.raises(error, match=message):
        attention(**given)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=normal(H, Q, D)), r"q has shape \(3, 7, 8\); give four axes"),
        (dict(v=normal(B, H, J + 1, E)), r"k \(2, 3, 11, 8\) and v \(2, 3, 12, 5\) do not belong together"),
        (dict(v=normal(B, 1, J, E)), r"v \(2, 1, 11, 5\) do not belong together"),
        (dict(k=normal(1, H, J, D), v=normal(1, H, J, E)), r"q \(2, 3, 7, 8\), k \(1, 3, 11, 8\)"),
        (dict(k=normal(B, 0, J, D), v=normal(B, 0, J, E)), "3 query heads cannot share 0 key heads"),
        (dict(logit_factor=torch.ones(Q + 1)), r"logit_factor has shape \(8,\); give a number, \[7\] or \[2, 1, 7\]"),
        (dict(dropout=1.5), r"dropout=1\.5 is no probability"),
        (dict(dropout=-0.1), r"dropout=-0\.1 is no probability"),
    ],
    ids=["axes", "tokens", "heads", "batch", "no heads", "factor", "above", "below"],
)
def test_what_kernels_would_broadcast_is_refused(backend, change, message):
    given = dict(zip("qkv", operands(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        unchecked(attention)(**given, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa", "blocked"])
@pytest.mark.parametrize("sizes", [(0, 0), (0, 4), (4, 0)])
def test_without_a_pair_the_output_is_empty_or_zero(backend, sizes):
    queries, keys = sizes
    q, k, v = normal(B, H, queries, D).requires_grad_(), normal(B, H, keys, D), normal(B, H, keys, E)
    positions = Positions(torch.arange(queries), torch.arange(keys), span=3, length=4, contiguous=queries <= keys)
    table, rule = normal(H, 7, seed=1).requires_grad_(), Clip(3)
    terms = (RelativeBias(table, rule), RelativeQuery(normal(1, 7, D), rule), RelativeKey(normal(1, 7, D), rule))
    out = attention(q, k, v, terms, positions, backend=backend)
    out.sum().backward()
    assert out.shape == (B, H, queries, E) and not out.any() and table.grad is not None and not table.grad.any()
