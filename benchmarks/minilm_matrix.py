"""Fine-tune a real model with a table (all-MiniLM-L6-v2) at some positions, test it at others (Sinha et al. 2022).

    pip install -c constraints.txt -e ".[all,studies]"
    LOCANT_DATA=... python benchmarks/minilm_matrix.py [--task sst2] [--shifts 0,300] [--seeds 1,2,3] [--steps 150]
        [--encoding tisa] [--out results/minilm-matrix]

Every text is read at positions k_train, k_train + 1, ... in training and at k_test, ... in testing; the score is
Matthews correlation for CoLA, accuracy for the others. `--encoding tisa` puts a relative encoding instead of the table:
the control, in which k_test may change nothing. Trainings that are in the output folder already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from classifiers import TASKS, Classifier, Row, fine_tune

from locant import plots
from locant.analysis.phase_shift import ShiftMatrix, matthews, shift_matrix
from locant.analysis.plain import plain
from locant.compare.environment import environment

SHORT = 60, 120  # characters of one text and of a pair; longer ones are left out of training, for time


def train_rows(task: str) -> list[Row]:
    rows = TASKS[task]("train")
    return [row for row in rows if sum(map(len, row[0])) <= SHORT[len(row[0]) - 1]]


def score(task: str, model: Classifier, shift: int) -> float | None:
    rows = TASKS[task]("dev")
    model.shift = shift
    predicted, true = model.predict([texts for texts, _ in rows]), [label for _, label in rows]
    if task == "cola":
        return matthews(predicted, true)
    return sum(a == b for a, b in zip(predicted, true, strict=True)) / len(true)


def trained(task: str, encoding: str | None, shift: int, seed: int, steps: int, shifts: list[int]) -> dict[str, Any]:
    """One training: its scores at every shift."""
    torch.manual_seed(seed)
    started = time.monotonic()
    model = Classifier(2, encoding, shift)
    fine_tune(model, train_rows(task), steps, seed)
    return {
        "task": task,
        "encoding": encoding or "absolute",
        "k_train": shift,
        "seed": seed,
        "steps": steps,
        "scores": {str(k): score(task, model, k) for k in shifts},
        "seconds": round(time.monotonic() - started, 1),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def shown(task: str, encoding: str, matrix: ShiftMatrix) -> str:
    """Markdown: mean and standard deviation over seeds, a row for each k_train."""
    head = f"{task}, {encoding}, {len(matrix.seeds)} seeds"
    lines = [f"| {head} | " + " | ".join(f"k_test {k}" for k in matrix.shifts) + " |"]
    lines.append("|---" * (1 + len(matrix.shifts)) + "|")
    for k, means, stds in zip(matrix.shifts, matrix.mean.tolist(), matrix.std.tolist(), strict=True):
        cells = [f"{m:.3f}" + ("" if s != s else f" ± {s:.3f}") for m, s in zip(means, stds, strict=True)]
        lines.append(f"| k_train {k} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("cola", "sst2", "mrpc", "rte"), default="sst2")
    parser.add_argument("--shifts", type=numbers, default=[0, 300])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--encoding", default=None, help="attached in place of the table")
    parser.add_argument("--out", type=Path, default=Path("results/minilm-matrix"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"runs": [], "matrices": {}}
    encoding = given.encoding or "absolute"

    def train(shift: int, seed: int) -> dict[str, Any]:
        wanted = {"task": given.task, "encoding": encoding, "k_train": shift, "seed": seed, "steps": given.steps}
        for run in results["runs"]:
            if wanted.items() <= run.items() and {str(k) for k in given.shifts} <= set(run["scores"]):
                return run
        run = trained(given.task, given.encoding, shift, seed, given.steps, given.shifts)
        results["runs"].append(run)
        results["environment"] = environment(" ".join(["python", *sys.argv]))
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(run, flush=True)
        return run

    found = shift_matrix(train, lambda run, shift: run["scores"][str(shift)], given.shifts, given.seeds)
    results["matrices"][f"{given.task}-{encoding}"] = plain(found)
    file.write_text(json.dumps(results, indent=1) + "\n")
    table = shown(given.task, encoding, found)
    (given.out / f"{given.task}-{encoding}.txt").write_text(table + "\n")
    plots.save(plots.tuned_and_tested(found), given.out / f"{given.task}-{encoding}.svg")
    print(table)


if __name__ == "__main__":
    main()
