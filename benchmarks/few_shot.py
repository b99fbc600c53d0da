"""Few-shot prompts at moved positions (Sinha et al. 2022): SST-2 under a causal model, the whole prompt moved.

    pip install -c constraints.txt -e ".[all,gguf,studies]"
    LOCANT_DATA=... python benchmarks/few_shot.py MODEL [--shots 4] [--items 40] [--shifts 0,100,400]
        [--out results/few-shot]

MODEL is what `locant analyze` takes. The prompt holds examples of both labels, drawn by the seed; the answer is the
label with the higher log-likelihood.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from classifiers import sst2

from locant.analysis import read_model
from locant.analysis.load import load_model
from locant.analysis.phase_shift import Choice, few_shot
from locant.analysis.plain import plain
from locant.analysis.scoring import make_scorer
from locant.compare.environment import environment

LABELS = " negative", " positive"


def line(text: str) -> str:
    return f"Review: {text.strip()}\nSentiment:"


def choices(tokenizer: Any, shots: int, items: int, seed: int) -> list[Choice]:
    """Prompts of ``shots`` training examples, half of each label, and one question of dev each, half of each label."""
    draw = random.Random(seed)
    train, dev = ([[row for row in sst2(split) if row[1] == label] for label in (0, 1)] for split in ("train", "dev"))
    asked = [row for label in (0, 1) for row in draw.sample(dev[label], items // 2)]
    options = tuple(tuple(tokenizer(label, add_special_tokens=False)["input_ids"]) for label in LABELS)
    found = []
    for (text,), answer in asked:
        shown = [row for label in (0, 1) for row in draw.sample(train[label], shots // 2)]
        draw.shuffle(shown)
        prompt = "\n\n".join([line(example) + LABELS[label] for (example,), label in shown] + [line(text)])
        found.append(Choice(tuple(tokenizer(prompt)["input_ids"]), options, answer))
    return found


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--items", type=int, default=40)
    parser.add_argument("--shifts", type=numbers, default=[0, 100, 400])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/few-shot"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    loaded = load_model(given.model)
    items = choices(loaded.tokenizer, given.shots, given.items, given.seed)
    found = few_shot(make_scorer(read_model(loaded.model), loaded.tokenizer), items, given.shifts)
    result = {
        "model": loaded.name,
        "shots": given.shots,
        "items": len(items),
        "seed": given.seed,
        "shifts": given.shifts,
        "longest_prompt": max(len(item.prompt) for item in items),
        **plain(found),
        "seconds": round(time.monotonic() - started, 1),
        "environment": environment(" ".join(["python", *sys.argv])),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{loaded.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("model", "shifts", "accuracy", "items", "seconds")}))


if __name__ == "__main__":
    main()
