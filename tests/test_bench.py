"""The benchmark measures what it says: turns, ratios, peaks, refusals; and `auto` goes by the measured order."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from locant import attention, explain
from locant.backends import BACKENDS, Backend, speeds
from locant.bench import attention as bench
from locant.bench import model
from locant.bench.speeds import refresh
from locant.bench.timing import BASELINE, fresh_peak, peak_of, quartiles, summarize, take_turns
from locant.cli import app
from locant.plots import cost_of_attention
from locant.terms import Clip, PairBias, RelativeBias, RelativeGate, RelativeQuery, RelativeScale
from tests.scripts import load_script

SMALL = bench.Sizes(batch=1, heads=2, length=33, head_dim=8)


def test_variants_take_turns_and_warm_up_does_not_count():
    order: list[str] = []
    variants = {name: lambda n=name: order.append(n) for name in "ab"}
    found = take_turns(variants, 3)
    assert order == ["a", "b"] * 5
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_within_a_turn():
    timings = summarize({BASELINE: [1.0, 10.0, 100.0], "twice": [2.0, 20.0, 200.0]})
    assert timings["twice"].ratio == (2.0, 2.0, 2.0)
    assert timings["twice"].milliseconds[1] == 20.0


def test_a_slower_variant_has_a_ratio_above_one():
    variants = {BASELINE: lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.02)}
    assert summarize(take_turns(variants, 3))["slow"].ratio[0] > 1.2


def test_quartiles_of_one_value_are_that_value():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)


def test_a_peak_is_the_memory_of_the_call_though_the_process_holds_as_much_freed_memory():
    megabytes = 40
    torch.ones(30 << 18)  # its release teaches malloc to keep blocks of this size
    held = [torch.ones(25 << 18) for _ in range(2)]
    del held
    assert peak_of(lambda: torch.ones(megabytes, 1 << 18)) == pytest.approx(megabytes, rel=0.2)
    facts = {"case": "none", "backend": BASELINE, "sizes": {**SMALL.__dict__}, "name": "forward"}
    peak = fresh_peak("attention", facts, 1)
    assert peak is None or 0 <= peak < 100


@pytest.mark.parametrize("case", bench.CASES)
def test_every_case_runs_both_passes_and_equals_the_reference(case: str):
    fast, literal = bench.Variant(case, "auto", SMALL), bench.Variant(case, "reference", SMALL)
    torch.testing.assert_close(fast.forward(), literal.forward(), rtol=1e-4, atol=1e-5)
    fast.run("forward_backward")


def test_rows_hold_both_backends_and_say_what_cannot():
    seen = []
    rows = bench.measure(
        ["m4 clip 32", "none"], ["reference", "sdpa"], SMALL, repeats=2, memory=False, on_row=seen.append
    )
    assert rows == seen
    assert [(row.case, row.backend) for row in rows if row.timings] == [
        ("m4 clip 32", BASELINE),
        ("m4 clip 32", "reference"),
        ("m4 clip 32", "sdpa"),
        ("none", BASELINE),
        ("none", "reference"),
        ("none", "sdpa"),
    ]
    gated = bench.measure(["m1"], ["sdpa"], SMALL, repeats=2, memory=False)
    assert "RelativeScale does not lower" in gated[-1].cannot
    texts = [text.get_text() for axes in cost_of_attention(rows).axes for text in axes.get_yticklabels()]
    assert {"m4 clip 32", "none"} <= set(texts)
    with pytest.raises(ValueError, match="none of 1 rows"):
        cost_of_attention(gated[-1:])


def test_unknown_names_and_sizes_are_named():
    with pytest.raises(ValueError, match="unknown case 'm5'; choose from none, m4"):
        bench.measure(["m5"])
    with pytest.raises(ValueError, match="unknown backend 'turbo'"):
        bench.measure(["m4"], ["turbo"])
    with pytest.raises(ValueError, match="unknown pass 'sideways'"):
        bench.measure(["m4"], passes=["sideways"])
    with pytest.raises(ValueError, match="length = 0"):
        bench.Sizes(length=0)
    with pytest.raises(ValueError, match="dtype = 'int8'"):
        bench.Sizes(dtype="int8")
    with pytest.raises(ValueError, match="num_heads = 5 does not divide model_dim = 768"):
        model.ModelSizes(num_heads=5)
    with pytest.raises(ValueError, match="threads = 0"):
        model.ModelSizes(threads=0)


def test_a_model_is_measured_against_the_absolute_one():
    sizes = model.ModelSizes(num_layers=1, model_dim=16, num_heads=2, batch=1, length=9)
    rows = model.measure(["m4 clip 32", "tisa"], sizes, repeats=2, memory=False)
    assert [row.encoding for row in rows] == [model.BASELINE, "m4 clip 32", "tisa"]
    assert rows[0].timings["inference"].ratio == (1.0, 1.0, 1.0)
    assert set(rows[1].timings) == {"inference", "training_step"}


# --- the table of a GPU, on the CPU at small sizes ---


@pytest.fixture
def gpu_script(monkeypatch: pytest.MonkeyPatch):
    """benchmarks/gpu.py and its arguments for a CPU."""
    script = load_script("benchmarks/gpu.py")
    small = "--device cpu --dtype float32 --lengths 9 20 --tokens 40 --heads 2 --head-dim 8 --repeats 2".split()
    monkeypatch.setattr("sys.argv", ["gpu.py", *small])
    return script, script.arguments()


def test_the_gpu_table_has_a_row_for_each_length_and_backend_and_says_what_failed(gpu_script):
    script, given = gpu_script
    rows = script.rows_of("m4 clip 32", given)
    assert [(row["length"], row["backend"]) for row in rows] == [
        (length, name) for length in (9, 20) for name in (BASELINE, "sdpa", "flex", "triton")
    ]
    assert [bool(row["cannot"]) for row in rows] == [False, False, True, True] * 2
    assert "tensors are on cpu" in rows[2]["cannot"] and "cannot: backend 'flex'" in script.line(rows[2])
    assert re.search(r"m4 clip 32 +9  sdpa +\d+\.\d\d \(.* ms .* MB", script.line(rows[1]))
    unknown = script.rows_of("m9", given)
    assert len(unknown) == 2 and "unknown case 'm9'" in unknown[1]["cannot"]


def test_a_gpu_case_runs_in_a_process_of_its_own_whose_end_is_told(gpu_script, monkeypatch: pytest.MonkeyPatch):
    script, given = gpu_script
    given.lengths = [9]
    rows = script.in_its_process("alibi", 2, given, 120)
    assert [row["backend"] for row in rows] == [BASELINE, "sdpa", "flex", "triton"]
    given.dtype = "int8"
    assert "its process ended with 1: " in script.in_its_process("alibi", 2, given, 120)[0]["cannot"]
    assert "not done in 0 seconds" in script.in_its_process("alibi", 2, given, 0.01)[0]["cannot"]


def test_no_gpu_case_is_started_after_its_time(gpu_script, monkeypatch: pytest.MonkeyPatch):
    script, given = gpu_script
    given.cases, given.seconds, started = ["m4", "alibi"], 100.0, []
    clock = iter((0.0, 60.0, 60.0, 101.0))  # at the start, after compiling, before each case
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))

    def run(case, repeats, *rest):
        started.append((case, repeats))
        return []

    monkeypatch.setattr(script, "in_its_process", run)
    rows = script.measure_all(given)
    assert sorted(started[:2]) == [("alibi", 2), ("m4", 2)] and started[2:] == [("m4", given.repeats)]
    assert [row["cannot"] for row in rows] == ["not measured: 100.0 seconds were over"] * 2


def test_a_backend_that_fails_loses_its_own_row_alone(monkeypatch: pytest.MonkeyPatch):
    def fail(call):
        raise RuntimeError("out of registers\nand more")

    monkeypatch.setitem(BACKENDS, "sdpa", Backend(lambda call: None, fail))
    rows = bench.measure(["alibi"], ["sdpa", "reference"], SMALL, repeats=2, memory=False)
    assert [(row.backend, row.cannot) for row in rows] == [
        (BASELINE, ""),
        ("reference", ""),
        ("sdpa", "RuntimeError: out of registers"),
    ]


# --- what auto goes by ---


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A table of our own in place of the package's."""
    monkeypatch.setattr(speeds, "FILE", tmp_path / "speeds.json")
    clear()
    yield
    clear()


