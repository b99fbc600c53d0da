"""What a host is trained on: masked tokens, replaced tokens (ELECTRA), or every next token.

An objective is a module whose forward gives the loss of a batch as a share of a whole step: sums over the batch,
divided by what the step counts. So a step is the same however it is cut into batches and shared by processes. The
vocabulary head is applied to the predicted tokens only, which changes no number and saves most of its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.compare.electra import ElectraSettings
from locant.data import MaskingConfig, MlmCollator, Vocabulary
from locant.data.mlm import IGNORED, token_draws
from locant.hf.attachment import keep_once
from locant.training.hosts import (
    FAMILIES,
    GENERATOR,
    Family,
    Shape,
    build_host,
    hidden_states,
    next_token_logits,
    predicted_logits,
)
from locant.training.mlm import BuiltModel, EncodingChoice, derived_seed

Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class ObjectiveChoice(ElectraSettings):
    """What is predicted; the other fields are ELECTRA's."""

    name: Literal["mlm", "electra", "causal"] = "mlm"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("generator_fraction", "discriminator_weight"):
            if self.name != "electra" and getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name} = {getattr(self, name)} has no meaning for objective {self.name!r}; drop it, or take "
                    "electra"
                )


class Objective(nn.Module):
    """A host with its loss. ``forward`` gives ``loss`` and its parts by name, all as shares of a step."""

    parts: tuple[str, ...] = ()  # of the loss, beside it

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.host = host
        keep_once(self)  # tied weights lie in checkpoints once

    def saved(self) -> dict[str, Any]:
        """The models that a run leaves, by the name of their folder."""
        return {"model": self.host}


