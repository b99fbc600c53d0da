"""Fine-tuning small enough for a test: a tiny BERT with a tokenizer of letters, and files of made-up tasks."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("sea", "boat", "cold", "the", "was", "who", "rowed", "home", "dark", "fish", "of", "in")


def tokenizer() -> T.PreTrainedTokenizerFast:
    """WordPiece: a few whole words; all others fall into letters, so that texts have many tokens."""
    letters = string.ascii_lowercase + string.digits
    vocabulary = [*SPECIAL, *string.punctuation, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return T.PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names)


def save_model(folder: Path, **sizes: Any) -> Path:
    """A BERT of two layers and width 24 with dropout, and its tokenizer."""
    words = tokenizer()
    chosen: dict[str, Any] = dict(
        vocab_size=len(words),
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=37,
        max_position_embeddings=61,
        pad_token_id=0,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    T.BertModel(T.BertConfig(**{**chosen, **sizes})).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def write_rte(folder: Path, train: int = 37, dev: int = 19, seed: int = 0) -> Path:
    """An RTE folder whose label says which half of the words the second text is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for name, count in (("train", train), ("dev", dev)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for index in range(count):
            same = index % 3 > 0
            first = draw.sample(WORDS, draw.randint(3, 7))
            second = draw.choices(WORDS[:6] if same else WORDS[6:], k=draw.randint(3, 7))
            lines.append(f"{index}\t{' '.join(first)}\t{' '.join(second)}\t{'' if same else 'not_'}entailment")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def squad_body(records: Sequence[tuple[str, str, str, Sequence[tuple[str, int]]]]) -> dict[str, Any]:
    """SQuAD JSON from (id, question, context, answers with offset), one paragraph for each."""
    paragraphs = [
        {
            "context": context,
            "qas": [{"id": id_, "question": question, "answers": [{"text": t, "answer_start": s} for t, s in answers]}],
        }
        for id_, question, context, answers in records
    ]
    return {"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}


def write_squad(path: Path, count: int = 13, seed: int = 0) -> Path:
    """Questions on paragraphs of 5 to 29 words; the answer is the word behind `who`."""
    draw, records = random.Random(seed), []
    for number in range(count):
        words = [draw.choice(WORDS) for _ in range(draw.randint(5, 29))]
        at = draw.randrange(len(words) - 1)
        words[at] = "who"
        context = " ".join(words)
        start = len(" ".join(words[: at + 1])) + 1
        records.append((f"{path.stem}-{number}", "who was in the boat", context, [(words[at + 1], start)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(squad_body(records)), encoding="utf-8")
    return path