def clear() -> None:
    speeds.read.cache_clear()
    speeds._ranked.cache_clear()


def chosen(length: int, terms=(), **changes) -> str:
    q, k, v = (torch.randn(1, 1, length, 4, **changes) for _ in range(3))
    return explain(q, k, v, terms).backend


def query(**changes) -> RelativeQuery:
    return RelativeQuery(torch.randn(1, 7, 4, **changes), Clip(3))


def test_auto_takes_the_fastest_at_the_nearest_length(measured):
    times = {"8": {"reference": 1.0, "blocked": 2.0}, "32": {"reference": 9.0, "blocked": 2.0}}
    speeds.write(
        "cpu", {}, {"vectors, inference": times, "vectors, training": {"8": {"blocked": 1.0, "reference": 2.0}}}
    )
    assert chosen(8, (query(),)) == "reference"
    assert chosen(16, (query(),)) == "reference"
    assert chosen(17, (query(),)) == "blocked"
    assert chosen(200, (query(),)) == "blocked"
    assert chosen(8, (query(),), requires_grad=True) == "blocked"
    with torch.no_grad():
        assert chosen(8, (query(),), requires_grad=True) == "reference"


def test_tables_that_learn_in_a_frozen_host_are_training(measured):
    fast = {"8": {"reference": 1.0, "blocked": 2.0}}
    slow = {"8": {"reference": 2.0, "blocked": 1.0}}
    speeds.write(
        "cpu",
        {},
        {
            f"{family}, {name}": times
            for family in ("vectors", "biases")
            for name, times in (("inference", fast), ("training", slow))
        },
    )
    assert chosen(8, (query(),)) == "reference"
    assert chosen(8, (query(requires_grad=True),)) == "blocked"
    bias = torch.zeros(1, 8, 8)
    assert chosen(8, (PairBias(bias),)) == "reference"
    assert chosen(8, (PairBias(bias.clone().requires_grad_()),)) == "blocked"
    assert chosen(8, (PairBias(lambda positions: bias),)) == "blocked"  # who knows: it was not called
    with torch.no_grad():
        assert chosen(8, (query(requires_grad=True), PairBias(lambda positions: bias))) == "reference"


