"""Masks are a pure function of (seed, epoch, example, position), in the shares promised, on tokens of text only."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from locant.data import (
    EVALUATION_EPOCH,
    MaskingConfig,
    MlmCollator,
    MlmDataset,
    ScheduledDataset,
    Vocabulary,
    Windows,
    mask_tokens,
    order,
)

PAD, UNK, CLS, SEP, MASK = range(5)
SIZE = 211
GOLDEN_TARGETS = [7, 8, 9, 13, 24, 26, 29]
GOLDEN_INPUTS = [4, 4, 4, 63, 4, 4, 4]
GOLDEN_ORDER = [0, 1, 5, 4, 3, 6, 2]


def vocabulary() -> Vocabulary:
    """Return one with five special tokens where every third token goes on with a word."""
    special = np.arange(SIZE) < 5
    continuation = (np.arange(SIZE) % 3 == 0) & ~special
    return Vocabulary(MASK, PAD, special, continuation, np.flatnonzero(~special))


def some_windows(count: int = 301, length: int = 32) -> Windows:
    ids = np.random.default_rng(7).integers(5, SIZE, (count, length)).astype(np.uint16)
    ids[:, 0], ids[:, -1] = CLS, SEP
    ids[::4, 9] = SEP
    ids[::5, 11] = UNK
    return Windows(ids, None)


WINDOWS = some_windows()
IDS = WINDOWS.ids


def masked(ids=IDS, examples=None, *, seed=3, epoch=2, **config):
    examples = np.arange(len(ids)) if examples is None else examples
    return mask_tokens(ids, examples, vocabulary(), seed=seed, epoch=epoch, config=MaskingConfig(**config))


def within_binomial(count: int, trials: int, share: float) -> bool:
    """Return whether a count is inside an exact two-sided interval of a binomial: chance of failing 1e-6."""
    logs = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        + k * math.log(share) + (trials - k) * math.log1p(-share)
        for k in range(trials + 1)
    ]  # fmt: skip
    chances = np.exp(logs)
    return min(chances[: count + 1].sum(), chances[count:].sum()) > 5e-7


@pytest.mark.parametrize("whole_word", [False, True])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_masks_do_not_depend_on_batch_order_or_global_state(batch, whole_word):
    inputs, labels = masked(whole_word=whole_word)
    for seed in (0, 1):
        np.random.seed(seed)
        torch.manual_seed(seed)
        shuffled = np.random.default_rng(seed).permutation(len(IDS))
        for start in range(0, len(IDS), batch):
            rows = shuffled[start : start + batch]
            again = masked(IDS[rows], rows, whole_word=whole_word)
            assert np.array_equal(again[0], inputs[rows])
            assert np.array_equal(again[1], labels[rows])


def test_the_masks_of_one_example_are_these():
    """A change here silently changes every published run: raise nothing, explain it in the changelog."""
    inputs, labels = masked(np.arange(5, 35)[None], [11])
    assert np.flatnonzero(labels[0] >= 0).tolist() == GOLDEN_TARGETS
    assert inputs[0][labels[0] >= 0].tolist() == GOLDEN_INPUTS


@pytest.mark.parametrize("change", [{"seed": 4}, {"epoch": 3}, {"examples": np.arange(1, 302)}, {"epoch": -1}])
def test_each_key_changes_the_masks(change):
    targets = masked()[1] >= 0
    other = masked(**change)[1] >= 0
    both = int((targets & other).sum())
    assert 0.7 < both / (targets.mean() * other.mean() * targets.size) < 1.3  # as if drawn independently


def test_seed_and_epoch_do_not_stand_for_each_other():
    assert not np.array_equal(masked(seed=1, epoch=2)[1], masked(seed=2, epoch=1)[1])
    assert not np.array_equal(masked(seed=0, epoch=1)[1], masked(seed=1, epoch=0)[1])


def test_special_tokens_are_never_targets_nor_drawn():
    inputs, labels = masked(rate=0.9)
    special = IDS < 5
    assert (labels[special] == -100).all()
    assert np.array_equal(inputs[special], IDS[special])
    targets = labels >= 0
    assert np.array_equal(labels[targets], IDS[targets])
    assert np.array_equal(inputs[~targets], IDS[~targets])
    assert set(np.unique(inputs[targets])) <= {MASK, *range(5, SIZE)}


@pytest.mark.parametrize("rate, mask, random", [(0.15, 0.8, 0.1), (0.4, 0.5, 0.3)])
def test_shares_lie_within_exact_binomial_bounds(rate, mask, random):
    ids = some_windows(1200, 34).ids
    inputs, labels = masked(ids, rate=rate, mask=mask, random=random)
    targets = labels >= 0
    maskable = ids >= 5
    assert within_binomial(int(targets.sum()), int(maskable.sum()), rate)
    trials = int(targets.sum())
    replaced, kept = inputs[targets], labels[targets]
    assert within_binomial(int((replaced == MASK).sum()), trials, mask)
    same = int((replaced == kept).sum())
    regular = SIZE - 5
    assert within_binomial(same, trials, 1 - mask - random + random / regular)
    drawn = replaced[(replaced != MASK) & (replaced != kept)]
    assert len(np.unique(drawn)) > 0.8 * regular
    assert abs(drawn.mean() - (5 + SIZE - 1) / 2) < 5 * regular / math.sqrt(12 * len(drawn))


def test_targets_are_spread_evenly_over_positions():
    targets = masked(some_windows(3000, 16).ids, rate=0.3)[1] >= 0
    for position in (1, 2, 7, 13, 14):
        assert within_binomial(int(targets[:, position].sum()), 3000, 0.3)


def test_neighboring_targets_are_independent():
    targets = (masked(some_windows(3000, 16).ids, rate=0.3)[1] >= 0)[:, 1:9].astype(float)
    correlation = np.corrcoef(targets.T)
    assert np.abs(correlation - np.eye(8)).max() < 0.08


@pytest.mark.parametrize("whole_word", [False, True])
def test_every_window_has_a_target(whole_word):
    ids = np.tile([CLS, 10, SEP, 11, SEP], (500, 1))
    labels = masked(ids, rate=0.01, whole_word=whole_word)[1]
    counts = (labels >= 0).sum(axis=1)
    assert counts.min() == 1
    chosen = labels.max(axis=1)
    assert within_binomial(int((chosen == 10).sum()), 500, 0.5)  # neither token is preferred


def test_whole_words_are_targets_or_none():
    labels = masked(whole_word=True, rate=0.2)[1]
    targets = labels >= 0
    continuation = vocabulary().continuation
    pairs = 0
    for row in range(len(IDS)):
        for column in range(1, IDS.shape[1]):
            here, before = IDS[row, column], IDS[row, column - 1]
            if continuation[here] and before >= 5:
                pairs += 1
                assert targets[row, column] == targets[row, column - 1]
    assert pairs > 1000
    split = masked(rate=0.2)[1] >= 0
    assert not np.array_equal(split, targets)
    assert abs(targets.mean() / split.mean() - 1) < 0.1


def test_a_window_without_text_is_refused():
    with pytest.raises(ValueError, match="example 8 holds special tokens only"):
        masked(np.array([[CLS, 9, SEP], [CLS, UNK, SEP]]), np.array([4, 8]))


def test_shapes_must_match():
    with pytest.raises(ValueError, match=r"ids of shape \(4, 9\) and example_ids of shape \(3,\)"):
        masked(np.full((4, 9), 9), np.arange(3))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rate": 0.0}, "rate=0.0 must lie between 0 and 1"),
        ({"rate": 1.0}, "rate=1.0 must lie between 0 and 1"),
        ({"mask": -0.1}, "mask=-0.1 and random=0.1"),
        ({"random": 0.3}, "mask=0.8 and random=0.3 must be at least 0 and sum to at most 1"),
    ],
)
def test_bad_shares_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"masking: {message}"):
        MaskingConfig(**settings)


def test_order_is_a_pure_permutation():
    first = order(5, 0, 1001)
    assert sorted(first.tolist()) == list(range(1001))
    np.random.seed(9)
    assert np.array_equal(order(5, 0, 1001), first)
    for other in (order(5, 1, 1001), order(6, 0, 1001)):
        assert (other == first).mean() < 0.01
    assert abs(np.corrcoef(first, np.arange(1001))[0, 1]) < 0.15
    assert order(5, 0, 7).tolist() == GOLDEN_ORDER


# Datasets and the collator


def batches(dataset, batch_size, **settings):
    collator = MlmCollator(vocabulary(), seed=3)
    loader = DataLoader(
        dataset, batch_size=batch_size, collate_fn=collator, sampler=SequentialSampler(dataset), **settings
    )
    return list(loader)


def joined(parts, name):
    return torch.cat([part[name] for part in parts])


def test_a_batch_has_what_the_model_takes():
    (batch,) = batches(MlmDataset(some_windows(5)), 5)
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
    assert all(t.dtype == torch.int64 and t.shape == (5, 32) for t in batch.values())
    assert (batch["attention_mask"] == 1).all()


@pytest.mark.parametrize("settings", [{"batch_size": 7}, {"batch_size": 64, "num_workers": 2}])
def test_batch_size_and_workers_change_nothing(settings):
    dataset = MlmDataset(WINDOWS, epoch=2)
    parts = batches(dataset, **settings)
    inputs, labels = masked()
    assert np.array_equal(joined(parts, "input_ids"), inputs)
    assert np.array_equal(joined(parts, "labels"), labels)


def test_the_epoch_reaches_the_masks_and_evaluation_stays_fixed():
    dataset = MlmDataset(WINDOWS)
    first = joined(batches(dataset, 50), "labels")
    dataset.set_epoch(1)
    assert not torch.equal(joined(batches(dataset, 50), "labels"), first)
    dataset.set_epoch(0)
    assert torch.equal(joined(batches(dataset, 50), "labels"), first)
    fixed = MlmDataset(WINDOWS, epoch=EVALUATION_EPOCH)
    before = joined(batches(fixed, 50), "labels")
    fixed.set_epoch(4)
    assert torch.equal(joined(batches(fixed, 50), "labels"), before)


def test_accelerate_hands_the_epoch_on():
    from accelerate.data_loader import DataLoaderShard

    dataset = MlmDataset(WINDOWS)
    DataLoaderShard(dataset).set_epoch(6)
    assert dataset.epoch == 6


def test_a_schedule_runs_through_epochs_and_resumes_exactly():
    windows = some_windows(13)
    dataset = ScheduledDataset(windows, seed=5, num_examples=40)
    assert len(dataset) == 40
    seen = [(example["epoch"], example["example_id"]) for example in (dataset[k] for k in range(40))]
    expected = [(epoch, int(i)) for epoch in range(4) for i in order(5, epoch, 13)][:40]
    assert seen == expected
    fresh = ScheduledDataset(windows, seed=5, num_examples=40)
    assert (fresh[29]["epoch"], fresh[29]["example_id"]) == expected[29]
    whole = joined(batches(dataset, 8), "input_ids")
    assert torch.equal(joined(batches(dataset, 5, num_workers=2), "input_ids"), whole)
    with pytest.raises(IndexError, match="example 40 asked for, 40 are scheduled"):
        dataset[40]


def test_padding_changes_no_mask():
    collator = MlmCollator(vocabulary(), seed=3)
    long = {"input_ids": IDS[0], "example_id": 0, "epoch": 2}
    short = {"input_ids": IDS[1][:20], "example_id": 1, "epoch": 2}
    batch, alone = collator([long, short]), collator([short])
    assert batch["attention_mask"].sum(dim=1).tolist() == [32, 20]
    assert torch.equal(batch["input_ids"][1, :20], alone["input_ids"][0])
    assert torch.equal(batch["labels"][1, :20], alone["labels"][0])
    assert (batch["labels"][1, 20:] == -100).all() and (batch["input_ids"][1, 20:] == PAD).all()


def test_document_ids_travel_with_the_batch():
    windows = Windows(IDS[:3], np.repeat(np.arange(3, dtype=np.int32)[:, None], 32, axis=1))
    (batch,) = batches(MlmDataset(windows), 3)
    assert batch["document_ids"][:, 5].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["input_ids", "example_id", "epoch"])
def test_an_example_that_lost_a_column_is_told_how(name):
    example = {"input_ids": IDS[0], "example_id": 0, "epoch": 2}
    with pytest.raises(ValueError, match=f"without '{name}'.*set remove_unused_columns=False"):
        MlmCollator(vocabulary(), seed=0)([{k: v for k, v in example.items() if k != name}])


def test_the_collator_travels_to_another_process():
    example = {"input_ids": IDS[0], "example_id": 0, "epoch": 2}
    collator = MlmCollator(vocabulary(), seed=3)
    again = pickle.loads(pickle.dumps(collator))
    assert torch.equal(again([example])["labels"], collator([example])["labels"])


def test_the_vocabulary_is_read_off_a_tokenizer(tmp_path):
    from locant.data.tokenizer import load_tokenizer

    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "cat", "[UNK]", "##s", "[CLS]", "[SEP]", "the", "[MASK]"]))
    facts = Vocabulary.from_tokenizer(load_tokenizer(str(path)))
    assert (facts.mask, facts.pad) == (7, 0)
    assert np.flatnonzero(facts.special).tolist() == [0, 2, 4, 5, 7]
    assert np.flatnonzero(facts.continuation).tolist() == [3]
    assert facts.regular.tolist() == [1, 3, 6]


@pytest.mark.parametrize("mark", ["Ġ", "▁"])
def test_words_are_told_by_where_they_begin_too(mark):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[MASK]", f"{mark}row", "ing", f"{mark}sea", "s", ","]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="[UNK]"))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    facts = Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, **names))
    assert np.flatnonzero(facts.continuation).tolist() == [4, 6, 7]
    config = MaskingConfig(rate=0.4, whole_word=True)
    ids = np.tile([3, 4, 5, 6, 7], (99, 1))
    targets = mask_tokens(ids, np.arange(99), facts, seed=1, epoch=0, config=config)[1] >= 0
    assert (targets[:, 0] == targets[:, 1]).all() and (targets[:, 2:] == targets[:, 2:3]).all()
    assert {0, 1} == set(targets[:, 0].tolist()) == set(targets[:, 2].tolist())


def test_whole_words_of_a_tokenizer_that_tells_none_are_refused():
    facts = vocabulary()
    blind = Vocabulary(facts.mask, facts.pad, facts.special, np.zeros(SIZE, dtype=bool), facts.regular)
    with pytest.raises(ValueError, match=r"whole_word = true, but no token of this tokenizer goes on .*'##ing'"):
        MlmCollator(blind, 1, MaskingConfig(whole_word=True))
    assert not MlmCollator(blind, 1).config.whole_word
