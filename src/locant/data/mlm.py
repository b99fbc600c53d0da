"""Masked-language modeling: which tokens are hidden is a pure function of seed, epoch, example id and position.

Batch size, order, workers and global random state cannot change it. The random numbers are a counter-based hash (the
splitmix64 finalizer, applied to each key in turn), so a batch is drawn in a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers.models import WordPiece
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from locant.data.tokenizer import special_id, special_tokens
from locant.data.windows import Windows

EVALUATION_EPOCH = -1  # no training epoch has this number: the masks of an evaluation are always the same
IGNORED = -100  # label of a token that is no target, as torch's cross entropy expects
_CHOOSE, _REPLACE, _DRAW, _ORDER, _SAMPLE = range(5)  # independent streams of random numbers
_BEGINNINGS = ("Ġ", "▁")  # of a word, in tokens of byte-level BPE and of SentencePiece
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class MaskingConfig:
    """How tokens are hidden. Raises ValueError for shares outside their range."""

    rate: float = 0.15  # share of tokens (of words, if whole_word) that become targets
    mask: float = 0.8  # share of targets replaced by [MASK]
    random: float = 0.1  # share of targets replaced by a random token; the rest stays as it is
    whole_word: bool = False  # choose words, not tokens: all pieces of a word are targets or none

    def __post_init__(self) -> None:
        """Check the shares."""
        if not 0 < self.rate < 1:
            raise ValueError(f"masking: rate={self.rate} must lie between 0 and 1; 0.15 is usual")
        if self.mask < 0 or self.random < 0 or self.mask + self.random > 1 + 1e-9:
            raise ValueError(
                f"masking: mask={self.mask} and random={self.random} must be at least 0 and sum to at most 1; "
                "0.8 and 0.1 are usual"
            )


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What masking needs to know of a tokenizer, as arrays (cheap to send to a worker)."""

    mask: int  # id of [MASK]
    pad: int  # id of [PAD]
    special: np.ndarray  # [size] bool: never masked, never drawn ([UNK] is one: nobody should learn to guess it)
    continuation: np.ndarray  # [size] bool: goes on with a word ("##ing", or what lacks the "Ġ" or "▁" of a beginning)
    regular: np.ndarray  # [size - specials] int64: ids a random replacement is drawn from

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
        """Read the facts off a tokenizer. Raises ValueError where it has no mask or padding token."""
        special = special_tokens(tokenizer)
        return cls(
            mask=special_id(tokenizer, "mask_token"),
            pad=special_id(tokenizer, "pad_token"),
            special=special,
            continuation=_continuations(tokenizer) & ~special,
            regular=np.flatnonzero(~special),
        )


