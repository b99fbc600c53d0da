"""A GLUE task as a problem: texts and pairs to a class, or to a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from locant.data.tokenizer import special_id
from locant.finetune.batches import Feature, collate, predict
from locant.finetune.glue import Example, GlueData, GlueTask
from locant.finetune.problem import Scored, shuffled, subset
from locant.finetune.scores import Scores
from locant.finetune.settings import GlueSettings


class Classification:
    """Reads off the largest logit, or the one number. Baseline: the class that is most frequent in training.

    Raises: ValueError for training data of one class; for a missing training file without ``split_dev``; for a length
    that leaves no text.
    """

    auto = "AutoModelForSequenceClassification"

    def __init__(
        self,
        task: GlueTask,
        data: GlueData,
        tokenizer: PreTrainedTokenizerFast,
        settings: GlueSettings,
        length: int,
        with_types: bool,
    ) -> None:
        self.task, self.tokenizer, self.settings, self.with_types = task, tokenizer, settings, with_types
        self._check_length(length)
        self.notices = list(data.notices)
        kinds = {"num_labels": len(task.labels), "problem_type": "single_label_classification"}
        self.config = kinds if task.labels else {"num_labels": 1, "problem_type": "regression"}
        train, dev = _divided(task, data, settings)
        train = subset(train, settings.train_examples, "train_examples")
        self.dev = {name: subset(examples, settings.dev_examples, "dev_examples") for name, examples in dev.items()}
        self._check_labels(train)
        self.majority = Counter(example.label for example in train).most_common(1)[0][0]
        self.train = self._features(train, length, "training")
        self._dev = {name: self._features(examples, length, name) for name, examples in self.dev.items()}

    def _check_length(self, length: int) -> None:
        texts = len(self.task.text)
        special = self.tokenizer.num_special_tokens_to_add(pair=texts > 1)
        if length < special + texts:
            raise ValueError(
                f"glue/{self.task.name}: length = {length}, needed at least {special + texts}: {special} special "
                f"tokens and one of each of {texts} texts; give more"
            )

    def _check_labels(self, train: Sequence[Example]) -> None:
        if len({example.label for example in train}) < 2:
            raise ValueError(
                f"glue/{self.task.name}: all {len(train)} training examples have the label {train[0].label:g}, needed "
                "at least two different ones; give more examples"
            )
        for name, examples in self.dev.items():
            if len({example.label for example in examples}) < 2:
                self.notices.append(
                    f"{name}: all {len(examples)} examples have the label {examples[0].label:g}, so correlations say "
                    "nothing here"
                )

    def _features(self, examples: Sequence[Example], length: int, what: str) -> list[Feature]:
        texts = [example.texts[0] for example in examples]
        pairs = [example.texts[1] for example in examples] if len(examples[0].texts) > 1 else None
        cut: dict[str, Any] = {"truncation": "longest_first", "max_length": length}
        full = self.tokenizer(texts, pairs, truncation=False, return_token_type_ids=True, verbose=False)
        long = sum(len(ids) > length for ids in full["input_ids"])
        read = self.tokenizer(texts, pairs, return_token_type_ids=True, **cut) if long else full
        if long:
            self.notices.append(
                f"{what}: {long} of {len(examples)} examples are longer than length = {length} and were cut"
            )
        whole = bool(self.task.labels)
        return [
            Feature(e.id, ids, types, {"labels": int(e.label) if whole else float(e.label)})
            for e, ids, types in zip(examples, read["input_ids"], read["token_type_ids"], strict=True)
        ]

    def baselines(self) -> dict[str, Scores]:
        """The most frequent class of the training examples, said of every dev example; {} where numbers are asked."""
        if not self.task.labels:
            return {name: {} for name in self.dev}
        labels = {name: [example.label for example in examples] for name, examples in self.dev.items()}
        return {name: self.task.metric(found, [self.majority] * len(found)) for name, found in labels.items()}

    def batch(self, features: Sequence[Feature]) -> dict[str, Any]:
        """Padded ids with labels."""
        return collate(features, special_id(self.tokenizer, "pad_token"), self.with_types)

    def evaluate(self, model: Any, trainer: Any) -> dict[str, Scored]:
        """Accuracy, F1, Matthews or the correlations: what the task is scored by."""
        return {name: self._scored(name, model, trainer) for name in self.dev}

    def _scored(self, name: str, model: Any, trainer: Any) -> Scored:
        def read(numbers: Sequence[int], output: Any) -> list[int | float]:
            logits = output.logits.float()
            return (logits.argmax(-1) if self.task.labels else logits[:, 0]).tolist()

        found = predict(model, self._dev[name], self.batch, self.settings.eval_batch_size, read, trainer)
        predictions = [found[number] for number in range(len(self.dev[name]))]
        labels = [example.label for example in self.dev[name]]
        named = {
            example.id: self.task.labels[int(value)] if self.task.labels else value
            for example, value in zip(self.dev[name], predictions, strict=True)
        }
        return Scored(self.task.metric(labels, predictions), self.baselines()[name], named)


def _divided(
    task: GlueTask, data: GlueData, settings: GlueSettings
) -> tuple[Sequence[Example], dict[str, Sequence[Example]]]:
    """Training and dev examples; a dev file is split where it is asked for, and only where it must be."""
    dev: dict[str, Sequence[Example]] = dict(data.dev)
    if data.train and settings.split_dev:
        raise ValueError(
            f"glue/{task.name}: split_dev = {settings.split_dev:g}, but there is a training file ({data.files[0].name})"
            "; leave split_dev out"
        )
    if data.train:
        return data.train, dev
    if not settings.split_dev:
        raise ValueError(
            f"glue/{task.name}: no training file ({' or '.join(task.train)}) beside {data.files[0].name}; add it, or "
            "train on a share of the dev file with split_dev=0.8, whose scores are those of the rest"
        )
    first = next(iter(dev))
    order = shuffled(len(dev[first]), "split_dev")
    count = round(settings.split_dev * len(order))
    parts = [dev[first][at] for at in sorted(order[:count])], [dev[first][at] for at in sorted(order[count:])]
    if not all(parts):
        raise ValueError(
            f"glue/{task.name}: split_dev = {settings.split_dev:g} of {len(order)} examples leaves nothing to train "
            "on, or nothing to score on; give another share"
        )
    return parts[0], {**dev, first: parts[1]}
