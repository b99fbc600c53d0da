"""The text of a comparison, read and tokenized once, kept in the output folder, and read back by every run."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.data import TokenStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from locant.compare.recipe import Recipe


@dataclass(frozen=True)
class PreparedText:
    """Token streams and their tokenizer; `facts` says what was read (documents, bytes, tokens, fingerprint)."""

    tokenizer: PreTrainedTokenizerFast
    train: TokenStream
    validation: TokenStream
    facts: dict[str, Any]


def prepare_text(recipe: Recipe, folder: Path, *, progress: bool = True) -> PreparedText:
    """Reads the kept text of an output folder, or makes it there whole.

    Raises: ValueError where the text is too short for the recipe's windows.
    """
    if not (folder / "facts.json").is_file():
        _make(recipe, folder, progress)
    text = read_prepared(folder)
    _check_long_enough(recipe, text)
    return text


def read_prepared(folder: Path) -> PreparedText:
    """What `prepare_text` kept."""
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))

    def stream(part: str) -> TokenStream:
        return TokenStream(np.load(folder / f"{part}-tokens.npy"), np.load(folder / f"{part}-starts.npy"))

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    return PreparedText(tokenizer, stream("train"), stream("validation"), facts)


def _make(recipe: Recipe, folder: Path, progress: bool) -> None:
    import numpy as np

    from locant.data import load_corpus

    settings = recipe.evaluate
    corpus = load_corpus(
        recipe.text,
        recipe.tokenizer,
        validation_fraction=settings.validation_fraction,
        split_seed=settings.split_seed,
        progress=progress,
    )
    with whole_folder(folder) as part:
        for name, stream in (("train", corpus.train), ("validation", corpus.validation)):
            np.save(part / f"{name}-tokens.npy", stream.tokens)
            np.save(part / f"{name}-starts.npy", stream.starts)
        corpus.tokenizer.save_pretrained(str(part))
        facts = {
            "documents": corpus.num_documents,
            "bytes": corpus.num_bytes,
            "train_tokens": len(corpus.train.tokens),
            "validation_tokens": len(corpus.validation.tokens),
            "vocabulary": len(corpus.tokenizer),
            "fingerprint": corpus.fingerprint,
        }
        (part / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder beside ``folder`` to write into, which takes its place when all is there, or is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield part
        os.chmod(part, 0o755)
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _check_long_enough(recipe: Recipe, text: PreparedText) -> None:
    from locant.data import make_windows

    try:
        make_windows(text.train, recipe.train.length, text.tokenizer, what="training text")
    except ValueError as error:
        raise ValueError(f"{error} (train.length)") from error
    for length in recipe.evaluate.lengths_for(recipe.train.length):
        try:
            make_windows(text.validation, length, text.tokenizer, what="validation text")
        except ValueError as error:
            raise ValueError(
                f"{error}, or give a larger evaluate.validation_fraction (now {recipe.evaluate.validation_fraction:g}) "
                "or smaller evaluate.lengths"
            ) from error
