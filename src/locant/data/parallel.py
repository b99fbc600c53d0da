"""Sentence pairs: two files with a sentence in each line, line by line translations of each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from locant.data.files import expand_path, read_text_file


@dataclass(frozen=True)
class SentencePairs:
    """Sources and targets, pair by pair; ``dropped``: pairs of the files that were left out, one side being blank."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.sources)


def read_pairs(source: str, target: str, limit: int = 0) -> SentencePairs:
    """Reads two files (plain, .gz or .xz; ``$NAME`` and ``~`` are expanded); ``limit``: the first pairs, 0 for all.

    Raises: FileNotFoundError; ValueError for files of unequal length, without any pair, or that are no text.
    """
    sources, targets = _lines(source), _lines(target)
    if len(sources) != len(targets):
        raise ValueError(
            f"pairs: {source!r} has {len(sources)} lines but {target!r} has {len(targets)}; line by line they must be "
            "translations of each other"
        )
    both = [(one, other) for one, other in zip(sources, targets, strict=True) if one and other]
    if not both:
        raise ValueError(f"pairs: {source!r} and {target!r} hold no pair of sentences; name files that do")
    kept = both[:limit] if limit else both
    return SentencePairs(
        tuple(one for one, _ in kept), tuple(other for _, other in kept), dropped=len(sources) - len(both)
    )


def _lines(name: str) -> list[str]:
    path = Path(expand_path(name))
    if not path.is_file():
        raise FileNotFoundError(f"pairs: no file at {path} ({name!r}); give a file with a sentence in each line")
    return [line.strip() for line in read_text_file(path).removesuffix("\n").split("\n")]
