"""Objectives of pre-training: their losses, what learns from what, and what a step costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from locant.data.mlm import IGNORED, MaskingConfig, Vocabulary, token_draws
from locant.pretrain.flops import cost_of, measure_peak
from locant.pretrain.hosts import HostChoice, shape_of
from locant.pretrain.objectives import (
    MaskedBatch,
    NextTokenBatch,
    Objective,
    ObjectiveChoice,
    ReplacedBatch,
    build_objective,
    counts,
    sample,
)
from locant.training.hosts import FAMILIES, Shape
from locant.training.mlm import EncodingChoice

SIZES: dict[str, Any] = {"num_layers": 2, "model_dim": 24, "num_heads": 3, "hidden_dim": 37, "dropout": 0.0}
WORDS = 29


def made(family: str, encoding: str = "tupe_r", **more: Any) -> tuple[Objective, Shape, HostChoice, ObjectiveChoice]:
    choice = HostChoice(family, **{**SIZES, "init_std": 0.3, **more})
    objective = ObjectiveChoice(name=FAMILIES[family].objective)  # type: ignore[arg-type]
    shape = shape_of(choice, WORDS, 13, 0)
    return build_objective(objective, FAMILIES[family], shape, EncodingChoice(encoding), 3), shape, choice, objective


def vocabulary() -> Vocabulary:
    special = np.arange(WORDS) < 5
    return Vocabulary(4, 0, special, np.zeros(WORDS, dtype=bool), np.arange(5, WORDS))


def examples(documents: bool = False, rows: int = 4, length: int = 13) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    made = []
    for k in range(rows):
        ids = np.concatenate([[2], draw.integers(5, WORDS, length - 2 - k), [3]])
        more = {"document_ids": np.arange(len(ids)) // 5} if documents else {}
        ended = {"ended": True} if k else {}
        made.append({"input_ids": ids, "example_id": 10 + k, "epoch": 1, **ended, **more})
    return made


def called(objective: Objective, batch: dict[str, Any], **more: Any) -> dict[str, torch.Tensor]:
    inputs = {name: value for name, value in batch.items() if name != "example_ids"}
    return objective(**{"num_items_in_batch": counts(batch), **inputs, **more})


def test_draws_depend_on_their_keys_alone_and_are_apart_from_the_masks() -> None:
    draws = token_draws(5, [1, 1, 2], [7, 8, 7], 999)
    assert draws.shape == (3, 999) and (0 <= draws).all() and (draws < 1).all()
    assert (token_draws(5, 1, [8], 40)[0] == draws[1, :40]).all()
    assert abs(draws.mean() - 0.5) < 0.03 and len(np.unique(draws)) == draws.size
    assert (token_draws(6, 1, [8], 40)[0] != draws[1, :40]).all()


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, float("-inf"), 0.0])
    shares = (logits - logits.logsumexp(0)).exp().tolist()
    draws = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = sample(logits.expand(len(draws), 5), draws).bincount(minlength=5) / len(draws)
    assert found.tolist() == pytest.approx(shares, abs=0.01) and found[3] == 0
    ends = sample(logits.expand(2, 5), torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64))
    assert ends.tolist() == [0, 4]


@pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
def test_masked_loss_is_that_of_the_host_itself(family: str) -> None:
    objective, *_ = made(family)
    batch = MaskedBatch(vocabulary(), 1, MaskingConfig())(examples())
    loss = called(objective, batch)["loss"]
    plain = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert loss.item() == pytest.approx(objective.host(**plain).loss.item(), rel=1e-5)
    assert [row.split()[1] for row in batch["example_ids"]] == ["10", "11", "12", "13"]


def test_next_token_loss_is_that_of_the_host_itself() -> None:
    objective, *_ = made("gpt2", "shaw")
    batch = NextTokenBatch(vocabulary(), 1, MaskingConfig())(examples())
    plain = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    assert called(objective, batch)["loss"].item() == pytest.approx(objective.host(**plain).loss.item(), rel=1e-5)
    assert (batch["labels"][:, -1] == IGNORED).all()  # the [SEP] that closes a full window is no target
    assert batch["labels"][1, 11] == 3  # the one that ends a text is
    assert counts(batch).tolist() == [11 + 11 + 10 + 9, 13 + 12 + 11 + 10]


@pytest.mark.parametrize("family", ["bert", "electra", "gpt2"])
def test_shares_of_a_step_add_up_however_it_is_cut(family: str) -> None:
    objective, *_ = made(family, "tisa")
    kind = {"bert": MaskedBatch, "electra": ReplacedBatch, "gpt2": NextTokenBatch}[family](
        vocabulary(), 1, MaskingConfig()
    )
    whole = kind(examples())
    total, expected = counts(whole), called(objective, whole)
    parts = [called(objective, kind(part), num_items_in_batch=total) for part in (examples()[:1], examples()[1:])]
    for name in ("loss", *objective.parts):
        assert sum(part[name].item() for part in parts) == pytest.approx(expected[name].item(), rel=1e-5)


def test_a_document_kept_apart_is_predicted_as_if_alone() -> None:
    objective, *_ = made("gpt2", "rope")
    collate = NextTokenBatch(vocabulary(), 1, MaskingConfig())
    (first, *_) = examples(documents=True)
    batch = collate([first])
    assert (batch["labels"][0, [0, 5, 10, 12]] == IGNORED).all() and (batch["labels"][0] != IGNORED).sum() == 9
    together = called(objective, batch, num_items_in_batch=torch.tensor([1, 1]))["loss"]
    alone = []
    for at in (0, 5, 10):
        ids = first["input_ids"][at : at + 5]
        own = {"input_ids": ids, "document_ids": np.zeros(len(ids), dtype=int), "ended": at < 10}
        one = collate([{**first, **own}])
        alone.append(called(objective, one, num_items_in_batch=torch.tensor([1, 1]))["loss"])
    assert together.item() == pytest.approx(sum(loss.item() for loss in alone), rel=1e-5)


def test_electra_shares_token_embeddings_and_nothing_else() -> None:
    objective, shape, *_ = made("electra", embedding_dim=11, model_dim=32, num_heads=4)
    parts = objective.saved()
    big, small = ({id(p): n for n, p in parts[name].named_parameters()} for name in ("model", "generator"))
    assert [big[key] for key in big.keys() & small.keys()] == ["electra.embeddings.word_embeddings.weight"]
    assert sum(".locant." in name for name in small.values()) == sum(".locant." in name for name in big.values()) > 3
    assert parts["generator"].config.hidden_size == shape.fraction(0.25).model_dim == 8
    assert parts["generator"].generator_lm_head.weight is parts["model"].electra.embeddings.word_embeddings.weight
    assert "generator.generator_lm_head.weight" not in objective.state_dict()
    again, *_ = made("electra", embedding_dim=11, model_dim=32, num_heads=4)
    again.load_state_dict(objective.state_dict())


def test_generator_does_not_depend_on_the_discriminator_and_learns_nothing_through_the_sampling() -> None:
    objective, *_ = made("electra")
    batch = ReplacedBatch(vocabulary(), 1, MaskingConfig(rate=0.4))(examples())
    found = called(objective, batch)
    assert found["loss"].item() == pytest.approx((found["generator_loss"] + 50 * found["discriminator_loss"]).item())
    found["loss"].backward()
    grads = {name: p.grad for name, p in objective.generator.named_parameters() if "word_embeddings" not in name}
    objective.zero_grad()
    objective.weight = 0.0  # type: ignore[assignment]
    called(objective, batch)["loss"].backward()
    for name, parameter in objective.generator.named_parameters():
        if name in grads:
            assert (parameter.grad is None) == (grads[name] is None)
            assert parameter.grad is None or torch.equal(parameter.grad, grads[name])
    for name, parameter in objective.host.named_parameters():
        if "word_embeddings" not in name:
            assert parameter.grad is None or not parameter.grad.any(), name
    with torch.no_grad():
        for name, parameter in objective.host.named_parameters():
            if ".locant." in name:
                parameter.add_(1.0)
    moved = called(objective, batch)
    assert torch.equal(moved["generator_loss"], found["generator_loss"])


def test_discriminator_tells_replaced_tokens_by_binary_cross_entropy() -> None:
    objective, *_ = made("electra", "none")
    batch = ReplacedBatch(vocabulary(), 1, MaskingConfig(rate=0.4))(examples())
    predicted, mask = batch["labels"] != IGNORED, batch["attention_mask"].bool()
    text = torch.where(predicted, batch["labels"], batch["input_ids"])
    with torch.no_grad():
        logits = objective.generator(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        filled = text.clone()
        filled[predicted] = sample(logits[predicted], batch["draws"][predicted])
        told = objective.host(input_ids=filled, attention_mask=batch["attention_mask"]).logits
    expected = F.binary_cross_entropy_with_logits(told[mask], (filled != text)[mask].float())
    assert called(objective, batch)["discriminator_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < (filled != text).sum() <= predicted.sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_cost_counts_the_matrices_that_multiply_a_token(family: str) -> None:
    factorized = {"embedding_dim": 11} if FAMILIES[family].embedding_dim is not None else {}
    objective, shape, _, chosen = made(family, "none", **factorized)
    cost = cost_of(chosen, FAMILIES[family], shape)
    layers = shape.num_layers if family == "albert" else 1  # whose one layer runs at every depth
    body = head = 0
    for name, parameter in objective.named_parameters():
        if parameter.ndim < 2 or "embeddings.weight" in name or ".wte." in name or "token_type" in name:
            continue
        in_head = any(part in name for part in ("cls.", "lm_head", "host.predictions.", "generator_predictions"))
        body += 0 if in_head else parameter.numel() * (layers if "layer_groups" in name else 1)
        head += parameter.numel() if in_head else 0
    heads = shape.vocab_size * shape.embedding_dim  # tied to the embeddings, and so left out above
    assert (cost.body, cost.head) == (body, head + heads)
    assert cost.flops(10.0, 2.0, 7) == 6 * (10 * cost.body + 2 * cost.head) + 12 * cost.attention * 7 * 10


def test_the_peak_is_measured_above_what_a_slow_machine_can() -> None:
    assert 1e8 < measure_peak(torch.device("cpu"), False) < 1e14


def test_mistakes_of_an_objective_are_named() -> None:
    with pytest.raises(ValueError, match=r"generator_fraction = 1.5, needed a share above 0 and up to 1"):
        ObjectiveChoice(name="electra", generator_fraction=1.5)
