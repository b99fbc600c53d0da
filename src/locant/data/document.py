"""A document: the unit that a train/validation split never cuts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """One text with the name it is reported by; each line that is not blank is a paragraph."""

    name: str
    text: str

    @property
    def paragraphs(self) -> list[str]:
        """The lines that are not blank, stripped."""
        return [stripped for line in self.text.splitlines() if (stripped := line.strip())]


def text_fingerprint(documents: Iterable[Document]) -> str:
    """Return a SHA-256 over all texts and where they end; names do not count."""
    digest = hashlib.sha256()
    for document in documents:
        data = document.text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
