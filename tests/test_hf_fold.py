"""locant.hf.fold: content-free parts become constants, outputs stay, and what cannot be folded is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import locant
import locant.hf
from locant.hf.fold import Folded, biases, fold, foldable
from tests.hf_models import HEADS, attached, first, host, noisy, tokens

FREE = ["alibi", "t5", "tisa", "tupe_a", "tupe_r"]
MIXED = ["bert_r", "absolute+t5", "huang_m4+tisa"]


def inputs(length: int = 9) -> dict[str, Any]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :2] = 0  # left padding: ids are counted over the mask
    return {"input_ids": tokens(2, length), "attention_mask": mask}


@pytest.mark.parametrize("name", FREE + MIXED)
def test_folded_outputs_are_equal(name: str) -> None:
    model = noisy(host("bert"), name)
    cases = [inputs(), {"input_ids": tokens(2, 11)}, {"input_ids": tokens(1, 1)}]
    cases.append({"input_ids": tokens(2, 9), "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)})
    want = [first(model(**case)) for case in cases]
    assert locant.hf.fold(model, 11) is model
    for case, out in zip(cases, want, strict=True):
        assert torch.allclose(first(model(**case)), out, atol=1e-6)


@pytest.mark.parametrize("options", [{"scaled": True}, {"scaled": False}])
def test_a_bias_inside_the_scale_stays_inside(options: dict[str, Any]) -> None:
    model = noisy(host("bert"), "tisa", **options)
    want = first(model(**inputs()))
    locant.hf.fold(model, 11)
    layer = attached(model).layers()[0]
    assert (layer.scaled_bias is None) != options["scaled"] and (layer.bias is None) == options["scaled"]
    assert torch.allclose(first(model(**inputs())), want, atol=1e-6)


def test_layers_that_share_get_one_constant_and_others_one_each() -> None:
    shared, separate = noisy(host("bert"), "t5"), noisy(host("bert"), "tisa")
    for model, count in ((shared, 1), (separate, 2)):
        locant.hf.fold(model, 7)
        layers = attached(model).layers()
        assert len({id(layer) for layer in layers}) == count
        assert all(tuple(layer.bias.shape) == (HEADS, 7, 7) for layer in layers)
        assert not list(attached(model).parameters())


def test_parts_that_read_content_stay_and_still_learn() -> None:
    model = noisy(host("bert"), "huang_m4+t5")
    locant.hf.fold(model, 9)
    names = [part.name for part in attached(model).layers()[0].parts()]
    assert names == ["huang_m4", "t5 (folded)"]
    first(model(**inputs())).sum().backward()
    assert all(p.grad is not None for p in attached(model).parameters())


def test_decoders_with_a_cache_fold_too() -> None:
    model = noisy(host("gpt2"), "t5")
    ids = tokens(2, 8)
    want = model(ids).logits
    locant.hf.fold(model, 8)
    step = model(ids[:, :5], use_cache=True)
    more = model(ids[:, 5:], cache=step.cache).logits
    assert torch.allclose(torch.cat((step.logits, more), 1), want, atol=1e-5)


def test_the_constant_is_the_bias_of_the_paper() -> None:
    tisa = locant.load("tisa", num_heads=3, kernels=2)
    outside, inside = biases(tisa, locant.Positions.arange(5))
    assert inside is None and outside is not None
    a, b, c = tisa.amplitude, tisa.sharpness, tisa.center
    for i in range(5):
        for j in range(5):
            want = (a * torch.exp(-b.abs() * (j - i - c) ** 2)).sum(0)
            assert torch.allclose(outside[:, i, j], want, atol=1e-6)


def test_past_the_folded_length_is_an_error() -> None:
    model = noisy(host("bert"), "alibi")
    locant.hf.fold(model, 7)
    assert locant.hf.capacity(model) == 7
    with pytest.raises(
        ValueError, match=r"reach 8 but it was folded for 7; truncate to 7 .* locant\.hf\.fold\(model, 8\)"
    ):
        model(tokens(1, 8))
    with pytest.raises(
        ValueError, match=r"'alibi \(folded\)' was attached as an object.*; it was folded for serving, so do"
    ):
        locant.hf.save(model, "nowhere")


def test_copies_moves_and_detach_work() -> None:
    plain = host("bert")
    want = first(plain(tokens(2, 6)))
    model = noisy(plain, "tupe_a")
    locant.hf.fold(model, 9)
    out = first(model(tokens(2, 6)))
    assert torch.equal(first(copy.deepcopy(model)(tokens(2, 6))), out)
    assert torch.allclose(first(model.double()(tokens(2, 6))).float(), out, atol=1e-5)
    assert torch.allclose(first(locant.hf.detach(model.float())(tokens(2, 6))), want, atol=1e-6)


def test_what_cannot_be_folded_is_told(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"fold: length=0 leaves no tokens"):
        fold(host("bert"), 0)
    with pytest.raises(ValueError, match=r"BertModel has no content-free bias to fold \(nothing is attached\)"):
        fold(host("bert"), 9)
    with pytest.raises(ValueError, match=r"no content-free bias to fold \(huang_m4\)"):
        fold(noisy(host("bert"), "huang_m4"), 9)
    with pytest.raises(ValueError, match="positions reach 30 but the table has 29 rows"):
        fold(noisy(host("bert"), "tupe_a"), 30)
    model = noisy(host("bert"), "t5")
    locant.hf.fold(model, 9)
    with pytest.raises(ValueError, match=r"t5 \(folded\)' was attached as an object"):
        locant.hf.save(model, tmp_path / "folded")
    assert not foldable(locant.load("none")) and not foldable(locant.load("rope", head_dim=8))


def test_ids_a_constant_does_not_know_are_refused() -> None:
    folded = Folded(locant.load("t5", num_heads=3), 7)
    real = locant.Positions.from_ids(torch.tensor([0.5, 1.5, 3.0]))
    with pytest.raises(TypeError, match=r"ids are torch.float32, but a folded bias is known for integers only"):
        folded.terms(real, locant.Layer(torch.zeros(1, 3, 3, 8), torch.zeros(1, 3, 3, 8)))
    from dataclasses import replace

    special = replace(locant.Positions.arange(3), query_special=torch.tensor([False, True, False]))
    with pytest.raises(ValueError, match=r"t5 \(folded\): positions name their special tokens"):
        folded.terms(special, locant.Layer(torch.zeros(1, 3, 3, 8), torch.zeros(1, 3, 3, 8)))