def test_a_backend_that_cannot_is_passed_over_and_one_that_was_not_measured_comes_last(measured):
    speeds.write("cpu", {}, {"vectors, inference": {"8": {"native": 0.1, "blocked": 1.0}}})
    q = torch.randn(1, 1, 8, 4, dtype=torch.float64)  # which the kernel does not know
    assert explain(q, q, q, (query(dtype=torch.float64),)).backend == "blocked"
    out = attention(q, q, q, (query(dtype=torch.float64),), return_weights=True)
    assert isinstance(out, tuple)  # by the reference, the last


def test_the_dearest_term_decides_the_family(measured):
    rule = Clip(3)
    gate, scale, bias = (
        RelativeGate(torch.ones(1, 7, 4), rule),
        RelativeScale(torch.ones(1, 7), rule),
        RelativeBias(torch.zeros(1, 7), rule),
    )
    families = {
        "gates": (bias, query(), gate),
        "vectors": (bias, query(), scale),
        "scales": (bias, scale),
        "biases": (bias,),
        "plain": (),
    }
    for family in families:
        speeds.write("cpu", {}, {f"{family}, inference": {"8": {"reference": 1.0}}})
        for other, others in families.items():
            q = torch.randn(1, 1, 8, 4)
            with_reference = explain(q, q, q, others).backend == "reference"
            assert with_reference == (other == family), (family, other)


def test_the_packaged_table_names_backends_and_is_complete():
    table = speeds.read()
    assert "cpu" in table
    for device in table.values():
        assert device["made"]["hardware"] and device["made"]["versions"]["torch"]
        assert {name.split(",")[0] for name in device["milliseconds"]} == {*speeds.FAMILIES, "plain"}
        for rows in device["milliseconds"].values():
            assert set().union(*rows.values()) <= set(BACKENDS)


def test_a_table_is_measured_for_every_family_pass_and_length():
    found = refresh(repeats=2, lengths=(8,))
    assert len(found) == 10
    for name, rows in found.items():
        assert {"reference", "blocked"} <= set(rows["8"]), name
        assert all(value > 0 for value in rows["8"].values())
    assert "sdpa" in found["biases, training"]["8"] and "sdpa" not in found["gates, training"]["8"]


# --- the commands ---


def test_bench_attention_prints_writes_and_draws(tmp_path: Path):
    arguments = ["--cases", "m4 clip 32", "--backends", "blocked", "--length", "20", "--heads", "2", "--repeats", "2"]
    files = ["--json", str(tmp_path / "a" / "r.json"), "--plot", str(tmp_path / "r.svg")]
    done = CliRunner().invoke(app, ["bench", "attention", *arguments, "--no-memory", *files])
    assert done.exit_code == 0, done.output
    assert re.search(r"m4 clip 32 +blocked +\d+\.\d\d \(", done.output)
    results = json.loads((tmp_path / "a" / "r.json").read_text())
    assert results["sizes"]["length"] == 20 and len(results["rows"]) == 2
    assert results["made"]["hardware"]
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_bench_model_prints_a_row_for_each_encoding():
    sizes = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "1", "--length", "9", "--repeats", "2"]
    done = CliRunner().invoke(app, ["bench", "model", "--encodings", "tisa", *sizes, "--no-memory"])
    assert done.exit_code == 0, done.output
    assert "absolute on sdpa" in done.output and re.search(r"tisa +auto", done.output)


def test_an_unknown_case_is_one_sentence():
    done = CliRunner().invoke(app, ["bench", "attention", "--cases", "m7"])
    assert done.exit_code == 2 and "unknown case 'm7'" in done.output
