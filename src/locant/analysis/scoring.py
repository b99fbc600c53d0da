"""Log-likelihoods of token sequences under causal, masked and sequence-to-sequence models, at moved positions.

Causal: sum of log p(token | tokens before). Masked: each token masked in turn (pseudo-log-likelihood). Sequence to
sequence: of the decoder, which is given the whole source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.analysis.model import Host
from locant.analysis.passes import run

ELEMENTS = 1 << 26  # at most this many logits at once (256 MB in float32)


@dataclass(frozen=True)
class Scorer:
    """How a model scores text. ``kind``: causal, masked or seq2seq. ``mask_id``: the mask token of masked models.

    ``special``: ids that are no text, and not scored. ``shift_specials=False`` leaves the first token where it is.
    """

    host: Host
    kind: str
    mask_id: int | None = None
    special: tuple[int, ...] = ()
    shift_specials: bool = True

    def token_scores(self, ids: Sequence[int], shift: int = 0) -> Float[Tensor, "T"]:
        """log p of each scored token of one sequence, in float64.

        The first token of a causal model has nothing before it and is not scored. Raises: ValueError for a sequence
        without a token to score, or a shift past the table.
        """
        sequence = torch.tensor([list(ids)])
        if sequence.shape[1] < (2 if self.kind == "causal" else 1):
            raise ValueError(f"scoring: the sequence {list(ids)} has no token to score; give 2 tokens or more")
        if self.kind == "masked":
            return self._masked(sequence, shift)
        if self.kind == "causal":
            logits = self._logits(sequence, shift)[:, :-1]
            return _picked(logits[0], sequence[0, 1:])[self._scored(sequence[0, 1:])]
        start = getattr(self.host.model.config, "decoder_start_token_id", None)  # pyright: ignore[reportAttributeAccessIssue]
        decoder = torch.cat((torch.tensor([[start or 0]]), sequence[:, :-1]), 1)
        logits = self._logits(sequence, shift, {"decoder_input_ids": decoder})
        return _picked(logits[0], sequence[0])[self._scored(sequence[0])]

    def _scored(self, ids: Tensor) -> Tensor:
        return ~torch.isin(ids, torch.tensor(self.special, dtype=torch.long))

    def _logits(self, ids: Tensor, shift: int, more: dict[str, Any] | None = None) -> Tensor:
        found = run(self.host, ids, shift=shift, shift_specials=self.shift_specials, whole=True, more=more)
        return found.output.logits

    def _masked(self, sequence: Tensor, shift: int) -> Tensor:
        assert self.mask_id is not None
        places = self._scored(sequence[0]).nonzero().flatten()
        vocabulary = getattr(self.host.model.config, "vocab_size", 1)  # pyright: ignore[reportAttributeAccessIssue]
        block = max(1, ELEMENTS // (sequence.shape[1] * vocabulary))
        scores = []
        for some in places.split(block):
            rows = sequence.repeat(len(some), 1)
            rows[torch.arange(len(some)), some] = self.mask_id
            with _read_at(self.host.model, some):
                logits = self._logits(rows, shift)
            at = torch.zeros_like(some) if logits.shape[1] == 1 else some
            scores.append(_picked(logits[torch.arange(len(some)), at], sequence[0, some]))
        return torch.cat(scores) if scores else torch.zeros(0, dtype=torch.float64)


@contextmanager
def _read_at(model: Any, places: Int[Tensor, "N"]) -> Iterator[None]:
    """The last linear map of a head, which costs most of it, reads row i at place i alone: logits [N 1 V]."""

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        return args if hidden.dim() != 3 else (hidden[torch.arange(len(places)), places][:, None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _picked(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax at the ids, row by row."""
    return logits.double().log_softmax(-1).cpu().gather(-1, ids[:, None])[:, 0]


def make_scorer(
    host: Host, tokenizer: Any = None, *, mask_id: int | None = None, shift_specials: bool = True
) -> Scorer:
    """The way a model with a language-model head scores text.

    Raises: ValueError for a model without such a head, or a masked one without a mask token.
    """
    model: Any = host.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise ValueError(
            f"scoring: {type(model).__name__} has no language-model head, so it gives no likelihoods; load it as "
            "AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM"
        )
    special = tuple(getattr(tokenizer, "all_special_ids", ()))
    if getattr(model.config, "is_encoder_decoder", False):
        return Scorer(host, "seq2seq", None, special, shift_specials)
    if host.causal:
        return Scorer(host, "causal", None, special, shift_specials)
    mask_id = getattr(tokenizer, "mask_token_id", None) if mask_id is None else mask_id
    if mask_id is None:
        raise ValueError(
            f"scoring: {type(model).__name__} is a masked model but mask_id={mask_id}; give its tokenizer, or mask_id="
        )
    return Scorer(host, "masked", mask_id, special, shift_specials)
