"""Validation of one trained model: loss and accuracy by window length, loss by shift of all position ids.

Masks are fixed: they depend on the window and on nothing else, so every encoding and seed predicts the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from locant.compare.results import LengthScore, ShiftScore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from locant.data import MaskingConfig, TokenStream

MASK_SEED = 0  # of validation masks, whatever the seed of the run


@dataclass(frozen=True)
class EvaluateSettings:
    """Which part of the text validates, and what is measured on it."""

    lengths: tuple[int, ...] = ()  # tokens in a window; empty: 1, 2 and 4 times the trained length
    shifts: tuple[int, ...] = (0, 16, 64)  # added to all position ids, at the trained length
    tokens: int = 65_536  # of validation text read at each length, [CLS] and [SEP] among them
    batch_tokens: int = 8_192  # tokens in one forward pass
    validation_fraction: float = 0.05  # share of the documents that is never trained on
    split_seed: int = 0
    points: int = 0  # times that a run is validated on its way, at points of the loss curve; 0: at its end alone

    def __post_init__(self) -> None:
        for name in ("lengths", "shifts"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} = {list(values)} names a number twice; drop one")
        if bad := [length for length in self.lengths if length < 1]:
            raise ValueError(f"lengths has {bad[0]}, needed at least 1")
        if bad := [shift for shift in self.shifts if shift < 0]:
            raise ValueError(f"shifts has {bad[0]}, needed 0 or more")
        for name in ("tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}, needed at least 1")
        if self.points < 0:
            raise ValueError(f"points = {self.points}, needed 0 (at the end alone) or more")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction = {self.validation_fraction}, needed a number between 0 and 1")

    def lengths_for(self, trained_length: int) -> tuple[int, ...]:
        """Window lengths, in order."""
        return tuple(sorted(self.lengths)) or tuple(factor * trained_length for factor in (1, 2, 4))


class Validation:
    """The validation text cut into windows, with its fixed masks."""

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: PreTrainedTokenizerFast,
        settings: EvaluateSettings,
        masking: MaskingConfig,
    ) -> None:
        from locant.data import MlmCollator, Vocabulary

        self.stream, self.tokenizer, self.settings = stream, tokenizer, settings
        self.collate: Any = MlmCollator(Vocabulary.from_tokenizer(tokenizer), MASK_SEED, masking)

    def by_length(self, model: Any, trained_length: int, max_length: int | None) -> tuple[LengthScore, ...]:
        """Loss and accuracy at each length; a length the encoding has no positions for gets the reason instead."""
        scores = []
        for length in self.settings.lengths_for(trained_length):
            loss, accuracy, reason = self._try(model, length, None, max_length)
            scores.append(LengthScore(length, length / trained_length, loss, accuracy, reason))
        return tuple(scores)

    def by_shift(self, model: Any, trained_length: int, max_length: int | None) -> tuple[ShiftScore, ...]:
        """Loss at the trained length with a constant added to all position ids."""
        scores = []
        for shift in self.settings.shifts:
            loss, _, reason = self._try(model, trained_length, shift, max_length)
            scores.append(ShiftScore(shift, loss, reason))
        return tuple(scores)

    def _try(
        self, model: Any, length: int, shift: int | None, max_length: int | None
    ) -> tuple[float | None, float | None, str | None]:
        needed = length + (shift or 0)
        if max_length is not None and needed > max_length:
            return None, None, f"position {needed - 1} is beyond its table of {max_length} rows"
        try:
            return *self.score(model, length, shift), None
        except ValueError as error:  # a limit only the host knows
            return None, None, str(error)

    def score(self, model: Any, length: int, shift: int | None = None) -> tuple[float, float]:
        """Mean loss (nats) and accuracy of the predicted tokens in windows of this length."""
        import torch

        from locant.data import EVALUATION_EPOCH, MlmDataset, make_windows

        dataset = MlmDataset(make_windows(self.stream, length, self.tokenizer), epoch=EVALUATION_EPOCH)
        count = min(len(dataset), max(1, self.settings.tokens // length))
        size = max(1, self.settings.batch_tokens // length)
        device = next(model.parameters()).device
        loss = right = total = 0.0
        model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                batch = self.collate([dataset[i] for i in range(start, min(start + size, count))])
                batch = {key: value.to(device) for key, value in batch.items()}
                logits, targets = self.predict(model, batch, _shifted(batch["input_ids"], shift))
                loss += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
                right += float((logits.argmax(-1) == targets).sum())
                total += targets.numel()
        return loss / total, right / total

    def predict(self, model: Any, batch: dict[str, Any], position_ids: Any) -> tuple[Any, Any]:
        """Logits and targets of the predicted tokens of a batch."""
        from locant.training.hosts import predicted_logits

        mask = None if bool(batch["attention_mask"].all()) else batch["attention_mask"]
        return predicted_logits(
            model, batch["input_ids"], batch["labels"], attention_mask=mask, position_ids=position_ids
        )


class CausalValidation(Validation):
    """The same windows, with every token of the text predicted from those before it."""

    def __init__(self, stream: TokenStream, tokenizer: PreTrainedTokenizerFast, settings: EvaluateSettings) -> None:
        from locant.training.causal import WindowCollate

        self.stream, self.tokenizer, self.settings = stream, tokenizer, settings
        self.collate = WindowCollate()

    def predict(self, model: Any, batch: dict[str, Any], position_ids: Any) -> tuple[Any, Any]:
        """Logits and targets of the next tokens."""
        from locant.training.hosts import next_token_logits

        return next_token_logits(model, batch["input_ids"], batch["labels"], position_ids=position_ids)


def _shifted(input_ids: Any, shift: int | None) -> Any:
    import torch

    if shift is None:
        return None
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids) + shift
