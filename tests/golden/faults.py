"""Faults to plant, so that each check is seen to fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from locant.analysis import locality as measures
from locant.encodings.cope import Cope
from locant.graphs import distances
from locant.positions import Positions
from locant.terms import Clip, LogBucket, Rule, SignedLogBucket


def number_queries_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions whose query ids run from last to first."""
    for name in ("arange", "from_mask", "from_ids"):
        original = getattr(Positions, name)

        def faulty(*arguments, original=original, **options):
            positions = original(*arguments, **options)
            return replace(positions, query=positions.query.flip(-1), contiguous=False)

        monkeypatch.setattr(Positions, name, staticmethod(faulty))


def turn_the_sign_of_offsets(
    monkeypatch: pytest.MonkeyPatch, rules: tuple[type[Rule], ...] = (Clip, LogBucket, SignedLogBucket)
) -> None:
    """Rules that read query - key for key - query."""
    for rule in rules:
        original = rule.row
        monkeypatch.setattr(rule, "row", lambda self, offset, original=original: original(self, -offset))


def count_from_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contextual positions that count up to a key and not from it on."""
    original = Cope.bias
    monkeypatch.setattr(
        Cope, "bias", lambda self, q, logits, seen: original(self, q, logits.flip(-1), seen.flip(-1)).flip(-1)
    )


def count_keys_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures of matrices that read the keys from last to first."""
    original = measures.as_double
    monkeypatch.setattr(measures, "as_double", lambda matrix: original(matrix).flip(-1))


def forget_degrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Laplacian without the degrees on its diagonal."""
    monkeypatch.setattr(distances, "laplacian", lambda graph: -distances.adjacency(graph))
