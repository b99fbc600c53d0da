"""Documents -> one stream of token ids -> windows of any length, so that every length reads the same text."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from locant.data.cache import load_cached, store_cached
from locant.data.document import Document, text_fingerprint
from locant.data.tokenizer import parallel_tokenizers, special_id, special_tokens

STREAM_VERSION = 1  # raise it when `encode` changes: it is part of the cache's key
_BATCH_CHARACTERS = 1_000_000  # characters encoded at a time: bounds the memory that encodings take


@dataclass(frozen=True)
class TokenStream:
    """All documents as one array of ids, without special tokens."""

    tokens: np.ndarray  # [T] uint16, or int32 for vocabularies above 65,536
    starts: np.ndarray  # [documents + 1] int64: document d is tokens[starts[d] : starts[d + 1]]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Windows:
    """Windows of one length; the row number is the example id. Packed windows are full, pieces end in padding."""

    ids: np.ndarray  # [N, length], [CLS] first and [SEP] last
    documents: np.ndarray | None  # [N, length] int32 document of each token, or None where windows do not carry it

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def length(self) -> int:
        """Tokens in a window, [CLS] and [SEP] included."""
        return self.ids.shape[1]


def split_documents(
    documents: Sequence[Document], fraction: float = 0.05, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Return (training, validation): whole documents, drawn by `seed` until `fraction` of the text is reached.

    A document that would take validation past half as much again is passed over. Where that leaves too little (a single
    document, or only huge ones), the last `fraction` of each document's paragraphs validates: two contiguous blocks.
    Raises ValueError for a fraction outside (0, 1) and for text that cannot be cut.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation split: fraction={fraction} must lie between 0 and 1; 0.05 is usual")
    sizes = [len(document.text) for document in documents]
    target = fraction * sum(sizes)
    chosen: set[int] = set()
    taken = 0
    for index in np.random.Generator(np.random.Philox(seed)).permutation(len(documents)).tolist():
        if taken < target and taken + sizes[index] <= 1.5 * target:
            chosen.add(index)
            taken += sizes[index]
    if chosen and taken >= target / 2:
        train = [document for index, document in enumerate(documents) if index not in chosen]
        return train, [documents[index] for index in sorted(chosen)]
    halves = [half for document in documents if (half := _cut(document, fraction))]
    if not halves:
        raise ValueError(
            f"validation split: {len(documents)} documents of {sum(sizes)} characters cannot be cut at {fraction}; "
            "give more text"
        )
    return [train for train, _ in halves], [validation for _, validation in halves]


def _cut(document: Document, fraction: float) -> tuple[Document, Document] | None:
    paragraphs, glue = document.paragraphs, "\n"
    if len(paragraphs) < 2 / fraction:  # too few to come near the fraction
        paragraphs, glue = document.text.split(), " "
    ends = np.cumsum([len(paragraph) for paragraph in paragraphs])
    first = int(np.searchsorted(ends, (1 - fraction) * ends[-1])) if len(ends) else 0
    first = min(max(first, 1), len(paragraphs) - 1)
    if first < 1:
        return None
    head, tail = glue.join(paragraphs[:first]), glue.join(paragraphs[first:])
    return Document(f"{document.name} (training part)", head), Document(f"{document.name} (validation part)", tail)


def encode(documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, progress: bool = True) -> TokenStream:
    """Encode all documents; cached by text and tokenizer. A "[MASK]" written in the text stays plain text."""
    backend = tokenizer.backend_tokenizer
    key = sha256(f"{STREAM_VERSION} {text_fingerprint(documents)} {backend.to_str()}".encode()).hexdigest()[:16]
    name = f"tokens-{key}.npz"
    if (cached := load_cached(name)) is not None:
        arrays = np.load(io.BytesIO(cached))
        return TokenStream(arrays["tokens"], arrays["starts"])
    stream = tokenize(documents, tokenizer, progress=progress)
    buffer = io.BytesIO()
    np.savez(buffer, tokens=stream.tokens, starts=stream.starts)
    store_cached(name, buffer.getvalue())
    return stream


def tokenize(
    documents: Sequence[Document], tokenizer: PreTrainedTokenizerFast, *, progress: bool = True
) -> TokenStream:
    """The same without the cache."""
    backend = tokenizer.backend_tokenizer
    dtype = np.uint16 if len(tokenizer) <= 1 << 16 else np.int32
    counts = np.zeros(len(documents), dtype=np.int64)
    pieces: list[np.ndarray] = []
    total = sum(len(document.text) for document in documents)
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True  # "[MASK]" in a text about BERT is text
    try:
        with (
            parallel_tokenizers(),
            tqdm(
                total=total,
                desc="encoding text",
                unit="char",
                unit_scale=True,
                delay=2,
                leave=False,
                disable=not progress,
            ) as bar,
        ):
            for batch in _batches(documents):
                encodings = backend.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
                for (index, text), encoding in zip(batch, encodings, strict=True):
                    ids = np.array(encoding.ids, dtype=dtype)
                    counts[index] += len(ids)
                    pieces.append(ids)
                    bar.update(len(text))
    finally:
        backend.encode_special_tokens = before
    tokens = np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)
    return TokenStream(tokens, np.concatenate([[0], np.cumsum(counts)]))


def _batches(documents: Sequence[Document]) -> Iterator[list[tuple[int, str]]]:
    """Yield lists of (document number, paragraph), about a million characters each."""
    batch: list[tuple[int, str]] = []
    characters = 0
    for index, document in enumerate(documents):
        for paragraph in document.paragraphs:
            batch.append((index, paragraph))
            characters += len(paragraph)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def make_windows(
    stream: TokenStream, length: int, tokenizer: PreTrainedTokenizerFast, *, isolate: bool = False, what: str = "text"
) -> Windows:
    """Pack a stream into windows of `length` tokens: [CLS], length - 2 tokens of text, [SEP].

    Documents follow one another in a window with a [SEP] in between, which belongs to the document that it ends; what
    does not fill a last window is left out, and so are windows of special tokens alone, as [UNK] makes them of a script
    that the tokenizer does not know: nothing in them could be predicted. `isolate=True` adds the document of every
    token ([CLS] goes with the first token, the closing [SEP] with the last), so that attention can be kept inside
    documents. `what` names the text in errors.
    Raises ValueError for a length below 3, for text shorter than one window, and for text without a known word.
    """
    if length < 3:
        raise ValueError(f"windows: length={length} leaves no room between [CLS] and [SEP]; take at least 3")
    cls, sep = special_id(tokenizer, "cls_token"), special_id(tokenizer, "sep_token")
    inner = length - 2
    num_documents = len(stream.starts) - 1
    num_tokens = len(stream) + max(num_documents - 1, 0)
    count = num_tokens // inner
    if count == 0:
        raise ValueError(
            f"windows: the {what} has {num_tokens} tokens, but one window of length={length} needs {inner}; "
            "give more text or shorten the window"
        )
    flow = np.insert(stream.tokens, stream.starts[1:-1], sep)[: count * inner].reshape(count, inner)
    telling = ~special_tokens(tokenizer)[flow].all(axis=1)
    if not telling.any():
        raise ValueError(
            f"windows: the {what} has {num_tokens} tokens and none to predict; give text that the tokenizer knows"
        )
    flow = flow[telling]
    ids = np.empty((len(flow), length), dtype=stream.tokens.dtype)
    ids[:, 0], ids[:, 1:-1], ids[:, -1] = cls, flow, sep
    if not isolate:
        return Windows(ids, None)
    lengths = np.diff(stream.starts) + (np.arange(num_documents) < num_documents - 1)
    owner = np.repeat(np.arange(num_documents, dtype=np.int32), lengths)[: count * inner].reshape(count, inner)[telling]
    return Windows(ids, np.concatenate([owner[:, :1], owner, owner[:, -1:]], axis=1))


def make_pieces(stream: TokenStream, length: int, tokenizer: PreTrainedTokenizerFast, *, what: str = "text") -> Windows:
    """Cut each document into pieces of up to `length` tokens, one a window: [CLS], text, [SEP], and padding behind it.

    Pieces without a token of text that could be predicted are left out. Raises ValueError for a length below 3 and for
    text without any piece.
    """
    if length < 3:
        raise ValueError(f"windows: length={length} leaves no room between [CLS] and [SEP]; take at least 3")
    cls, sep, pad = (special_id(tokenizer, f"{role}_token") for role in ("cls", "sep", "pad"))
    special = special_tokens(tokenizer)
    rows = []
    for start, end in zip(stream.starts[:-1], stream.starts[1:], strict=True):
        for begin in range(start, end, length - 2):
            piece = stream.tokens[begin : min(begin + length - 2, end)]
            if not special[piece].all():
                row = np.full(length, pad, dtype=stream.tokens.dtype)
                row[0], row[1 : len(piece) + 1], row[len(piece) + 1] = cls, piece, sep
                rows.append(row)
    if not rows:
        raise ValueError(f"windows: the {what} has {len(stream)} tokens and none to predict; give more text")
    return Windows(np.stack(rows), None)
