"""TUPE, BERT-A^d and BERT-R: what acts and what cannot, sharing, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer
from tests.unchecked import build

SIZES = {"num_heads": 3, "head_dim": 8, "model_dim": 10, "max_length": 24}


def attend(encoding, positions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 3, positions.num_keys, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    terms = encoding.terms(encoding.prepare(positions), Layer(q, k))
    return locant.attention(q, k, v, terms, positions, logit_factor=encoding.logit_factor)


def wide(name, **options):
    encoding = locant.load(name, **SIZES, **options).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(0, 0.5)
    return encoding


@pytest.mark.parametrize("name", ["tupe_a", "tupe_r"])
def test_theta_1_cannot_act_and_theta_2_does(name):
    encoding, positions = wide(name), Positions.arange(9)
    want = attend(encoding, positions)
    want.square().sum().backward()
    slope = encoding.table.grad
    assert slope is not None and slope[0].abs().max() < 1e-12 and slope[1].abs().max() > 1e-6
    for row, acts in ((0, False), (1, True)):
        with torch.no_grad():
            encoding.table[row] += torch.linspace(-1, 2, 10)  # LayerNorm would take a constant out again
        changed = (attend(encoding, positions) - want).abs().max().item()
        assert (changed > 1e-3) == acts and (acts or changed < 1e-12)


def test_the_bucket_of_cls_to_others_is_as_dead_and_the_other_acts():
    encoding, positions = wide("tupe_r"), Positions.arange(9)
    attend(encoding, positions).square().sum().backward()
    assert encoding.buckets.shape == (3, 33)
    slope = encoding.buckets.grad
    assert slope is not None and slope[:, 16].abs().max() < 1e-12 and slope[:, 32].abs().min() > 1e-6


def test_tied_and_untied_agree_where_no_cls_is():
    # https://github.com/guolinke/TUPE/issues/12: both readings of the reset are offered
    untied, tied = wide("tupe_r"), locant.load("tupe_r", **SIZES, untie_cls=False).double()
    part = locant.load("tupe_r", **SIZES, untie_buckets=False).double()
    for other in (tied, part):
        state = untied.state_dict()
        other.load_state_dict(state | {"buckets": state["buckets"][:, :32]})
    a, b, c = (e.correlation(Positions.arange(7)) for e in (untied, tied, part))
    assert torch.equal(a[..., 1:, 1:], b[..., 1:, 1:]) and torch.equal(a[..., 1:, 1:], c[..., 1:, 1:])
    for other in (b, c):
        assert (a[..., 0, :] - other[..., 0, :]).abs().min() > 0 and (a[..., 1:, 0] - other[..., 1:, 0]).abs().min() > 0
    assert (b[..., 1:, 0] - c[..., 1:, 0]).abs().min() > 0


def test_no_bias_makes_tupe_r_tupe_a():
    r, a = wide("tupe_r"), locant.load("tupe_a", **SIZES).double()
    torch.nn.init.zeros_(r.buckets)
    a.load_state_dict({k: v for k, v in r.state_dict().items() if k != "buckets"})
    assert torch.equal(attend(r, Positions.arange(9)), attend(a, Positions.arange(9)))


def test_named_special_tokens_take_the_place_of_id_zero():
    encoding = wide("tupe_a")
    ids = torch.arange(5)
    special = ids == 3
    found = encoding.correlation(Positions(ids, ids, 4, 5, query_special=special, key_special=special))
    from_cls, to_cls = encoding.thetas()
    torch.testing.assert_close(found[0, :, 3], from_cls[:, None].expand(3, 5))
    torch.testing.assert_close(found[0, :, :3, 3], to_cls[:, None].expand(3, 3))
    torch.testing.assert_close(found[0, :, 0, 0], wide_like(encoding).correlation(Positions.arange(1))[0, :, 0, 0])


def wide_like(encoding):
    tied = locant.load("tupe_a", **SIZES, untie_cls=False).double()
    tied.load_state_dict(encoding.state_dict())
    return tied


def test_the_correlation_is_one_tensor_for_all_layers_and_rows():
    # https://github.com/huggingface/transformers/pull/47014: never expanded over the batch, once per forward
    for name, what, shape in (("tupe_a", "bias", (1, 3, 7, 7)), ("t5", "table", (3, 257))):
        layers = locant.stack(name, 4, **SIZES)
        positions = layers.prepare(Positions.arange(7))
        q = torch.zeros(8, 3, 7, 8)
        found = [getattr(layer.terms(positions, Layer(q, q))[0], what) for layer in layers]
        assert found[0].shape == shape and all(one is found[0] for one in found)


def test_counts_of_bert_base_are_the_papers():
    sizes = {"num_heads": 12, "head_dim": 64, "model_dim": 768, "max_length": 512}
    count = {
        n: sum(w.numel() for w in locant.stack(n, 12, **sizes).parameters()) for n in ("tupe_a", "tupe_r", "bert_r")
    }
    assert count == {"tupe_a": 1_576_704, "tupe_r": 1_577_100, "bert_r": 393_216 + 384}


def test_bert_ad_with_the_layers_projections_is_bert_a():
    encoding = locant.load("bert_ad", **SIZES, layer_norm=False, logit_factor=1.0).double()
    x = torch.randn(2, 7, 10, dtype=torch.float64)

    def heads(rows, projection):
        return projection(rows).unflatten(-1, (3, 8)).transpose(1, 2)

    bare = [
        torch.nn.functional.linear(x, w.weight).unflatten(-1, (3, 8)).transpose(1, 2)
        for w in (encoding.query_projection, encoding.key_projection)
    ]
    q, k = encoding.query_key(*bare, Positions.arange(7))
    added = x + encoding.table[:7]
    torch.testing.assert_close(q, heads(added, encoding.query_projection))
    torch.testing.assert_close(k, heads(added, encoding.key_projection))


@pytest.mark.parametrize("name", ["tupe_a", "tupe_r"])
def test_an_unknown_theta_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: unknown theta='free'; choose 'vector'"):
        build(name, **SIZES, theta="free")


@pytest.mark.parametrize("name", ["tupe_a", "tupe_r", "bert_ad", "bert_r"])
def test_ids_past_the_table_are_refused_also_without_the_entrance(name):
    encoding = locant.load(name, **SIZES)
    with pytest.raises(ValueError, match=r"positions reach 25 but the table has 24 rows"):
        encoding.embed(torch.zeros(1, 25, 10), encoding.prepare(Positions.arange(25)))


def test_an_odd_number_of_buckets_is_refused():
    with pytest.raises(ValueError, match="num_buckets=9"):
        locant.load("tupe_r", **SIZES, num_buckets=9)
