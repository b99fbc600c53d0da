r"""Give a real model with absolute positions (all-MiniLM-L6-v2) the masked-language-model head that its package lacks.

    pip install -c constraints.txt -e ".[all,studies]"
    LOCANT_DATA=... python benchmarks/minilm_head.py FOLDER [--steps 1000] [--seed 1] [--random-starts]
    locant analyze FOLDER --only phase_shift --pairs $LOCANT_DATA/blimp --pairs-each 5 \
        --text $LOCANT_DATA/books/virginia-woolf_mrs-dalloway.txt.xz

Words are predicted by BERT's head on top of the pretrained layers, which stay as they are, as does the embedding that
the head shares. So whatever a shift changes in the scores, it changes in states that pretraining made. Windows start at
position 0, as in pretraining, or (`--random-starts`) anywhere in the table, so that the head has seen every position.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from classifiers import minilm
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from locant.analysis.windows import text_windows
from locant.compare.environment import environment
from locant.data import MaskingConfig, TextSource, Vocabulary, mask_tokens, read_text

LENGTH, BATCH, RATE = 48, 32, 2e-3


class Headed(nn.Module):
    """The loss of the head at the masked places alone; ``random_starts``: windows begin anywhere in the table."""

    def __init__(self, random_starts: bool) -> None:
        super().__init__()
        self.host: Any = AutoModelForMaskedLM.from_pretrained(minilm())
        self.host.requires_grad_(False)
        head = self.host.cls.predictions
        for parameter in (*head.transform.parameters(), head.bias):
            parameter.requires_grad_(True)
        nn.init.eye_(head.transform.dense.weight)
        self.room = self.host.config.max_position_embeddings - LENGTH if random_starts else 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        start = torch.randint(self.room + 1, (len(input_ids), 1))
        hidden = self.host.bert(input_ids=input_ids, position_ids=torch.arange(LENGTH)[None] + start)[0]
        chosen = labels >= 0
        logits = self.host.cls(hidden[chosen])
        return {"loss": nn.functional.cross_entropy(logits.float(), labels[chosen])}


def examples(tokenizer: Any, steps: int, seed: int) -> list[dict[str, Tensor]]:
    """Masked windows from the beginnings of all books but the last, which is left for tests."""
    root = os.environ.get("LOCANT_DATA") or sys.exit(
        "minilm_head: LOCANT_DATA is not set; needed the folder with books"
    )
    texts = [document.text for document in read_text(TextSource(f"{root}/books"), progress=False)][:-1]
    size = steps * BATCH * LENGTH * 5 // len(texts)  # letters of each book: somewhat more than the tokens take
    windows = text_windows(tokenizer, [text[:size] for text in texts], LENGTH, limit=steps * BATCH)
    ids, labels = mask_tokens(
        windows.numpy(), list(range(len(windows))), Vocabulary.from_tokenizer(tokenizer), seed=seed, epoch=0,
        config=MaskingConfig(),
    )  # fmt: skip
    rows = zip(torch.as_tensor(ids), torch.as_tensor(labels), strict=True)
    return [{"input_ids": one, "labels": label} for one, label in rows]


def train(model: Headed, rows: list[dict[str, Tensor]], steps: int, seed: int) -> list[dict[str, float]]:
    """In bfloat16 autocast; the losses."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=RATE,
            warmup_steps=steps // 20, seed=seed, logging_steps=50, save_strategy="no", report_to=[], disable_tqdm=True,
            remove_unused_columns=False, use_cpu=True, bf16=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model=model, args=settings, train_dataset=rows)  # type: ignore
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return [{"step": e["step"], "loss": e["loss"]} for e in trainer.state.log_history if "loss" in e]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--random-starts", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = Headed(given.random_starts)
    losses = train(model, examples(tokenizer, given.steps, given.seed), given.steps, given.seed)
    model.host.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    facts = {"losses": losses, "seed": given.seed, "environment": environment(" ".join(["python", *sys.argv]))}
    (given.folder / "head.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(losses)


if __name__ == "__main__":
    main()
