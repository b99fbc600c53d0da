"""A WordPiece tokenizer: trained on the text at hand, or read from a local file."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from locant.data.cache import load_cached, store_cached
from locant.data.document import Document, text_fingerprint
from locant.data.files import expand_path

TOKENIZER_VERSION = 1  # raise it when training below changes: it is part of the cache's key
SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@dataclass(frozen=True)
class TokenizerConfig:
    """What tokenizer to use. Raises ValueError for impossible sizes and for settings that a `path` leaves unused."""

    vocab_size: int = 8192  # tokens, the five special ones included
    lowercase: bool = True  # lower-case and strip accents first, as BERT uncased does
    min_frequency: int = 2  # occurrences a pair needs to be merged
    path: str | None = None  # read this instead of training: a folder, tokenizer.json(.gz), or vocab.txt(.gz)

    def __post_init__(self) -> None:
        """Check sizes and contradictions."""
        if self.vocab_size <= len(SPECIAL_TOKENS):
            raise ValueError(
                f"tokenizer: vocab_size={self.vocab_size} must be above {len(SPECIAL_TOKENS)}; 8192 is usual"
            )
        if self.min_frequency < 1:
            raise ValueError(f"tokenizer: min_frequency={self.min_frequency} must be at least 1; 2 is usual")
        if self.path is not None and (self.vocab_size, self.min_frequency) != (8192, 2):
            raise ValueError(
                f"tokenizer: vocab_size={self.vocab_size} and min_frequency={self.min_frequency} are for training, "
                f"but path={self.path!r} is read instead; drop either"
            )


def build_tokenizer(
    config: TokenizerConfig, documents: Sequence[Document], *, progress: bool = True
) -> PreTrainedTokenizerFast:
    """Return the tokenizer that `config` describes; a trained one is cached by text and settings.

    The same text and settings give the same ids. [CLS] and [SEP] are not added by it: `make_windows` places them.
    """
    if config.path is not None:
        return load_tokenizer(config.path, lowercase=config.lowercase)
    settings = [
        TOKENIZER_VERSION,
        text_fingerprint(documents),
        config.vocab_size,
        config.lowercase,
        config.min_frequency,
    ]
    name = f"tokenizer-{sha256(json.dumps(settings).encode()).hexdigest()[:16]}.json"
    if (cached := load_cached(name)) is not None:
        return _wrapped(Tokenizer.from_str(cached.decode()))
    tokenizer = _trained(config, documents, progress)
    store_cached(name, tokenizer.to_str().encode())
    return _wrapped(tokenizer)


def load_tokenizer(path: str, *, lowercase: bool = True) -> PreTrainedTokenizerFast:
    """Read a tokenizer from a local folder, a tokenizer.json or a WordPiece vocab.txt (each file also as .gz).

    `lowercase` is for a vocab.txt, which does not say; the other forms carry their own rule.
    Raises FileNotFoundError where nothing is found, ValueError for other files and for missing special tokens.
    """
    where = Path(expand_path(path))
    if not where.exists():
        raise FileNotFoundError(f"tokenizer {path!r}: nothing at {where}; give a folder, tokenizer.json or vocab.txt")
    suffixes = [suffix for suffix in where.suffixes if suffix != ".gz"]
    is_list = suffixes[-1:] == [".txt"]
    if not (where.is_dir() or is_list or suffixes[-1:] == [".json"]):
        raise ValueError(
            f"tokenizer {path!r}: unknown extension {where.suffix!r}; give a folder, tokenizer.json or vocab.txt"
        )
    if not is_list and not lowercase:
        raise ValueError(f"tokenizer {path!r}: lowercase=False is for a vocab.txt, this brings its own rule; drop it")
    try:
        if where.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True)
        elif is_list:
            tokens = _file_text(where).removesuffix("\n").split("\n")
            tokenizer = _wrapped(
                _word_piece({token.rstrip("\r"): index for index, token in enumerate(tokens)}, lowercase)
            )
        else:
            tokenizer = _wrapped(Tokenizer.from_str(_file_text(where)))
    except Exception as error:  # each library has its own kinds
        raise ValueError(f"tokenizer {path!r}: {where} cannot be read ({error}); fetch it again") from error
    return _checked(tokenizer, path)


@contextmanager
def parallel_tokenizers() -> Iterator[None]:
    """Let tokenizers use all cores inside; outside say "false", or every later fork (data workers) prints a warning."""
    if "TOKENIZERS_PARALLELISM" in os.environ:
        yield  # the user's word stands
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _file_text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _word_piece(vocabulary: dict[str, int], lowercase: bool) -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"], max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _trained(config: TokenizerConfig, documents: Sequence[Document], progress: bool) -> Tokenizer:
    """Train twice: the trainer numbers single characters in hash order, which changes from run to run and breaks ties.

    The first round merges nothing and finds the characters; the second is given them in sorted order.
    """
    special = list(SPECIAL_TOKENS.values())
    alphabet = sorted(_train_vocabulary(config, 1, special, documents, progress).keys() - special)
    if not alphabet:
        raise ValueError(f"tokenizer: {len(documents)} documents hold no word, some text was needed; name other text")
    if len(special) + len(alphabet) > config.vocab_size:
        raise ValueError(
            f"tokenizer: vocab_size={config.vocab_size} cannot hold the {len(alphabet)} characters of the text and "
            f"{len(special)} special tokens; raise it to more than {len(special) + len(alphabet)}"
        )
    vocabulary = _train_vocabulary(config, config.vocab_size, special + alphabet, documents, progress)
    return _word_piece(dict(sorted(vocabulary.items(), key=lambda item: item[1])), config.lowercase)


def _train_vocabulary(
    config: TokenizerConfig, size: int, first: list[str], documents: Sequence[Document], progress: bool
) -> dict[str, int]:
    tokenizer = _word_piece({}, config.lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=size, min_frequency=config.min_frequency, special_tokens=list(first), show_progress=False
    )
    bar = tqdm(documents, desc="training the tokenizer", unit="document", delay=2, leave=False, disable=not progress)
    with parallel_tokenizers():
        tokenizer.train_from_iterator((paragraph for document in bar for paragraph in document.paragraphs), trainer)
    return tokenizer.get_vocab(with_added_tokens=False)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    known = {role: token for role, token in SPECIAL_TOKENS.items() if tokenizer.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known)


def special_id(tokenizer: PreTrainedTokenizerFast, role: str) -> int:
    """Return the id of a special token such as "mask_token". Raises ValueError for a tokenizer without it."""
    index = getattr(tokenizer, f"{role}_id")
    if not isinstance(index, int):
        raise ValueError(f"tokenizer: it has no {role}, masked-language modeling needs one; use one that has")
    return index


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Which ids are special tokens, [UNK] among them, and so no text to predict: bool [vocabulary]."""
    special = np.zeros(len(tokenizer), dtype=bool)
    special[tokenizer.all_special_ids] = True
    return special


def _checked(tokenizer: PreTrainedTokenizerFast, path: str) -> PreTrainedTokenizerFast:
    missing = [role for role in SPECIAL_TOKENS if getattr(tokenizer, role) is None]
    if missing:
        raise ValueError(
            f"tokenizer {path!r}: it has no {', '.join(missing)}; masked-language modeling needs one that has"
        )
    return tokenizer
