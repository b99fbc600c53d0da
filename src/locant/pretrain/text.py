"""The text of a run: its tokenizer, the windows of each stage, and those that validate."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer
from tokenizers.processors import BertProcessing
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from locant.data import (
    ScheduledDataset,
    TokenStream,
    Windows,
    build_tokenizer,
    load_corpus,
    make_pieces,
    make_windows,
)
from locant.data.tokenizer import special_id
from locant.pretrain.recipe import PretrainRecipe, PretrainText, Stage
from locant.pretrain.stream import Source, WindowStream
from locant.training.checkpoints import checkpoint_step
from locant.training.mlm import derived_seed

STREAM = "stream.json"  # in a checkpoint: where a streamed text goes on


@runtime_checkable
class Examples(Protocol):
    """The examples of one stage in the order they are used: number k is fixed by the seed and k alone."""

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """One example: input_ids, example_id, epoch; document_ids where documents are kept apart; maybe ended."""
        ...


@dataclass(frozen=True)
class Text:
    """A text, read. ``facts``: what was read, in numbers and digests."""

    tokenizer: PreTrainedTokenizerFast
    stages: tuple[Examples, ...]
    validation: Windows
    facts: dict[str, Any]


def read(recipe: PretrainRecipe, *, progress: bool) -> Text:
    """Reads, splits and tokenizes a text, or opens it as a stream.

    Raises: FileNotFoundError; ValueError for text that is missing or short.
    """
    if recipe.text.streaming:
        return _streamed(recipe)
    corpus = load_corpus(
        recipe.text,
        recipe.tokenizer,
        validation_fraction=recipe.text.validation_fraction,
        split_seed=recipe.text.split_seed,
        progress=progress,
    )
    tokenizer = corpus.tokenizer
    stages = tuple(
        scheduled(windows_of(corpus.train, stage.length, tokenizer, recipe.text, "training text"), recipe, index, stage)
        for index, stage in enumerate(recipe.stages)
    )
    facts = {
        "documents": corpus.num_documents,
        "bytes": corpus.num_bytes,
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
        "vocabulary": len(tokenizer),
        "sha256": corpus.fingerprint,
        "tokenizer_sha256": tokenizer_digest(tokenizer),
    }
    return Text(tokenizer, stages, held_out(corpus.validation, tokenizer, recipe), facts)


def _streamed(recipe: PretrainRecipe) -> Text:
    """A text that is read as it is needed; its first documents are held out, until they are enough to validate on."""
    tokenizer = build_tokenizer(recipe.tokenizer, ())
    source = Source(recipe.text)
    validation, first = source.head(tokenizer, recipe.train.validation_tokens)
    stages = tuple(
        WindowStream(source, first, tokenizer, stage.length, stage_seed(recipe.seed, index))
        for index, stage in enumerate(recipe.stages)
    )
    facts = {
        "held_out_documents": first,
        "validation_tokens": len(validation),
        "vocabulary": len(tokenizer),
        "sha256": source.digest(),
        "tokenizer_sha256": tokenizer_digest(tokenizer),
    }
    return Text(tokenizer, stages, held_out(validation, tokenizer, recipe), facts)


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of a tokenizer."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def stage_seed(seed: int, stage: int) -> int:
    """From which the order and the masks of a stage follow."""
    return derived_seed("pretrain stage", seed, stage)


def scheduled(windows: Windows, recipe: PretrainRecipe, index: int, stage: Stage) -> ScheduledDataset:
    """The windows of a stage, each once before any comes again."""
    return ScheduledDataset(windows, stage_seed(recipe.seed, index), stage.steps * stage.batch_size)


def windows_of(
    stream: TokenStream, length: int, tokenizer: PreTrainedTokenizerFast, text: PretrainText, what: str
) -> Windows:
    """A stream as windows, packed or not."""
    if not text.pack:
        return make_pieces(stream, length, tokenizer, what=what)
    return make_windows(stream, length, tokenizer, isolate=text.isolate_documents, what=what)


def held_out(stream: TokenStream, tokenizer: PreTrainedTokenizerFast, recipe: PretrainRecipe) -> Windows:
    """The first windows of the held-out text, of the longest length. Raises: ValueError where there is too little."""
    try:
        windows = windows_of(stream, recipe.length, tokenizer, recipe.text, "validation text")
    except ValueError as error:
        raise ValueError(
            f"{error}, or a larger text.validation_fraction (now {recipe.text.validation_fraction:g}; of a stream: "
            f"train.validation_tokens, now {recipe.train.validation_tokens})"
        ) from error
    count = max(1, recipe.train.validation_tokens // recipe.length)
    documents = None if windows.documents is None else windows.documents[:count]
    return Windows(windows.ids[:count], documents)


class MicroBatches(Dataset[tuple[int, list[dict[str, Any]]]]):
    """The batches of all steps in a row; ``parts``: into how many a step is cut, for processes and accumulation.

    Item k is (stage, examples). A step's examples are the same whatever the number of parts.
    """

    def __init__(self, recipe: PretrainRecipe, examples: Sequence[Examples], parts: int, pad: int) -> None:
        self.stages, self.examples, self.parts, self.pad = recipe.stages, examples, parts, pad
        self.steps = recipe.steps

    def __len__(self) -> int:
        return self.steps * self.parts

    def __getitem__(self, index: int) -> tuple[int, list[dict[str, Any]]]:
        step, part = divmod(index, self.parts)
        number, step = stage_at(self.stages, step)
        share = self.stages[number].batch_size // self.parts
        first = step * self.stages[number].batch_size + part * share
        return number, [trimmed(self.examples[number][first + at], self.pad) for at in range(share)]

    def save_place(self, checkpoint: Path, step: int) -> None:
        """Keeps where a stream goes on after a step. Raises: OSError."""
        if step < self.steps:
            number, within = stage_at(self.stages, step)
            stream = self.examples[number]
            if isinstance(stream, WindowStream):
                stream.save(checkpoint / STREAM, within * self.stages[number].batch_size)

    def restore_place(self, checkpoint: Path) -> None:
        """Goes to where a checkpoint left the stream, without reading all of it again."""
        number, _ = stage_at(self.stages, checkpoint_step(checkpoint))
        stream = self.examples[number]
        if isinstance(stream, WindowStream):
            stream.restore(checkpoint / STREAM)


def stage_at(stages: Sequence[Stage], step: int) -> tuple[int, int]:
    """(stage, step within it) of a step counted from 0. Raises: IndexError past the last."""
    for number, stage in enumerate(stages):
        if step < stage.steps:
            return number, step
        step -= stage.steps
    raise IndexError(f"schedule: step {step} past the last stage was asked for")


def trimmed(example: dict[str, Any], pad: int) -> dict[str, Any]:
    """Without the padding behind it, which a batch adds as far as it needs it; ``ended``: the text ended there."""
    ids = example["input_ids"]
    return example if ids[-1] != pad else {**example, "input_ids": ids[: int((ids != pad).sum())], "ended": True}


def ready_tokenizer(tokenizer: PreTrainedTokenizerFast, length: int | None) -> PreTrainedTokenizerFast:
    """A copy that puts [CLS] and [SEP] where the model learned to see them, and knows how long its input may be."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    if not backend.num_special_tokens_to_add(False):
        cls, sep = (
            (str(getattr(tokenizer, f"{role}_token")), special_id(tokenizer, f"{role}_token"))
            for role in ("cls", "sep")
        )
        backend.post_processor = BertProcessing(sep, cls)
    known: dict[str, Any] = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    if length is not None:
        known["model_max_length"] = length
    return PreTrainedTokenizerFast(tokenizer_object=backend, **known)
