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
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.data import MaskingConfig, MlmCollator, Vocabulary
from locant.data.mlm import IGNORED, token_draws
from locant.hf.attachment import keep_once
from locant.pretrain.hosts import FAMILIES, GENERATOR, Family, HostChoice, Shape, build_host
from locant.training.mlm import EncodingChoice, derived_seed

Collate = Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class ObjectiveChoice:
    """What is predicted; the other fields are ELECTRA's."""

    name: Literal["mlm", "electra", "causal"] = "mlm"
    generator_fraction: float = 0.25  # of the discriminator's width, in whole heads; Clark et al. 2020: 1/4 to 1/3
    discriminator_weight: float = 50.0  # of the discriminator's loss beside the generator's

    def __post_init__(self) -> None:
        if not 0 < self.generator_fraction <= 1:
            raise ValueError(f"generator_fraction = {self.generator_fraction}, needed a share above 0 and up to 1")
        if not self.discriminator_weight > 0:
            raise ValueError(f"discriminator_weight = {self.discriminator_weight}, needed a number above 0")
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

    def __init__(self, host: Any, family: Family) -> None:
        super().__init__(host)
        self.family = family

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
        return _masked_logits(self.host, self.family, input_ids, labels, positions)


class Causal(Masked):
    """Cross-entropy of every next token."""

    def predicted(
        self, input_ids: Int[Tensor, "B I"], labels: Int[Tensor, "B I"], positions: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "N V"], Int[Tensor, "N"]]:
        """The same; a token is predicted from the one before it."""
        hidden = _hidden(self.host, input_ids, {**positions, "use_cache": False})
        labeled = labels[:, 1:] != IGNORED
        return self.family.predict(self.host, hidden[:, :-1][labeled]), labels[:, 1:][labeled]


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
        logits, targets = _masked_logits(self.generator, GENERATOR, input_ids, labels, positions)
        guessed = _shared_entropy(logits, targets, num_items_in_batch)
        predicted = labels != IGNORED
        text = torch.where(predicted, labels, input_ids)
        filled = text.clone()
        filled[predicted] = sample(logits.detach(), draws[predicted])
        hidden = _hidden(self.host, filled, positions)
        told = self.host.discriminator_predictions(hidden).float()  # pyright: ignore[reportCallIssue]
        real = positions["attention_mask"].bool() if "attention_mask" in positions else torch.ones_like(predicted)
        replaced = (filled != text)[real].float()
        found = F.binary_cross_entropy_with_logits(told[real], replaced, reduction="sum") / num_items_in_batch[1]
        loss = guessed + self.weight * found
        return {"loss": loss, "generator_loss": guessed.detach(), "discriminator_loss": found.detach()}

    def saved(self) -> dict[str, Any]:
        """The discriminator is the model."""
        return {"model": self.host, "generator": self.generator}


def sample(logits: Float[Tensor, "N V"], draws: Float[Tensor, "N"]) -> Int[Tensor, "N"]:
    """One token of each row's distribution: the one in whose share of [0, 1) the draw falls."""
    logits = logits.double()
    shares = (logits - logits.logsumexp(-1, keepdim=True)).exp().cumsum(-1)
    at = torch.searchsorted(shares, (draws[:, None] * shares[:, -1:]).contiguous(), right=True)
    return at[:, 0].clamp(max=logits.shape[-1] - 1)


def _hidden(host: Any, input_ids: Tensor, keywords: dict[str, Any]) -> Tensor:
    return host.base_model(input_ids=input_ids, **keywords).last_hidden_state


def _masked_logits(
    host: Any, family: Family, input_ids: Tensor, labels: Tensor, positions: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    predicted = labels != IGNORED
    return family.predict(host, _hidden(host, input_ids, positions)[predicted]), labels[predicted]


def _shared_entropy(logits: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, reduction="sum") / counts[0]


def build_objective(
    choice: ObjectiveChoice, host: HostChoice, shape: Shape, encoding: EncodingChoice, seed: int
) -> Objective:
    """The models of an objective, drawn from the seed, with the encoding attached to each."""
    family = FAMILIES[host.family]
    model = build_host(family, shape, encoding, seed).model
    if choice.name == "mlm":
        return Masked(model, family)
    if choice.name == "causal":
        return Causal(model, family)
    small = shape.fraction(choice.generator_fraction)
    generator = build_host(GENERATOR, small, encoding, derived_seed("generator", seed)).model
    return Electra(model, generator, choice.discriminator_weight)


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
