"""Text to tokens in one call: read, split, tokenize, with every slow step cached."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from locant.data.corpora import TextSource, read_text
from locant.data.document import text_fingerprint
from locant.data.tokenizer import TokenizerConfig, build_tokenizer
from locant.data.windows import TokenStream, encode, split_documents


@dataclass(frozen=True)
class Corpus:
    """A text ready for windows, with the facts that a run should record."""

    tokenizer: PreTrainedTokenizerFast
    train: TokenStream
    validation: TokenStream
    num_documents: int  # training and validation together
    num_bytes: int  # UTF-8 bytes of text, both together
    fingerprint: str  # SHA-256 over training and validation text: equal text has an equal one


def load_corpus(
    source: TextSource,
    tokenizer: TokenizerConfig,
    *,
    validation_fraction: float = 0.05,
    split_seed: int = 0,
    progress: bool = True,
) -> Corpus:
    """Read a text, split it by document, train (or read) the tokenizer on the training part, encode both parts."""
    documents = read_text(source, progress=progress)
    train, validation = split_documents(documents, validation_fraction, split_seed)
    built = build_tokenizer(tokenizer, train, progress=progress)
    return Corpus(
        tokenizer=built,
        train=encode(train, built, progress=progress),
        validation=encode(validation, built, progress=progress),
        num_documents=len(documents),
        num_bytes=sum(len(document.text.encode()) for document in documents),
        fingerprint=text_fingerprint([*train, *validation]),
    )