class Masked(Objective):
    """Cross-entropy of the masked tokens."""

    def forward(
        self,
        input_ids: Int[Tensor, "B I"],
        labels: Int[Tensor, "B I"],
        num_items_in_batch: Int[Tensor, "2"],
        **positions: Tensor,
    ) -> dict[str, Tensor]:
        """``num_items_in_batch``: predicted and real tokens of the whole step."""
        logits, targets = self.predicted(input_ids, labels, positions)
        return {"loss": _shared_entropy(logits, targets, num_items_in_batch)}

    def predicted(
        self, input_ids: Int[Tensor, "B I"], labels: Int[Tensor, "B I"], positions: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
        """Logits and targets of the tokens that carry a label."""
        return predicted_logits(self.host, input_ids, labels, **positions)


class Causal(Masked):
    """Cross-entropy of every next token."""

    def predicted(
        self, input_ids: Int[Tensor, "B I"], labels: Int[Tensor, "B I"], positions: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
        """The same; a token is predicted from the one before it."""
        return next_token_logits(self.host, input_ids, labels, **positions)


class Electra(Objective):
    """A generator fills masked tokens in, a discriminator tells which tokens are not the text's (Clark et al. 2020).

    L = L_mlm(generator) + weight * L_replaced(discriminator), the second over all tokens that are no padding. Both
    share the token embeddings; each has position parameters of its own. No gradient passes through the sampling.
    """

    parts = ("generator_loss", "discriminator_loss")

    def __init__(self, discriminator: Any, generator: Any, weight: float) -> None:
        super().__init__(discriminator)
        self.generator, self.weight = generator, weight
        words = discriminator.electra.embeddings.word_embeddings
        generator.electra.embeddings.word_embeddings = words
        generator.generator_lm_head.weight = words.weight

    def forward(
        self,
        input_ids: Int[Tensor, "B I"],
        labels: Int[Tensor, "B I"],
        draws: Float[Tensor, "B I"],
        num_items_in_batch: Int[Tensor, "2"],
        **positions: Tensor,
    ) -> dict[str, Tensor]:
        """``draws``: the number in [0, 1) that picks each token's replacement."""
        (logits, targets), told, replaced = self.judge(input_ids, labels, draws, positions)
        guessed = _shared_entropy(logits, targets, num_items_in_batch)
        found = F.binary_cross_entropy_with_logits(told, replaced.float(), reduction="sum") / num_items_in_batch[1]
        loss = guessed + self.weight * found
        return {"loss": loss, "generator_loss": guessed.detach(), "discriminator_loss": found.detach()}

    def judge(
        self, input_ids: Tensor, labels: Tensor, draws: Tensor, positions: dict[str, Tensor]
    ) -> tuple[tuple[Tensor, Tensor], Float[Tensor, "N"], Bool[Tensor, "N"]]:
        """The generator's logits and targets; the discriminator's logit for each real token, and which are replaced."""
        logits, targets = predicted_logits(self.generator, input_ids, labels, **positions)
        predicted = labels != IGNORED
        text = torch.where(predicted, labels, input_ids)
        filled = text.clone()
        filled[predicted] = sample(logits.detach(), draws[predicted])
        hidden = hidden_states(self.host, filled, positions)
        told = self.host.discriminator_predictions(hidden).float()  # pyright: ignore[reportCallIssue]
        real = positions["attention_mask"].bool() if "attention_mask" in positions else torch.ones_like(predicted)
        return (logits, targets), told[real], (filled != text)[real]

    def saved(self) -> dict[str, Any]:
        """The discriminator is the model."""
        return {"model": self.host, "generator": self.generator}


def sample(logits: Float[Tensor, "N V"], draws: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """One token of each row's distribution: the one in whose share of [0, 1) the draw falls."""
    logits = logits.double()
    shares = (logits - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    at = torch.searchsorted(shares, (draws[:, None] * shares[:, -1:]).contiguous(), right=True)
    return at[:, 0].clamp(max=logits.shape[-1] - 1)


def _shared_entropy(logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum") / counts[0]


def build_objective(
    choice: ObjectiveChoice, family: Family, shape: Shape, encoding: EncodingChoice, seed: int
) -> Objective:
    """The models of an objective, drawn from the seed, with the encoding attached to each."""
    if choice.name == "electra":
        return build_electra(choice, shape, encoding, seed)[0]
    model = build_host(family, shape, encoding, seed).model
    return Masked(model) if choice.name == "mlm" else Causal(model)


def build_electra(
    settings: ElectraSettings, shape: Shape, encoding: EncodingChoice, seed: int, kind: type[Electra] = Electra
) -> tuple[Electra, BuiltModel]:
    """ELECTRA's two models, and the discriminator with the position parameters of both counted as its own."""
    host = build_host(FAMILIES["electra"], shape, encoding, seed)
    small = shape.fraction(settings.generator_fraction)
    generator = build_host(GENERATOR, small, encoding, derived_seed("generator", seed))
    objective = kind(host.model, generator.model, settings.discriminator_weight)
    return objective, BuiltModel(
        host.model,
        host.position_parameters | {f"generator.{name}" for name in generator.position_parameters},
        host.extra_parameters + generator.extra_parameters,
        sum(parameter.numel() for parameter in objective.parameters()),
    )


# --- batches ----------------------------------------------------------------------------------------------------------


class MaskedBatch:
    """Examples -> input_ids, labels, and where tokens stand; masks are functions of seed, epoch and window."""

    def __init__(self, vocabulary: Vocabulary, seed: int, masking: MaskingConfig) -> None:
        self.seed, self.collate = seed, MlmCollator(vocabulary, seed, masking)

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        return _finished(dict(self.collate(examples)), examples)


class ReplacedBatch(MaskedBatch):
    """The same, with the draws of the replacements: functions of seed, epoch, window and place, too."""

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        batch = super().__call__(examples)
        ids, epochs = ([example[key] for example in examples] for key in ("example_id", "epoch"))
        batch["draws"] = torch.from_numpy(token_draws(self.seed, epochs, ids, batch["input_ids"].shape[1]))
        return batch


class NextTokenBatch:
    """Examples -> input_ids and labels: each token but the first of a window, and of a document kept apart.

    A [SEP] that closes a full window is no target either: it says where the window was cut, and a model that is taught
    it learns to end at the trained length.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, masking: MaskingConfig) -> None:
        self.pad = vocabulary.pad

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        ids = _padded([example["input_ids"] for example in examples], self.pad)
        labels = ids.masked_fill(ids == self.pad, IGNORED)
        labels[:, 0] = IGNORED
        for row, example in enumerate(examples):
            if not example.get("ended"):
                labels[row, len(example["input_ids"]) - 1] = IGNORED
        batch = {"input_ids": ids, "labels": labels, "attention_mask": (ids != self.pad).long()}
        if "document_ids" in examples[0]:
            documents = _padded([example["document_ids"] for example in examples], -1)
            labels[:, 1:][documents[:, 1:] != documents[:, :-1]] = IGNORED
            batch["document_ids"] = documents
        return _finished(batch, examples)


BATCHES = {"mlm": MaskedBatch, "electra": ReplacedBatch, "causal": NextTokenBatch}


def _padded(rows: Sequence[Any], value: int) -> Tensor:
    tensors = [torch.as_tensor(row.astype("int64")) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def _finished(batch: dict[str, Any], examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Without a mask that masks nothing, and with the names of the windows, for errors."""
    if bool(batch["attention_mask"].all()):
        del batch["attention_mask"]
    return {**batch, "example_ids": [f"window {example['example_id']}" for example in examples]}


def counts(batch: dict[str, Any]) -> Int[Tensor, "2"]:
    """Predicted tokens and real tokens of a batch."""
    mask = batch.get("attention_mask")
    real = torch.tensor(batch["input_ids"].numel()) if mask is None else mask.sum()
    return torch.stack([(batch["labels"] != IGNORED).sum(), real.to(batch["labels"].device)])
