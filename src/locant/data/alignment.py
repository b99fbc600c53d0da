"""Which word of a translation says what a word of the source says: by fast_align (Dyer et al. 2013) in systran-align.

Both directions are estimated from the pairs themselves and joined; the links of a source token become one number, the
mean of the target places it is linked to. The aligner runs in a process of its own with one thread: with several its
sums, and so its links, change from run to run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

# Reads pairs.txt ("source ||| target" in each line), writes links.json; with the settings fast_align recommends.
_ALIGN = """
import json, systran_align
systran_align.generate_alignment_probabilities(
    "pairs.txt", "forward", "backward", favor_diagonal=True, optimize_tension=True, variational_bayes=True
)
pairs = [[side.split() for side in line.split(" ||| ")] for line in open("pairs.txt")]
found = systran_align.Aligner("forward", "backward").align_batch(*map(list, zip(*pairs)))
json.dump([one["alignments"] for one in found], open("links.json", "w"))
"""


def target_places(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """For each source token the place of its partner in the target, counted from 0; NaN where it has none.

    Tokens are given as ids. Raises: ModuleNotFoundError where the aligner is not installed; ValueError for a pair with
    an empty side; RuntimeError where the aligner fails.
    """
    if find_spec("systran_align") is None:
        raise ModuleNotFoundError(
            "alignment: the order of the target is found by the package systran-align, which is not installed; "
            "pip install 'locant[translation]'"
        )
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if not (source and target):
            raise ValueError(f"alignment: pair {index} has {len(source)} and {len(target)} tokens; needed 1 or more")
    with tempfile.TemporaryDirectory() as folder:
        lines = (
            f"{' '.join(map(str, one))} ||| {' '.join(map(str, other))}\n"
            for one, other in zip(sources, targets, strict=True)
        )
        Path(folder, "pairs.txt").write_text("".join(lines))
        done = subprocess.run(
            [sys.executable, "-c", _ALIGN],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"alignment: systran-align ended with {done.returncode} on {len(sources)} pairs: "
                               f"{done.stderr.strip()[-300:]}")  # fmt: skip
        links = json.loads(Path(folder, "links.json").read_text())
    return [mean_places(one, len(source)) for one, source in zip(links, sources, strict=True)]


def mean_places(links: Iterable[Sequence[int]], count: int) -> tuple[float, ...]:
    """(source, target) links of one pair as a place for each of ``count`` source tokens, NaN without a link."""
    places: list[list[int]] = [[] for _ in range(count)]
    for at, to in links:
        places[at].append(to)
    return tuple(sum(found) / len(found) if found else math.nan for found in places)