def _continuations(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Which tokens go on with a word. Some tokenizers mark what goes on, others what begins; none for all others."""
    found = np.zeros(len(tokenizer), dtype=bool)
    vocabulary = tokenizer.get_vocab()
    model = tokenizer.backend_tokenizer.model
    prefix = model.continuing_subword_prefix if isinstance(model, WordPiece) else None
    mark = next((mark for mark in _BEGINNINGS if any(token.startswith(mark) for token in vocabulary)), None)
    for token, index in vocabulary.items():
        found[index] = token.startswith(prefix) if prefix else mark is not None and not token.startswith(mark)
    return found


def mask_tokens(
    ids: np.ndarray,
    example_ids: np.ndarray | Sequence[int],
    vocabulary: Vocabulary,
    *,
    seed: int,
    epoch: int | np.ndarray,
    config: MaskingConfig | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Hide tokens of ids [B, n]; return (input ids, labels), int64 [B, n]; a label is -100 where there is no target.

    Each row has at least one target: where none was drawn, the token (word) nearest to being drawn is. Special tokens
    never are. `epoch` is one number or one for each row.
    Raises ValueError for a row without any token that could be masked and for shapes that do not match.
    """
    config = config or MaskingConfig()
    ids = np.asarray(ids).astype(np.int64)
    example_ids = np.asarray(example_ids)
    if ids.ndim != 2 or example_ids.shape != ids.shape[:1]:
        raise ValueError(
            f"mask_tokens: ids of shape {ids.shape} and example_ids of shape {example_ids.shape} came, "
            "[B, n] and [B] were needed; give one id for each row"
        )
    keys = _mixed(seed, epoch, example_ids)
    maskable = ~vocabulary.special[ids]
    if not maskable.any(axis=1).all():
        row = int(np.argmin(maskable.any(axis=1)))
        raise ValueError(
            f"mask_tokens: example {int(example_ids[row])} holds special tokens only, "
            "at least one token of text was needed; drop it"
        )
    chance = _uniform(keys, _CHOOSE, ids.shape[1])
    if config.whole_word:
        chance = _shared_by_word(chance, vocabulary.continuation[ids] & maskable)
    chance = np.where(maskable, chance, np.inf)
    targets = chance < np.maximum(config.rate, np.nextafter(chance.min(axis=1, keepdims=True), np.inf))
    labels = np.where(targets, ids, IGNORED)
    fate = _uniform(keys, _REPLACE, ids.shape[1])
    drawn = vocabulary.regular[(_uniform(keys, _DRAW, ids.shape[1]) * len(vocabulary.regular)).astype(np.int64)]
    inputs = np.where(targets & (fate < config.mask), vocabulary.mask, ids)
    swapped = targets & (fate >= config.mask) & (fate < config.mask + config.random)
    return np.where(swapped, drawn, inputs), labels


def token_draws(
    seed: int, epoch: int | np.ndarray | Sequence[int], example_ids: np.ndarray | Sequence[int], n: int
) -> np.ndarray:
    """One number in [0, 1) for each token, float64 [B, n]: a pure function of its arguments, apart from the masks."""
    return _uniform(_mixed(seed, np.asarray(epoch), np.asarray(example_ids)), _SAMPLE, n)


def order(seed: int, epoch: int, n: int) -> np.ndarray:
    """Return the order of n examples in an epoch: an int64 permutation [n], a pure function of its arguments."""
    return np.argsort(_bits(_mixed(seed, epoch, np.zeros(1)), _ORDER, n)[0], kind="stable")


def _shared_by_word(chance: np.ndarray, continuation: np.ndarray) -> np.ndarray:
    """Give every piece of a word the number of its first piece; a row that begins inside a word starts one there."""
    column = np.arange(chance.shape[1])
    start = np.maximum.accumulate(np.where(continuation, 0, column), axis=1)
    return np.take_along_axis(chance, start, axis=1)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mixed(seed: int, epoch: int | np.ndarray, example_ids: np.ndarray) -> np.ndarray:
    """Return one 64-bit key for each example; each argument is mixed in turn, so (1, 2) and (2, 1) are far apart."""
    key = np.zeros(example_ids.shape, dtype=np.uint64)
    for part in (np.int64(seed), np.asarray(epoch, dtype=np.int64), example_ids.astype(np.int64)):
        key = _mix((key ^ np.asarray(part).astype(np.uint64)) + _GOLDEN)
    return key


def _bits(keys: np.ndarray, stream: int, n: int) -> np.ndarray:
    counter = (np.arange(1, n + 1, dtype=np.uint64) + (np.uint64(stream) << np.uint64(40))) * _GOLDEN
    return _mix(_mix(keys[:, None] + counter))


def _uniform(keys: np.ndarray, stream: int, n: int) -> np.ndarray:
    return (_bits(keys, stream, n) >> np.uint64(11)) * 2.0**-53


class MlmDataset(Dataset):
    """Windows as examples: dicts of input_ids, example_id, epoch (and document_ids, where the windows carry them).

    The epoch travels inside the examples, so masks follow it into any worker. Hugging Face Trainer calls `set_epoch`
    through accelerate. Evaluation takes `epoch=EVALUATION_EPOCH`.
    """

    def __init__(self, windows: Windows, epoch: int = 0) -> None:
        self.windows = windows
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the examples taken from now on belong to; an evaluation set stays at its own."""
        if self.epoch != EVALUATION_EPOCH:
            self.epoch = int(epoch)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one example."""
        return _example(self.windows, index, self.epoch)


class ScheduledDataset(Dataset):
    """All examples of a whole training in the order they are used: item k is fixed by (seed, k) alone.

    Read it with a sequential sampler and without epochs: data order and masks then depend on no sampler, and training
    resumed at step s goes on with exactly the examples it would have had.
    """

    def __init__(self, windows: Any, seed: int, num_examples: int) -> None:
        self.windows = windows  # Windows, or what has their `ids`, `documents` and length
        self.seed = seed
        self.num_examples = num_examples
        self._order: tuple[int, np.ndarray] | None = None  # of the epoch in use

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the example of this place in the training."""
        if not 0 <= index < self.num_examples:
            raise IndexError(f"schedule: example {index} asked for, {self.num_examples} are scheduled")
        epoch, place = divmod(index, len(self.windows))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, order(self.seed, epoch, len(self.windows)))
        return _example(self.windows, int(self._order[1][place]), epoch)


def _example(windows: Any, index: int, epoch: int) -> dict[str, Any]:
    example = {"input_ids": windows.ids[index], "example_id": index, "epoch": epoch}
    if windows.documents is not None:
        example["document_ids"] = windows.documents[index]
    return example


class MlmCollator:
    """Examples -> a batch of input_ids, attention_mask, labels (and document_ids where given), int64 tensors [B, n].

    A pure function of the examples; shorter ones are padded on the right, which changes no mask. Use it with
    `TrainingArguments(remove_unused_columns=False)`. Raises ValueError for an example without `example_id` or `epoch`,
    and for whole words of a tokenizer that tells none.
    """

    def __init__(self, vocabulary: Vocabulary, seed: int, config: MaskingConfig | None = None) -> None:
        self.vocabulary = vocabulary
        self.seed = seed
        self.config = config or MaskingConfig()
        if self.config.whole_word and not vocabulary.continuation.any():
            raise ValueError(
                "masking: whole_word = true, but no token of this tokenizer goes on with a word ('##ing'), nor do its "
                "tokens say where words begin ('Ġ', '▁'), so words cannot be told; drop it, or take another tokenizer"
            )

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate a batch."""
        for name in ("input_ids", "example_id", "epoch"):
            if any(name not in example for example in examples):
                raise ValueError(
                    f"mlm collator: an example came without {name!r} (it has {sorted(examples[0])}); "
                    "set remove_unused_columns=False in TrainingArguments"
                )
        ids = _padded([example["input_ids"] for example in examples], self.vocabulary.pad)
        inputs, labels = mask_tokens(
            ids,
            np.array([example["example_id"] for example in examples]),
            self.vocabulary,
            seed=self.seed,
            epoch=np.array([example["epoch"] for example in examples]),
            config=self.config,
        )
        batch = {"input_ids": inputs, "attention_mask": (ids != self.vocabulary.pad).astype(np.int64), "labels": labels}
        if "document_ids" in examples[0]:
            batch["document_ids"] = _padded([example["document_ids"] for example in examples], -1)
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def _padded(rows: Sequence[np.ndarray], value: int) -> np.ndarray:
    out = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for row, values in enumerate(rows):
        out[row, : len(values)] = values
    return out
