"""Text that is read as it is needed, through `datasets`, with a place to go on from that is three numbers.

Windows are made in blocks of `shuffle`; a block is put in an order that follows from seed and block, and its place
(pass over the text, document, token) says where it begins. Each process reads the whole stream and takes its share.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from locant.data import Document, TokenStream, order
from locant.data.files import file_format, find_files
from locant.data.tokenizer import special_id, special_tokens
from locant.data.windows import tokenize
from locant.training.folder import read_whole, write_atomically

if TYPE_CHECKING:
    from locant.pretrain.recipe import PretrainText

BUILDERS = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}
HEAD = 1 << 20  # bytes of each file that its digest reads


@dataclass(frozen=True)
class Place:
    """Where a stream goes on: how often it was read whole, the document, and the token in it."""

    read: int
    document: int
    token: int = 0


class Source:
    """A streamed text. Raises: FileNotFoundError; ValueError for files of several formats."""

    def __init__(self, text: PretrainText) -> None:
        self.text = text
        self.files = [] if text.is_dataset else find_files(text.patterns)
        formats = sorted({str(file_format(path)) for path in self.files})
        if len(formats) > 1:
            raise ValueError(
                f"text source: streaming reads files of one format, but {', '.join(formats)} came; give one"
            )
        self.builder = BUILDERS[formats[0]] if formats else ""

    def documents(self, first: int) -> Iterator[str]:
        """Texts from a document on. Raises: ValueError for one that `datasets` cannot read."""
        import datasets

        field = self.text.field
        try:
            rows = self._open(datasets).skip(first)
            for number, row in enumerate(rows, start=first):
                if field not in row:
                    raise ValueError(f"no column {field!r} in {sorted(row)}")
                if not isinstance(row[field], str | None):
                    kind = type(row[field]).__name__
                    raise ValueError(f"column {field!r} of row {number} holds {kind}, a text was needed")
                yield row[field] or ""
        except Exception as error:  # of many kinds: connection, not found, damaged files
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise ValueError(
                f"text source {self.text.text!r}: it cannot be streamed ({reason}); name other text"
            ) from error

    def _open(self, datasets: Any) -> Any:
        if self.builder:
            whole = {"sample_by": "document"} if self.builder == "text" else {}
            names = [str(path) for path in self.files]
            return datasets.load_dataset(self.builder, data_files=names, split="train", streaming=True, **whole)
        name, _, config = self.text.patterns[0].removeprefix("hf:").partition(":")
        return datasets.load_dataset(name, config or None, split=self.text.split, streaming=True)

    def digest(self) -> str:
        """SHA-256 of the names and sizes of the files and of how each begins; of a dataset, of its name and split."""
        found = hashlib.sha256(f"{self.text.patterns if self.text.is_dataset else ''} {self.text.split}".encode())
        for path in self.files:
            with open(path, "rb") as file:
                found.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(HEAD))
        return found.hexdigest()

    def head(self, tokenizer: PreTrainedTokenizerFast, tokens: int) -> tuple[TokenStream, int]:
        """The first documents that have so many tokens, and how many they are. Raises: ValueError for shorter text."""
        held: list[TokenStream] = []
        for count, text in enumerate(self.documents(0), start=1):
            one = tokenize([Document("", text)], tokenizer, progress=False)
            held += [one] if len(one) else []
            if sum(map(len, held)) >= tokens:
                starts = np.concatenate([[0], np.cumsum([len(one) for one in held])])
                return TokenStream(np.concatenate([one.tokens for one in held]), starts), count
        raise ValueError(
            f"text source {self.text.text!r}: it has {sum(map(len, held))} tokens, fewer than the {tokens} that are "
            "held out of it; give more text, or a smaller train.validation_tokens"
        )


class WindowStream:
    """Windows of a stream by number, to be asked for in rising order, or from a place that was restored."""

    def __init__(self, source: Source, first: int, tokenizer: PreTrainedTokenizerFast, length: int, seed: int) -> None:
        self.source, self.first, self.tokenizer, self.length, self.seed = source, first, tokenizer, length, seed
        self.cls, self.sep, self.pad = (special_id(tokenizer, f"{role}_token") for role in ("cls", "sep", "pad"))
        self.special = special_tokens(tokenizer)
        self.size = source.text.shuffle
        self.places = {0: Place(0, first)}  # where each block begins
        self.block, self.windows = -1, []
        self._open: tuple[Place, Iterator[str], np.ndarray] | None = None  # the document that is being read
        self._barren = 0  # times that the text ended since there was a window

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One example."""
        block, at = divmod(index, self.size)
        if block != self.block:
            for number in range(max(b for b in self.places if b <= block), block + 1):
                self.windows, self.places[number + 1] = self._read(self.places[number])
            self.block = block
        chosen = int(order(self.seed, block, self.size)[at])
        return {**self.windows[chosen], "example_id": block * self.size + chosen, "epoch": 0}

    def save(self, path: Path, index: int) -> None:
        """Keeps where the block of an example begins. Raises: OSError."""
        block = index // self.size
        write_atomically(path, json.dumps({"block": block, **dataclasses.asdict(self.places[block])}) + "\n")

    def restore(self, path: Path) -> None:
        """Takes up a kept place."""
        body = read_whole(path)
        assert body is not None, path  # the list of a whole checkpoint names it
        self.places = {body.pop("block"): Place(**body)}
        self.block, self._open = -1, None

    def _read(self, place: Place) -> tuple[list[dict[str, Any]], Place]:
        """The windows of the block that begins at a place, and where the next begins."""
        return self._packed(place) if self.source.text.pack else self._pieces(place)

    def _packed(self, place: Place) -> tuple[list[dict[str, Any]], Place]:
        windows: list[dict[str, Any]] = []
        while len(windows) < self.size:
            row, documents, place = self._row(place)
            window: dict[str, Any] = {"input_ids": np.concatenate([[self.cls], row, [self.sep]])}
            if self.source.text.isolate_documents:
                window["document_ids"] = np.concatenate([documents[:1], documents, documents[-1:]])
            self._add(windows, row, window)
        return windows, place

    def _row(self, place: Place) -> tuple[np.ndarray, np.ndarray, Place]:
        """The tokens of a packed window, of which part of the window each is, and where the next begins."""
        wanted, parts = self.length - 2, []
        while wanted:
            tokens = self._tokens(place)
            parts.append(tokens[place.token : place.token + wanted])
            wanted -= len(parts[-1])
            end = place.token + len(parts[-1])
            place = dataclasses.replace(place, token=end) if end < len(tokens) else self._next(place)
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts]), place

    def _pieces(self, place: Place) -> tuple[list[dict[str, Any]], Place]:
        windows: list[dict[str, Any]] = []
        while len(windows) < self.size:
            tokens = self._tokens(place)
            piece = tokens[place.token : place.token + self.length - 2]
            ended = {"ended": True} if len(piece) < self.length - 2 else {}
            self._add(windows, piece, {"input_ids": np.concatenate([[self.cls], piece, [self.sep]]), **ended})
            end = place.token + len(piece)
            place = dataclasses.replace(place, token=end) if end < len(tokens) else self._next(place)
        return windows, place

    def _add(self, windows: list[dict[str, Any]], text: np.ndarray, window: dict[str, Any]) -> None:
        """Takes a window in which there is something to predict."""
        if not self.special[text].all():
            windows.append(window)
            self._barren = 0

    def _tokens(self, place: Place) -> np.ndarray:
        """The tokens of the document at a place, which goes back to the first one where the text has ended."""
        there = self._open
        if there is None or (there[0].read, there[0].document) != (place.read, place.document):
            texts = self.source.documents(place.document) if there is None else there[1]
            self._open = (place, texts, self._encoded(next(texts, None)))
        assert self._open is not None
        return self._open[2]

    def _next(self, place: Place) -> Place:
        """The document behind a place; behind the last, the first that is not held out."""
        assert self._open is not None
        texts = self._open[1]
        text = next(texts, None)
        if text is None:
            texts = self.source.documents(self.first)
            text = next(texts, None)
            place = Place(place.read + 1, self.first - 1)
            self._barren += 1
            if self._barren > 1:
                raise ValueError(
                    f"text source {self.source.text.text!r}: behind the {self.first} documents that are held out it "
                    "has no token to predict; give text that the tokenizer knows"
                )
        place = Place(place.read, place.document + 1)
        self._open = (place, texts, self._encoded(text))
        return place

    def _encoded(self, text: str | None) -> np.ndarray:
        if text is None:
            raise ValueError(
                f"text source {self.source.text.text!r}: all {self.first} documents are held out; give more text"
            )
        tokens = tokenize([Document("", text)], self.tokenizer, progress=False).tokens.astype(np.int64)
        # a packed document brings the [SEP] that ends it; a blank one is none
        return np.append(tokens, self.sep) if self.source.text.pack and len(tokens) else tokens
