"""The task `translation`: a small encoder-decoder on sentence pairs, judged by sacreBLEU and by length of the source.

In its tables the trained length stands for the test pairs whose sources are no longer than it, other lengths for test
pairs whose sources lie between the length before and it; accuracy is BLEU / 100, and the loss that of the target under
teacher forcing. Lengths are those of sources, in tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locant.compare.objective import OnStep, choose_family, refuse_unused, refuse_windows
from locant.compare.results import LengthScore, ShiftScore
from locant.compare.words import Words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from locant.compare.recipe import Recipe
    from locant.encoding import Stack
    from locant.training.mlm import BuiltModel, EncodingChoice, LossPoint, TrainSettings
    from locant.training.translation import Translations


@dataclass(frozen=True)
class PairSettings:
    """Which sentence pairs train and test, how long the trained ones may be, and how translations are written."""

    source: str = ""  # file with a sentence in each line, plain, .gz or .xz ($NAME and ~ are expanded)
    target: str = ""  # its translation, line by line
    test_source: str = ""
    test_target: str = ""
    num_train: int = 0  # the first pairs of the files; 0: all
    num_test: int = 0
    max_train_tokens: int = 64  # of the source: longer pairs are not trained on; the trained length of the tables
    buckets: tuple[int, ...] = ()  # upper ends of other lengths at which test pairs are scored
    beams: int = 1  # 1: greedy

    def __post_init__(self) -> None:
        if self.max_train_tokens < 1:
            raise ValueError(f"max_train_tokens = {self.max_train_tokens}, needed at least 1")
        if self.beams < 1:
            raise ValueError(f"beams = {self.beams}, needed at least 1 (1 is greedy)")
        for name in ("num_train", "num_test"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}, needed 0 (all) or more")
        if list(self.buckets) != sorted(set(self.buckets)) or (self.buckets and self.buckets[0] < 1):
            raise ValueError(
                f"buckets = {list(self.buckets)}, needed rising numbers from 1 up, such as [8, 12, 24, 48]"
            )
        if self.max_train_tokens in self.buckets:
            raise ValueError(
                f"buckets has {self.max_train_tokens}, which is max_train_tokens and stands for all shorter pairs; "
                "drop it"
            )


class Translation:
    """Sentence pairs; the model is as long as the longest of them."""

    def words(self, recipe: dict[str, Any]) -> Words:
        """Lengths are those of sources."""
        return Words(trained="source tokens", scored="BLEU")

    def check(self, recipe: Recipe) -> None:
        """Files must be named; running text, masks and shifts have no meaning."""
        refuse_unused(recipe, "translation", ("text", "masking", "problems", "finetune", "electra"))
        choose_family(recipe, "translation", "")
        refuse_windows(recipe, "translation", "pairs.max_train_tokens = 16")
        for name in ("source", "target", "test_source", "test_target"):
            if not getattr(recipe.pairs, name):
                raise ValueError(
                    f'recipe: pairs.{name} is missing; name a file with a sentence in each line, such as "train.en.gz"'
                )

    def trained_length(self, recipe: Recipe) -> int:
        """Tokens of the longest trained source."""
        return recipe.pairs.max_train_tokens

    def stack(self, recipe: Recipe, choice: EncodingChoice) -> Stack:
        """What the encoder would get; the decoder's is built, too."""
        from locant.training.hosts import build_encoding
        from locant.training.translation import decoder_choice

        length = recipe.pairs.max_train_tokens
        build_encoding(decoder_choice(choice), recipe.model, length, causal=True)
        return build_encoding(choice, recipe.model, length)

    def prepare(self, recipe: Recipe, folder: Path, *, progress: bool) -> PreparedPairs:
        """Reads, tokenizes and (where an encoding learns the order) aligns the pairs, or reads what was kept."""
        if not (folder / "facts.json").is_file():
            _make(recipe, folder, progress)
        return self.read(recipe, folder)

    def read(self, recipe: Recipe, folder: Path) -> PreparedPairs:
        """The kept pairs."""
        from transformers import PreTrainedTokenizerFast

        from locant.training.translation import Translations

        body = json.loads((folder / "pairs.json").read_text(encoding="utf-8"))

        def rows(part: str, name: str) -> tuple[Any, ...]:
            return tuple(map(tuple, body[part][name]))

        aligned = body["train"]["places"] is not None
        train = Translations(
            rows("train", "sources"), rows("train", "targets"), rows("train", "places") if aligned else None
        )
        return PreparedPairs(
            PreTrainedTokenizerFast.from_pretrained(str(folder)),
            train,
            Translations(rows("test", "sources"), rows("test", "targets")),
            tuple(body["test"]["references"]),
            json.loads((folder / "facts.json").read_text(encoding="utf-8")),
        )

    def trial(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: PreparedPairs) -> TranslationTrial:
        """A Marian."""
        return TranslationTrial(recipe, choice, seed, data)


