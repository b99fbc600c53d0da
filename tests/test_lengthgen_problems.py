"""Problems of the length study: generators, answers, splits, symbols, SCAN."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from locant.lengthgen import (
    PROBLEMS,
    SCRATCHPADS,
    SymbolTokenizer,
    bins,
    bucket,
    make_split,
    pool,
    problems,
    read_scan,
    scan_split,
    split_rows,
    write_scan,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shortest(name: str):
    problem = PROBLEMS[name]
    return (problem.shortest, problem.shortest) if problem.pairs else problem.shortest


@pytest.mark.parametrize("name", PROBLEMS)
def test_generators_are_pure_and_make_the_length_asked_for(name: str):
    problem = PROBLEMS[name]
    for length in bins(problem, *problem.train):
        one, again = (problem.make(length, rng(3)) for _ in range(2))
        assert one == again and one.length == length
    assert len({problem.make(bins(problem, *problem.train)[-1], rng(seed)) for seed in range(12)}) > 1


@pytest.mark.parametrize("name", PROBLEMS)
def test_lengths_that_cannot_be_made_are_refused(name: str):
    problem = PROBLEMS[name]
    zero = (0, 3) if problem.pairs else 0
    message = rf"{name}: length = {re.escape(repr(zero))} .*needed at least {problem.shortest}"
    with pytest.raises(ValueError, match=message):
        problem.make(zero, rng())
    if problem.longest is not None:
        with pytest.raises(ValueError, match=f"length = {problem.longest + 1} .*at most {problem.longest}"):
            problem.make(problem.longest + 1, rng())
        assert problem.make(problem.longest, rng()).length == problem.longest
    with pytest.raises(ValueError, match="needed one number" if not problem.pairs else "needed a pair"):
        problem.make(5 if problem.pairs else (5, 5), rng())


def test_a_scratchpad_without_steps_is_refused():
    with pytest.raises(ValueError, match="copy_rsc: a scratchpad was asked for"):
        PROBLEMS["copy_rsc"].make(3, rng(), SCRATCHPADS["full"])


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_right(seed: int):
    def tail(text: str) -> str:
        return text.removeprefix("The answer is ").removesuffix(".").strip()

    raw = PROBLEMS["addition"].generate((7, 3), rng(seed))
    assert len(str(raw["a"])) == 7 and len(str(raw["b"])) == 3
    assert tail(PROBLEMS["addition"].format(raw).target).replace(" ", "") == str(raw["a"] + raw["b"])
    raw = PROBLEMS["polynomial"].generate(9, rng(seed))
    value = sum(c * raw["x"] ** d for c, d in zip(raw["coeffs"], raw["degrees"], strict=True))
    assert tail(PROBLEMS["polynomial"].format(raw).target) == str(value % 10)
    raw = PROBLEMS["lego_permuted"].generate(11, rng(seed))
    values = dict(raw["truth_values"])
    assert tail(PROBLEMS["lego_permuted"].format(raw).target) == ("+1" if values[raw["query"]] == "1" else "-1")
    assert list(values).index(raw["query"]) >= 5
    raw = PROBLEMS["reverse_mc"].generate(6, rng(seed))
    assert raw["tgt_seq"].split() == raw["src_seq"].split()[::-1]


def test_one_digit_numbers_may_be_zero_and_longer_ones_do_not_begin_with_it():
    drawn = [PROBLEMS["addition"].generate((1, 2), rng(seed)) for seed in range(200)]
    assert {raw["a"] for raw in drawn} == set(range(10)) and min(raw["b"] for raw in drawn) == 10


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if len(problem.scratchpad) > 1])
def test_scratchpads_show_what_they_are_told_to_and_end_in_the_answer(name: str):
    problem, length = PROBLEMS[name], bins(PROBLEMS[name], *PROBLEMS[name].train)[-1]
    plain = problem.make(length, rng(1)).target
    marks = {"no_input": " in ", "no_computation": " comp ", "no_output": " out ", "no_remaining": " re "}
    for form, pad in SCRATCHPADS.items():
        target = problem.make(length, rng(1), pad).target
        assert target.endswith(plain)
        for without, mark in marks.items():
            if pad is not None and form != "computation_output_only":
                assert (mark in target) == (form != without), (form, mark)


# Splits


def test_a_split_trains_on_short_examples_and_tests_on_long_ones():
    split = make_split(PROBLEMS["addition"], 90, 20, 70, 5, train=(1, 3), test=(4, 6))
    assert (len(split.train), len(split.test)) == (90, 70) and 10 <= len(split.validation) <= 20
    assert {bucket(one) for one in split.train} == {1, 2, 3} and {bucket(one) for one in split.test} == {4, 5, 6}
    assert any(min(one.length) < 4 for one in split.test)  # one operand beyond is enough
    assert split == make_split(PROBLEMS["addition"], 90, 20, 70, 5, train=(1, 3), test=(4, 6))
    assert split != make_split(PROBLEMS["addition"], 90, 20, 70, 6, train=(1, 3), test=(4, 6))


def test_validation_repeats_no_training_prompt_where_there_are_enough():
    split = make_split(PROBLEMS["copy_cmc"], 300, 50, 10, 0, train=(6, 10), test=(11, 12))
    assert not {one.prompt for one in split.train} & {one.prompt for one in split.validation}
    few = make_split(PROBLEMS["copy_rsc"], 3000, 50, 10, 0, train=(2, 3), test=(4, 5))
    assert few.validation  # 152 different prompts in all


def test_bins_are_filled_evenly():
    split = make_split(PROBLEMS["parity"], 700, 70, 100, 0, train=(2, 8), test=(9, 13))
    counts = [sum(bucket(one) == n for one in split.test) for n in range(9, 14)]
    assert counts == [20] * 5


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ((2, 10), (10, 20), "test lengths begin at 10 but training reaches 10; begin at 11"),
        ((0, 10), (11, 20), "train lengths 0 to 10 are none"),
        ((5, 4), (11, 20), "train lengths 5 to 4 are none"),
    ],
)
def test_ranges_that_make_no_split_are_refused(train, test, message):
    with pytest.raises(ValueError, match=message):
        make_split(PROBLEMS["parity"], 5, 5, 5, 0, train=train, test=test)


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match=r"parity: \(5, 0, 5\) examples"):
        make_split(PROBLEMS["parity"], 5, 0, 5, 0)


# Symbols


def test_a_target_tokenizes_the_same_alone_and_behind_its_prompt():
    for problem in PROBLEMS.values():
        for form, pad in SCRATCHPADS.items():
            if pad is not None and not any(getattr(pad, component) for component in problem.scratchpad):
                continue
            one = problem.make(bins(problem, *problem.train)[-1], rng(2), pad)
            tokenizer = SymbolTokenizer.of([one.prompt, one.target])
            joined = tokenizer.encode(one.prompt + one.target)
            assert joined == tokenizer.encode(one.prompt) + tokenizer.encode(one.target), (problem.name, form)
            assert tokenizer.encode(tokenizer.decode(joined)) == joined


def test_a_saved_tokenizer_is_the_same_to_transformers(tmp_path: Path):
    texts = []
    for problem in PROBLEMS.values():
        pad = SCRATCHPADS["full"] if problem.scratchpad else None
        one = problem.make(bins(problem, *problem.train)[-1], rng(4), pad)
        texts += [one.prompt, one.target, one.prompt + one.target]
    tokenizer = SymbolTokenizer.of(texts)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert [loaded(text).input_ids for text in (*texts, "é x")] == [tokenizer.encode(text) for text in (*texts, "é x")]
    assert (loaded.pad_token_id, loaded.eos_token_id) == (tokenizer.pad_id, tokenizer.end_id)


def test_unknown_symbols_padding_and_end():
    tokenizer = SymbolTokenizer.of(["Copy: a 1 [SEP] "])
    assert len(tokenizer) == 3 + 5
    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode("a z"), tokenizer.end_id, 5]) == "a [UNK]"


def test_the_pool_has_single_symbols_first_and_an_end():
    assert len(set(pool(100))) == 100 and pool(3) == ("0", "1", "2")
    assert all(len(SymbolTokenizer.of([one]).encode(one)) == 1 for one in pool(128))
    for size in (0, 129):
        with pytest.raises(ValueError, match=f"a pool of {size} was asked for"):
            problems(size)


# SCAN


def scan_files(folder: Path, *lines: str) -> Path:
    for name, part in (("tasks_train_length", lines[::2]), ("tasks_test_length", lines[1::2])):
        with gzip.open(folder / f"{name}.txt.gz", "wt") as file:
            file.write("".join(f"{line}\n" for line in part))
    return folder


def test_scan_is_read_pooled_and_split_by_the_number_of_actions(tmp_path: Path):
    lines = [f"IN: walk {n} OUT: {' '.join(['I_WALK'] * n)}" for n in range(1, 13)]
    rows = read_scan(scan_files(tmp_path, *lines))
    assert sorted(row["category"] for row in rows) == list(range(1, 13))
    split = scan_split(4, 2, 9, 0, train=(1, 6), test=(7, 12), rows=rows)
    assert max(map(bucket, split.train)) <= 6 < min(map(bucket, split.test)) and len(split.test) == 6
    assert write_scan(rows[0]).prompt.startswith("Solve: ")


def test_scan_that_is_not_there_or_is_something_else_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("LOCANT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"scan: \$LOCANT_DATA is not set"):
        read_scan()
    with pytest.raises(FileNotFoundError, match=r"tasks_train_length.txt.gz' does not exist"):
        read_scan(tmp_path)
    with pytest.raises(ValueError, match=r"line 1 of tasks_train_length.txt.gz is 'walk twice'"):
        read_scan(scan_files(tmp_path, "walk twice"))
    with pytest.raises(ValueError, match="rows: no example has a length from 3 to 4"):
        split_rows([], 1, 1, 1, 0, train=(3, 4), test=(5, 6))


@pytest.mark.skipif(not os.environ.get("LOCANT_DATA"), reason="data: LOCANT_DATA is not set")
def test_the_real_scan_has_the_published_numbers_of_commands():
    rows = read_scan()
    assert len(rows) == 16_990 + 3_920
    lengths = {row["category"] for row in rows}
    assert (min(lengths), max(lengths)) == (1, 48) and len({n for n in lengths if n > 25}) == 9
