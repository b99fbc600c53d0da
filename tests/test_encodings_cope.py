from __future__ import annotations

import pytest
import torch
from torch import Tensor

import locant
import locant.hf
from locant.encodings.cope import Cope
from tests.hf_models import LAYERS, first, host, noisy, tokens

B, H, N, D = 2, 3, 7, 8


def cope(seed: int = 1, **options) -> Cope:
    encoding = locant.load("cope", head_dim=D, **options)
    assert isinstance(encoding, Cope)
    torch.manual_seed(seed)
    torch.nn.init.normal_(encoding.table)
    return encoding


def qkv(seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, H, N, D) for _ in range(3))
    return q, k, v


def attend(encoding: Cope, q: Tensor, k: Tensor, v: Tensor, **how) -> Tensor:
    positions = locant.Positions.arange(q.shape[2], k.shape[2])
    out = locant.attention(q, k, v, encoding.terms(positions, locant.Layer(q, k)), positions, **how)
    assert isinstance(out, Tensor)
    return out


def test_a_later_key_is_not_counted():
    encoding, (q, k, v) = cope(), qkv()
    other = k.clone()
    other[:, :, 4:] += 3
    before, after = (attend(encoding, q, keys, v, causal=True) for keys in (k, other))
    assert torch.equal(before[:, :, :4], after[:, :, :4])
    assert (before[:, :, 4:] - after[:, :, 4:]).abs().max() > 1e-2


def test_padding_is_not_counted():
    encoding, (q, k, v) = cope(), qkv()
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[..., :2] = False
    other = k.clone()
    other[:, :, :2] += 3
    before, after = (attend(encoding, q, keys, v, causal=True, mask=mask) for keys in (k, other))
    assert torch.equal(before, after)


def test_equal_rows_are_no_position():
    encoding, (q, k, v) = cope(), qkv()
    with torch.no_grad():
        encoding.table.copy_(encoding.table[:1].expand_as(encoding.table))
    plain = locant.attention(q, k, v, causal=True)
    torch.testing.assert_close(attend(encoding, q, k, v, causal=True), plain)


def test_open_gates_count_tokens_as_a_clipped_table():
    encoding, (q, _, _) = cope(max_positions=5), qkv()
    past = torch.ones(N, N, dtype=torch.bool).tril()
    found = encoding.bias(q, torch.full((B, H, N, N), 40.0), past)
    count = (torch.arange(N)[:, None] - torch.arange(N) + 1).clamp(0, 4)
    want = torch.einsum("bhid,ijd->bhij", q, encoding.table[count])
    torch.testing.assert_close(found.tril(), want.tril())


def test_the_table_can_stand_inside_the_scale():
    encoding, inside = cope(), cope(scaled=True)
    q, k, _ = qkv()
    logits, past = q @ k.transpose(-1, -2), torch.ones(N, N, dtype=torch.bool).tril()
    torch.testing.assert_close(encoding.bias(q, logits, past) * D**-0.5, inside.bias(q, logits, past))


def test_without_a_causal_mask_it_is_refused():
    encoding, (q, k, v) = cope(), qkv()
    some = torch.ones(1, 1, N, N, dtype=torch.bool)
    for mask in (None, some, some.tril(1)):
        with pytest.raises(ValueError, match=f"cope: {N} queries may attend to later keys"):
            attend(encoding, q, k, v, mask=mask)
    assert torch.equal(attend(encoding, q, k, v, mask=some.tril()), attend(encoding, q, k, v, causal=True))
    last = attend(encoding, q[:, :, -1:], k, v)  # one query with a cache: it sees nothing later
    torch.testing.assert_close(last, attend(encoding, q, k, v, causal=True)[:, :, -1:])


def test_an_encoder_is_told_so_when_it_is_built():
    with pytest.raises(ValueError, match="cope: is defined under a causal mask alone, but causal=False"):
        locant.load("cope", head_dim=8, causal=False)
    with pytest.raises(ValueError, match="cope: is defined under a causal mask alone"):
        locant.load("alibi+cope", num_heads=2, head_dim=8, causal=False)
    assert locant.load("cope", head_dim=8, causal=True).sites == ("terms",)
    for given in ("cope", locant.load("cope", head_dim=8), locant.stack("cope", LAYERS, head_dim=8)):
        with pytest.raises(ValueError, match="cope: is defined under a causal mask alone, but causal=False"):
            locant.hf.attach(host("bert"), given)


def test_only_the_reference_backend_has_whole_rows():
    encoding, (q, k, v) = cope(), qkv()
    positions = locant.Positions.arange(N)
    found = locant.explain(q, k, v, encoding.terms(positions, locant.Layer(q, k)), positions)
    assert found.backend == "reference" and "LogitMap" in found.refused["blocked"]


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="cope: max_positions=0 leaves no rows"):
        locant.load("cope", head_dim=8, max_positions=0)


def test_decoders_train_and_generate_with_it():
    for family in ("gpt2", "llama"):
        model, ids = noisy(host(family), "cope", max_positions=9), tokens(2, 7)
        model(ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        full = first(model(torch.cat((ids, ids), 1)))[:, :7]
        torch.testing.assert_close(full, first(model(ids)), atol=1e-5, rtol=0)
        answer = model.generate(ids, max_new_tokens=4, do_sample=False)
        again = model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)
        assert torch.equal(answer, again)