@dataclass(frozen=True)
class PreparedPairs:
    """Pairs as ids with their tokenizer; ``references``: test targets as text; ``facts`` says what was read."""

    tokenizer: PreTrainedTokenizerFast
    train: Translations
    test: Translations
    references: tuple[str, ...]
    facts: dict[str, Any]

    @property
    def longest(self) -> int:
        """Tokens of the longest side, its end among them."""
        return 1 + max(len(ids) for part in (self.train, self.test) for ids in (*part.sources, *part.targets))


def _make(recipe: Recipe, folder: Path, progress: bool) -> None:
    from locant.compare.text import whole_folder
    from locant.data import Document, build_tokenizer, read_pairs

    settings = recipe.pairs
    train = read_pairs(settings.source, settings.target, settings.num_train)
    test = read_pairs(settings.test_source, settings.test_target, settings.num_test)
    text = [Document("source", "\n".join(train.sources)), Document("target", "\n".join(train.targets))]
    tokenizer = build_tokenizer(recipe.tokenizer, text, progress=progress)

    def encode(sentences: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.backend_tokenizer.encode_batch_fast(list(sentences))]

    body: dict[str, dict[str, Any]] = {name: {"sources": encode(part.sources), "targets": encode(part.targets)}
            for name, part in (("train", train), ("test", test))}  # fmt: skip
    kept = [k for k, ids in enumerate(body["train"]["sources"]) if len(ids) <= settings.max_train_tokens]
    if not kept:
        shortest = min(len(ids) for ids in body["train"]["sources"])
        raise ValueError(
            f"recipe: pairs.max_train_tokens = {settings.max_train_tokens} leaves none of {len(train)} pairs, whose "
            f"sources have {shortest} tokens or more; raise it"
        )
    body["train"] = {side: [rows[k] for k in kept] for side, rows in body["train"].items()}
    body["train"]["places"] = _places(recipe, body["train"]["sources"], body["train"]["targets"])
    body["test"]["references"] = list(test.targets)
    facts = {
        "train_pairs": len(kept),
        "train_pairs_too_long": len(train) - len(kept),
        "test_pairs": len(test),
        "dropped_pairs": train.dropped + test.dropped,
        "train_source_tokens": sum(map(len, body["train"]["sources"])),
        "train_target_tokens": sum(map(len, body["train"]["targets"])),
        "aligned_share": _aligned(body["train"]["places"]),
        "vocabulary": len(tokenizer),
        "bleu": _signature(),
    }
    with whole_folder(folder) as part:
        (part / "pairs.json").write_text(json.dumps(body), encoding="utf-8")
        tokenizer.save_pretrained(str(part))
        (part / "facts.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def _places(recipe: Recipe, sources: list[list[int]], targets: list[list[int]]) -> list[tuple[float, ...]] | None:
    """Where each source token lies in the target; None where no aligner is there and no encoding of the recipe asks."""
    from locant.data.alignment import target_places

    try:
        return target_places(sources, targets)
    except ModuleNotFoundError:
        stacks = [Translation().stack(recipe, choice) for choice in recipe.encodings]
        if any(part.auxiliary_share for stack in stacks for part in stack.parts()):
            raise
        return None


def _aligned(places: Sequence[Sequence[float]] | None) -> float | None:
    """Share of source tokens with a partner."""
    if places is None:
        return None
    found = [place == place for row in places for place in row]
    return round(sum(found) / len(found), 4)


def _bleu() -> Any:
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise ModuleNotFoundError(
            "translation: scores need the package sacrebleu, which is not installed; pip install 'locant[translation]'"
        ) from error
    return BLEU(force=True)  # silent about tokenized-looking text


def _signature() -> str:
    score = _bleu()
    score.corpus_score(["a"], [["a"]])
    return str(score.get_signature())


class TranslationTrial:
    """One Marian on the pairs."""

    def __init__(self, recipe: Recipe, choice: EncodingChoice, seed: int, data: PreparedPairs) -> None:
        from locant.data.tokenizer import special_id
        from locant.training.translation import TranslationCollate, build_marian

        self.recipe, self.seed, self.data, self.tokenizer = recipe, seed, data, data.tokenizer
        self.steps = recipe.train.steps
        longest = recipe.model.max_positions or data.longest
        if longest < data.longest:
            raise ValueError(
                f"recipe: model.max_positions = {longest}, but sentences have up to {data.longest} tokens; write more, "
                "or 0 for automatic"
            )
        self.pad_id, self.end_id = (special_id(data.tokenizer, role) for role in ("pad_token", "sep_token"))
        self.built: BuiltModel = build_marian(
            recipe.model, len(data.tokenizer), longest, choice, seed, self.pad_id, self.end_id
        )
        self.collate = TranslationCollate(data.train, self.pad_id, self.end_id)
        tokens = sum(len(ids) + 1 for ids in (*data.train.sources, *data.train.targets))
        self.tokens_per_step = round(tokens / len(data.train) * recipe.train.batch_size)
        self.batch = self._batch(self.collate, range(min(recipe.train.batch_size, len(data.train))))
        self.tokens_per_pass = self.batch["input_ids"].numel() + self.batch["labels"].numel()

    def train(self, settings: TrainSettings, work_dir: Path, on_step: OnStep) -> tuple[LossPoint, ...]:
        """The order of the pairs follows from the seed."""
        from locant.training.trainer import train
        from locant.training.translation import make_objective

        objective, pairs = make_objective(self.built.model), self.data.train
        return train(
            objective, pairs, self.collate, self.built, settings, self.seed, work_dir=work_dir, on_step=on_step
        )

    def infer(self) -> None:
        """Encoder and decoder, over one training batch."""
        device = next(self.built.model.parameters()).device
        batch = {name: self.batch[name].to(device) for name in ("input_ids", "attention_mask", "labels")}
        said = batch["labels"].clamp(min=0)
        self.built.model.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=said,
            use_cache=False,
        )

    def validation_loss(self) -> float:
        """Of the test pairs no longer than the trained ones."""
        return self._loss(self._tests()[self.recipe.pairs.max_train_tokens])

    def by_length(self) -> tuple[LengthScore, ...]:
        """The test pairs of trained length, then those of the other lengths that there are."""
        trained = self.recipe.pairs.max_train_tokens
        return tuple(
            LengthScore(length, length / trained, self._loss(chosen), self._score(chosen))
            for length, chosen in self._tests().items()
            if chosen
        )

    def further_scores(self) -> dict[str, float | None]:
        """None."""
        return {}

    def by_shift(self) -> tuple[ShiftScore, ...]:
        """Not asked."""
        return ()

    def _tests(self) -> dict[int, list[int]]:
        """Which test pairs stand for each length."""
        settings, lengths = self.recipe.pairs, [len(ids) for ids in self.data.test.sources]
        found = {settings.max_train_tokens: [k for k, n in enumerate(lengths) if n <= settings.max_train_tokens]}
        for low, high in zip((0, *settings.buckets), settings.buckets, strict=False):
            found[high] = [k for k, n in enumerate(lengths) if low < n <= high]
        return found

    def _batch(self, collate: Any, rows: Sequence[int]) -> dict[str, Any]:
        return collate([{"example_id": k} for k in rows])

    @property
    def _batch_size(self) -> int:
        return max(1, self.recipe.evaluate.batch_tokens // self.data.longest)

    def _loss(self, chosen: list[int]) -> float:
        """Nats per target token, the end among them, under teacher forcing."""
        import torch

        from locant.training.translation import TranslationCollate, target_logits

        pairs = self.data.test.take(chosen)
        model, collate = self.built.model, TranslationCollate(pairs, self.pad_id, self.end_id)
        device = next(model.parameters()).device
        model.eval()
        total = count = 0.0
        with torch.no_grad():
            for start in range(0, len(pairs), self._batch_size):
                rows = range(start, min(start + self._batch_size, len(pairs)))
                batch = {name: value.to(device) for name, value in self._batch(collate, rows).items()}
                logits, targets = target_logits(model, batch["input_ids"], batch["attention_mask"], batch["labels"])
                total += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
                count += targets.numel()
        return total / count

    def _score(self, chosen: list[int]) -> float:
        """BLEU / 100 of the translations as text."""
        from locant.training.translation import translate

        pairs, beams = self.data.test.take(chosen), self.recipe.pairs.beams
        longest = max(len(ids) for ids in pairs.targets) + 10
        ids = translate(self.built.model, pairs.sources, longest, self.pad_id, self.end_id, beams, self._batch_size)
        written = [self.data.tokenizer.decode(one) for one in ids]
        return _bleu().corpus_score(written, [[self.data.references[k] for k in chosen]]).score / 100
