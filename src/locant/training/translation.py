"""Training of a small encoder-decoder (Marian) that translates, with one position encoding.

The conditions are those of `locant.training.mlm`. Encoder and decoder get the encoding; where a part of it serves
encoders alone, the decoder has a sinusoid instead. The order loss of an encoding that has one is added as it says, and
reported apart: losses in tables are those of the translation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.data.mlm import IGNORED
from locant.training.hosts import ModelSize
from locant.training.mlm import BuiltModel, EncodingChoice, assemble

if TYPE_CHECKING:
    from torch import Tensor

TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
DECODER = "sinusoidal"  # of decoders whose encoder has what reads the whole source


@dataclass(frozen=True)
class Translations:
    """Sentence pairs as ids, without the end, and for each source token its place in the target, NaN for none."""

    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    places: tuple[tuple[float, ...], ...] | None = None

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """What a schedule counts: the sources."""
        return self.sources

    documents: None = None

    def __len__(self) -> int:
        return len(self.sources)

    def take(self, chosen: Sequence[int]) -> Translations:
        """Some of the pairs."""
        places = None if self.places is None else tuple(self.places[k] for k in chosen)
        return Translations(tuple(self.sources[k] for k in chosen), tuple(self.targets[k] for k in chosen), places)


class TranslationCollate:
    """Pairs -> input_ids, attention_mask, order_targets [B S], labels [B T]; padded on the right, ended by ``end_id``.

    The end of a source has no place in the target. Raises: nothing.
    """

    def __init__(self, pairs: Translations, pad_id: int, end_id: int) -> None:
        self.pairs, self.pad_id, self.end_id = pairs, pad_id, end_id

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        import math

        import torch

        chosen = [int(example["example_id"]) for example in examples]
        sources = [(*self.pairs.sources[k], self.end_id) for k in chosen]
        targets = [(*self.pairs.targets[k], self.end_id) for k in chosen]
        ids = _padded(sources, self.pad_id)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(one) for one in sources])[:, None]
        batch = {
            "input_ids": ids,
            "attention_mask": real.long(),
            "labels": _padded(targets, IGNORED),
            "example_ids": torch.tensor(chosen),
        }
        if self.pairs.places is not None:
            batch["order_targets"] = _padded([(*self.pairs.places[k], math.nan) for k in chosen], math.nan)
        return batch


def _padded(rows: Sequence[Sequence[Any]], fill: Any) -> Tensor:
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def build_marian(
    size: ModelSize, vocab_size: int, length: int, encoding: EncodingChoice, seed: int, pad_id: int, end_id: int
) -> BuiltModel:
    """A Marian of this size on both sides with the encoding attached; host weights depend on the seed alone.

    Embeddings are scaled by sqrt(width) and shared by both sides. ``length``: rows of a learned position table, where
    the recipe does not say. Sentences start with ``pad_id``, as Marian's do.
    """
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=size.model_dim,
        encoder_layers=size.num_layers,
        decoder_layers=size.num_layers,
        encoder_attention_heads=size.num_heads,
        decoder_attention_heads=size.num_heads,
        encoder_ffn_dim=size.hidden_dim or 4 * size.model_dim,
        decoder_ffn_dim=size.hidden_dim or 4 * size.model_dim,
        max_position_embeddings=size.max_positions or length,
        dropout=size.dropout,
        attention_dropout=size.dropout,
        init_std=size.init_std,
        scale_embedding=True,
        pad_token_id=pad_id,
        eos_token_id=end_id,
        decoder_start_token_id=pad_id,
        bos_token_id=None,
        forced_eos_token_id=None,
    )
    return assemble(lambda: MarianMTModel(config), TABLES, encoding, seed, attach_both)


def decoder_choice(encoding: EncodingChoice) -> EncodingChoice:
    """What the decoder gets beside an encoder with this encoding."""
    from locant.catalog import encoding_class

    parts = [encoding_class(part.strip()) for part in encoding.name.split("+")]
    return encoding if all(part.properties.decoders for part in parts) else EncodingChoice(DECODER)


def attach_both(model: Any, encoding: EncodingChoice) -> None:
    """To both stacks, whatever each may have."""
    from locant import hf

    for stack, choice in ((model.model.encoder, encoding), (model.model.decoder, decoder_choice(encoding))):
        hf.attach(stack, choice.name, **choice.options)


def make_objective(host: Any) -> Any:
    """Cross-entropy of the translation and the encodings' own losses, as a module that the Trainer takes."""
    from torch import nn

    class TranslationObjective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = host

        def forward(
            self, input_ids: Any, attention_mask: Any, labels: Any, order_targets: Any = None
        ) -> dict[str, Any]:
            logits, targets = target_logits(self.host, input_ids, attention_mask, labels)
            loss = nn.functional.cross_entropy(logits.float(), targets)
            return {"loss": loss, "translation": loss, **with_auxiliary(self.host, loss, order_targets)}

    return TranslationObjective()


def with_auxiliary(host: Any, loss: Tensor, order_targets: Tensor | None) -> dict[str, Tensor]:
    """The whole ``loss`` and the ``order`` loss of the encoder's encoding; nothing where it has none.

    Raises: ValueError where it learns the order of the target and none is known.
    """
    found: dict[str, Tensor] = {}
    for part in host.model.encoder.locant.stack.parts():
        if not part.auxiliary_share:
            continue
        if order_targets is None:
            raise ValueError(
                f"{part.name}: learns the order of the target, but these pairs have no order_targets; align them with "
                "locant.data.alignment.target_places"
            )
        order = part.auxiliary_loss(part.aux, order_targets)
        assert order is not None
        loss = (1 - part.auxiliary_share) * loss + part.auxiliary_share * order
        found = {"loss": loss, "order": order}
    return found


def target_logits(host: Any, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [N V] and targets [N] of the tokens that carry a label, each predicted from those before it."""
    start = labels.new_full((len(labels), 1), host.config.decoder_start_token_id)
    before = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, host.config.pad_token_id)
    import torch

    hidden = host.model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        decoder_input_ids=torch.cat((start, before), 1),
        use_cache=False,
    ).last_hidden_state
    predicted = labels != IGNORED
    return host.lm_head(hidden[predicted]) + host.final_logits_bias, labels[predicted]


def translate(
    host: Any, sources: Sequence[Sequence[int]], longest: int, pad_id: int, end_id: int, beams: int, batch_size: int
) -> list[list[int]]:
    """Translations with a key-value cache, in the order of the sources, without special tokens."""
    from locant.training.writing import write

    rows = [(*source, end_id) for source in sources]
    written = write(host, rows, pad_id, batch_size, longest, beams, bad_words_ids=[[pad_id]])
    return [[token for token in one if token not in (pad_id, end_id)] for one in written]
