"""Symbols: the pool that tokens are drawn from, and a tokenizer that knows nothing but whole symbols.

The study drew its tokens from the vocabulary of T5; what is measured does not depend on their names, so the pool here
is the ASCII part of that list.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

ASCII = tuple(string.digits + string.ascii_lowercase + string.ascii_uppercase + "!$%&()*+,-./:;")
PAD, END, UNKNOWN = "[PAD]", "[END]", "[UNK]"
_SYMBOL = re.compile(r"\[[A-Z]+\]|\*\*|[A-Za-z_']+(?:-[a-z]+)*\d*|\d|\S")


def pool(size: int) -> tuple[str, ...]:
    """The first ``size`` symbols: 76 single characters, then doubled letters.

    Raises: ValueError below 1 and above 128.
    """
    doubled = tuple(2 * letter for letter in string.ascii_letters)
    if not 1 <= size <= len(ASCII) + len(doubled):
        raise ValueError(f"symbols: a pool of {size} was asked for, needed 1 to {len(ASCII) + len(doubled)}")
    return (ASCII + doubled)[:size]


def split(text: str) -> list[str]:
    """A text as symbols: words, single digits, signs; `[SEP]`, `[NEXT]` and `**` are one symbol each."""
    return _SYMBOL.findall(text)


class SymbolTokenizer:
    """Symbols to ids and back. White space is dropped, so prompt and target tokenize the same alone and joined.

    ``vocabulary``: symbols in order of their ids; the first three are padding, end and unknown.
    """

    def __init__(self, symbols: Iterable[str]) -> None:
        known = dict.fromkeys((PAD, END, UNKNOWN))
        self.vocabulary = tuple(known) + tuple(sorted(set(symbols) - known.keys()))
        self.ids = {symbol: i for i, symbol in enumerate(self.vocabulary)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> SymbolTokenizer:
        """A tokenizer that knows every symbol of these texts."""
        return cls(symbol for text in texts for symbol in split(text))

    @property
    def pad_id(self) -> int:
        """Id of padding."""
        return self.ids[PAD]

    @property
    def end_id(self) -> int:
        """Id of the symbol after a target."""
        return self.ids[END]

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; symbols never seen become `[UNK]`."""
        return [self.ids.get(symbol, self.ids[UNKNOWN]) for symbol in split(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Symbols up to the first end, one space between them; padding is left out."""
        symbols = []
        for i in ids:
            if i == self.end_id:
                break
            if i != self.pad_id:
                symbols.append(self.vocabulary[i])
        return " ".join(symbols)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes it as a tokenizer that `transformers.AutoTokenizer` loads, with the same ids."""
        from tokenizers import Regex, Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Split
        from transformers import PreTrainedTokenizerFast

        whole = Tokenizer(WordLevel(self.ids, unk_token=UNKNOWN))
        whole.pre_tokenizer = Split(Regex(_SYMBOL.pattern), behavior="removed", invert=True)
        special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
        PreTrainedTokenizerFast(tokenizer_object=whole, **special).save_pretrained(str(folder))
