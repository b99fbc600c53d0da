"""Does word order matter to a classifier of sentence pairs? Word-swap probes (Chen et al. 2023) on MiniLM and MNLI.

    pip install -c constraints.txt -e ".[all,studies]"
    LOCANT_DATA=... python benchmarks/word_swap.py [--seeds 1,2,3] [--steps 200] [--every 1] [--out results/word-swap]

The paper trains on SNLI, this on MNLI: half of its mismatched dev set to train on, half of the matched one
to test, pairs of at most 160 characters. Shuffle-SR needs spans of agent and patient; they come from sentences made of
the lists below ("the lawyer thanked the doctor"), so that probe is of made sentences, not of MNLI's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from classifiers import Classifier, Row, fine_tune, mnli

from locant.analysis.word_swap import Labeled, Roles, role_probe, shuffle_probes
from locant.compare.environment import environment

SHORT = 160  # characters of a pair, for time
ENTAILMENT, CONTRADICTION = 0, 2
PEOPLE = "lawyer doctor teacher sailor painter farmer waiter pilot nurse singer".split()
DEEDS = "thanked followed hired blamed visited saved praised called".split()
MADE = 200  # sentences with roles


def short(split: str) -> list[Row]:
    return [row for row in mnli(split) if sum(map(len, row[0])) <= SHORT]


def made() -> list[Roles]:
    every = [(a, deed, b) for a in PEOPLE for deed in DEEDS for b in PEOPLE if a != b]
    chosen = random.Random(0).sample(every, MADE)
    return [Roles(("the", a, deed, "the", b), (0, 2), (3, 5)) for a, deed, b in chosen]


def probed(seed: int, steps: int, every: int) -> dict[str, Any]:
    """One training, and all probes of it."""
    torch.manual_seed(seed)
    started = time.monotonic()
    model, rows = Classifier(3), short("dev")[::every]
    fine_tune(model, short("train"), steps, seed)
    predicted = model.predict([texts for texts, _ in rows])
    labels = [label for _, label in rows]
    pairs = [Labeled(texts[0], texts[1], label) for texts, label in rows]
    longest = max(len(pair.hypothesis.split()) for pair in pairs)
    swaps = shuffle_probes(model.predict, pairs, seed=seed)
    return {
        "seed": seed,
        "steps": steps,
        "pairs": len(rows),
        "longest_hypothesis": longest,
        "accuracy": sum(a == b for a, b in zip(predicted, labels, strict=True)) / len(labels),
        "majority": max(labels.count(label) for label in set(labels)) / len(labels),
        "swaps": [asdict(swap) for swap in (*swaps, role_probe(model.predict, made(), CONTRADICTION, ENTAILMENT))],
        "seconds": round(time.monotonic() - started, 1),
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds."""

    def over(values: list[float], form: str = ".3f") -> str:
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):{form}}{spread}"

    lines = ["| probe | accuracy | change | pairs |", "|---|---|---|---|"]
    lines.append(f"| unchanged | {over([run['accuracy'] for run in runs])} | | {runs[0]['pairs']} |")
    for place, first in enumerate(runs[0]["swaps"]):
        accuracy, change = ([run["swaps"][place][key] for run in runs] for key in ("accuracy", "change"))
        lines.append(f"| {first['name']} | {over(accuracy)} | {over(change, '+.3f')} | {first['n']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=1, help="probe every n-th pair only")
    parser.add_argument("--out", type=Path, default=Path("results/word-swap"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"runs": []}
    for seed in map(int, given.seeds.split(",")):
        if any((run["seed"], run["steps"]) == (seed, given.steps) for run in results["runs"]):
            continue
        results["runs"].append(probed(seed, given.steps, given.every))
        results["environment"] = environment(" ".join(["python", *sys.argv]))
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = table(results["runs"])
    (given.out / "table.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
