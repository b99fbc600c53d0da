"""Result tables: what may enter, JSON there and back, statistics over seeds, sentences, text and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence

import pytest

from locant.compare.conclusions import RULE, conclusions, findings
from locant.compare.measure import median_speed
from locant.compare.results import (
    CurvePoint,
    LengthScore,
    ResultTable,
    RunResult,
    ShiftScore,
    Speed,
    read_results,
)
from locant.compare.summary import compare, spread, summarise, t_critical
from locant.compare.tables import encodings_csv, runs_csv, to_text
from locant.report.page import render
from locant.training.folder import write_atomically
from tests.compare_tables import PROFILES, make_table

NAN = float("nan")


def table_of(losses: Mapping[str, Sequence[float | None]], baseline: str = "none", trained: int = 32) -> ResultTable:
    """One run for each loss, the seed being its place; None is a run that failed."""
    runs = []
    for label, values in losses.items():
        for seed, loss in enumerate(values):
            if loss is None:
                runs.append(RunResult(label, {}, seed, "failed", "loss was nan at step 7"))
            else:
                runs.append(RunResult(label, {}, seed, "done", lengths=(LengthScore(trained, 1, loss, 0.25),)))
    return ResultTable({}, baseline, trained, tuple(runs))


def row_of(table: ResultTable, encoding: str):
    return next(row for row in summarise(table) if row.encoding == encoding)


# --- what may enter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_undefined_with_a_reason(bad):
    score = LengthScore(32, 1, bad, 0.5)
    assert score.loss is None and score.reason == f"loss was {bad}"
    assert ShiftScore(3, bad).loss is None and ShiftScore(3, bad).reason == f"loss was {bad}"
    assert CurvePoint(1, 32, 0.5, bad, bad) == CurvePoint(1, 32, 0.5, None, None)
    speed = Speed(bad, 2.0, 3.0, 4.0)
    assert speed.train_tokens_per_second is None and speed.reason == f"train tokens per second was {bad}"


def test_an_undefined_number_always_has_a_reason():
    assert LengthScore(64, 2, None, None).reason == "length 64 was not measured"
    assert LengthScore(64, 2, None, None, "its table has 32 rows").reason == "its table has 32 rows"
    assert ShiftScore(8, None).reason == "shift 8 was not measured"
    assert Speed(1.0, None, 2.0, None).reason == "not measured: inference_tokens_per_second, inference_peak_mb"


def test_an_unknown_status_and_a_failure_without_a_reason_are_refused():
    with pytest.raises(ValueError, match="'finished' of 'tisa'"):
        RunResult("tisa", {}, 3, "finished")
    with pytest.raises(ValueError, match="'tisa' seed 3 failed without a reason"):
        RunResult("tisa", {}, 3, "failed")


def test_a_table_refuses_twin_runs_a_foreign_baseline_and_foreign_speeds():
    run = RunResult("tisa", {}, 3, "missing")
    with pytest.raises(ValueError, match="two runs of 'tisa' with seed 3"):
        ResultTable({}, "tisa", 32, (run, run))
    with pytest.raises(ValueError, match="baseline 'none' has no run; there are tisa"):
        ResultTable({}, "none", 32, (run,))
    with pytest.raises(ValueError, match="speeds of rope"):
        ResultTable({}, "tisa", 32, (run,), {"rope": Speed(1.0, 1.0, 1.0, 1.0)})


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_round_trip_keeps_every_float():
    table = make_table(seeds=(0, 1, 5), broken={("tisa", 1)})
    assert ResultTable.from_json(table.to_json()) == table
    run = table.runs[3]
    assert RunResult.from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_undefined_numbers_are_null_in_json():
    body = json.loads(dataclasses.replace(table_of({"none": [1.5]}), recipe={"rate": NAN}).to_json())
    assert body["recipe"] == {"rate": None}
    assert body["runs"][0]["seconds"] is None
    assert body["format"] == "locant.compare.results" and body["schema_version"] == 1


def test_every_truncated_file_gets_a_clear_error(tmp_path):
    text = make_table(("none", "tisa"), (0,)).to_json()
    path = tmp_path / "results.json"
    for length in random.Random(0).sample(range(len(text) - 2), 40):
        path.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ValueError, match=r"results\.json: not a whole JSON file"):
            read_results(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format="other"), "format is 'other'"),
        (lambda body: body.pop("format"), "format is 'no format'"),
        (lambda body: body.update(schema_version=99), "schema version 99, but this locant reads 1"),
        (lambda body: body.pop("baseline"), r"table lacks \['baseline'\]"),
        (lambda body: body.update(extra=1), r"table has unknown fields \['extra'\]"),
        (lambda body: body.update(trained_length="32"), "table.trained_length is '32', needed int"),
        (lambda body: body.update(trained_length=True), "table.trained_length is True, needed int"),
        (lambda body: body.update(runs={}), "table.runs is {}, needed list"),
        (
            lambda body: body["runs"][1]["lengths"][0].update(loss="x"),
            r"runs\[1\].lengths\[0\].loss is 'x', needed int/f",
        ),
        (lambda body: body["runs"][0].update(status="odd"), "status='odd'"),
        (lambda body: body["speeds"].update(none=3), "table.speeds.none is 3, needed dict"),
    ],
)
def test_a_foreign_or_edited_file_names_the_field(tmp_path, change, message):
    body = json.loads(make_table(("none", "tisa"), (0, 1)).to_json())
    change(body)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"results\.json: .*{message}"):
        read_results(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[1, 2]", "format is 'list'"), (b"\xff\xfe\x00", "not UTF-8 text"), (b'{"a": NaN}', "NaN is not a JSON number")],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"x\.json: .*{message}"):
        read_results(path)


def test_a_run_from_elsewhere_names_its_source():
    with pytest.raises(ValueError, match=r"here: result lacks \['curve'"):
        RunResult.from_dict({"encoding": "a", "options": {}, "seed": 1, "status": "done"}, "here")


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = write_atomically(tmp_path / "new" / "a.txt", "one\n")
    assert path.read_text() == "one\n" and path.stat().st_mode & 0o044

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "two\n")
    assert path.read_text() == "one\n" and [item.name for item in path.parent.iterdir()] == ["a.txt"]


# --- statistics ------------------------------------------------------------------------------------------------------


def test_t_quantiles_agree_with_the_printed_table():
    # Two-sided 95 % values of Student's t as printed in any statistics textbook.
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 30: 2.042, 120: 1.980}
    for degrees, value in printed.items():
        assert t_critical(degrees) == pytest.approx(value, abs=6e-4)
    assert t_critical(7, 0.99) == pytest.approx(3.499, abs=6e-4)
    with pytest.raises(ValueError, match="degrees=0"):
        t_critical(0)


def test_spread_leaves_out_what_is_undefined_and_counts_the_rest():
    assert spread([]) == spread([None, NAN]) and spread([None]).mean is None and spread([None]).n == 0
    assert spread([2.5]).std is None
    three = spread([1.0, None, 2.0, 4.5, math.inf])
    assert (
        three.n == 3 and three.mean == pytest.approx(2.5) and three.std == pytest.approx(statistics.stdev([1, 2, 4.5]))
    )


def test_differences_are_paired_by_seed():
    table = table_of({"none": [4.0, 5.0, 7.0], "tisa": [3.5, 4.4, 6.3]})  # d = -0.5, -0.6, -0.7
    gap = compare(table, "tisa", "none")
    assert gap.mean == pytest.approx(-0.6) and gap.std == pytest.approx(0.1) and gap.n == 3
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert gap.low == pytest.approx(-0.6 - half, abs=1e-6) and gap.high == pytest.approx(-0.6 + half, abs=1e-6)
    assert gap.seed_spread == pytest.approx(statistics.stdev([4.0, 5.0, 7.0]))
    assert gap.verdict == "level"  # the seeds spread by 1.5, more than 0.6


def test_only_seeds_that_both_finished_are_paired():
    table = table_of({"none": [4.0, None, 4.1, 4.2], "tisa": [3.0, 2.0, None, 3.3]})
    gap = compare(table, "tisa", "none")
    assert gap.n == 2 and gap.mean == pytest.approx(-0.95)
    alone = compare(table_of({"none": [4.0, None], "tisa": [None, 3.0]}), "tisa", "none")
    assert alone.n == 0 and alone.mean is None and alone.verdict == "unknown"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([3.00, 3.01], "clear"),  # d = -1.00, -1.01: interval -1.005 -+ 0.064
        ([3.00, 3.30], "leaning"),  # d = -1.00, -0.72: interval -0.86 -+ 1.78 reaches zero
        ([4.01, 3.99], "level"),  # d = 0.01, -0.03
        ([5.00, 5.02], "clear"),
        ([3.00], "unknown"),
    ],
)
def test_the_rule_for_a_clear_difference(losses, verdict):
    assert compare(table_of({"none": [4.00, 4.02], "tisa": losses}), "tisa", "none").verdict == verdict


def test_chance_alone_is_rarely_called_clear():
    draw = random.Random(0)
    clear = 0
    for _ in range(300):
        losses = {label: [draw.gauss(3, 0.05) for _ in range(3)] for label in ("none", "tisa")}
        clear += compare(table_of(losses), "tisa", "none").verdict == "clear"
    assert clear <= 0.05 * 300 + 2 * math.sqrt(300 * 0.05 * 0.95)


def test_rows_are_ranked_and_failures_named_not_averaged():
    table = table_of({"none": [4.0, 4.2], "tisa": [3.0, None], "rope": [None, None], "t5": [3.5, 3.1]})
    rows = summarise(table)
    assert [(row.encoding, row.rank) for row in rows] == [("tisa", 1), ("t5", 2), ("none", 3), ("rope", None)]
    tisa, rope = rows[0], rows[3]
    assert tisa.done == 1 and tisa.planned == 2 and tisa.loss == 3.0 and tisa.trained is not None
    assert tisa.trained.loss.n == 1 and tisa.trained.loss.std is None
    assert tisa.failed == ("seed 1: loss was nan at step 7",)
    assert rope.loss is None and len(rope.failed) == 2


def test_equal_means_share_a_rank():
    table = table_of({"none": [4.0], "tisa": [3.0], "t5": [3.0], "rope": [5.0]})
    assert [row.rank for row in summarise(table)] == [1, 1, 3, 4]


def test_a_loss_without_number_is_left_out_of_the_mean_and_counted():
    table = table_of({"none": [4.0, 4.2, 4.4]})
    broken = dataclasses.replace(table.runs[1], lengths=(LengthScore(32, 1, NAN, 0.1),))
    row = summarise(dataclasses.replace(table, runs=(table.runs[0], broken, table.runs[2])))[0]
    assert row.trained is not None and row.trained.loss.n == 2 and row.loss == pytest.approx(4.2)
    assert row.trained.reason == "loss was nan"


def test_shift_changes_are_taken_run_by_run_and_the_largest_is_absolute():
    def shifts(zero, eight):
        return (ShiftScore(0, zero), ShiftScore(8, eight), ShiftScore(64, None, "its table has 32 rows"))

    runs = tuple(
        RunResult("none", {}, seed, "done", lengths=(LengthScore(32, 1, zero, 0.1),), shifts=shifts(zero, eight))
        for seed, (zero, eight) in enumerate([(3.0, 3.1), (4.0, 3.7)])
    )
    row = summarise(ResultTable({}, "none", 32, runs))[0]
    assert row.max_shift_change == pytest.approx(0.3)
    at = {one.shift: one for one in row.shifts}
    assert at[8].change.mean == pytest.approx(-0.1) and at[8].change.n == 2 and at[0].change.mean == 0.0
    assert at[64].loss.mean is None and at[64].reason == "its table has 32 rows"


# --- sentences -------------------------------------------------------------------------------------------------------


def test_conclusions_say_who_wins_by_how_much_and_against_which_spread():
    text = conclusions(table_of({"none": [4.00, 4.02], "tisa": [3.00, 3.01]}))
    assert text[0] == (
        "tisa has the lowest validation loss at the trained length of 32 tokens: "
        "3.005 ± 0.007 nats per predicted token (2 seeds)."
    )
    assert "tisa is clearly ahead of every other encoding." in text
    assert (
        "tisa beats none by 1.00 nats, more than the spread of the seeds (0.014); 95% interval -1.069 to -0.941."
        in text
    )
    assert RULE in text


def test_conclusions_call_what_the_seeds_cannot_separate():
    text = " ".join(conclusions(table_of({"none": [4.00, 4.02], "tisa": [3.99, 4.01], "rope": [5.00, 5.04]})))
    assert "Cannot be told apart from none with 2 seeds: tisa." in text
    assert "rope loses to none by 1.01 nats" in text
    assert "No encoding is clearly better than none." in text
    assert "With two seeds an interval rests on one degree of freedom" in text


def test_the_lowest_mean_over_fewer_seeds_does_not_win_against_the_pairs():
    losses = {"none": [9.0, 4.00, 4.02, 4.01], "tisa": [None, 4.50, 4.52, 4.51]}  # seed 0 was hard, and tisa lacks it
    text = conclusions(table_of(losses))
    assert text[0].startswith("tisa has the lowest")
    assert "clearly ahead of every other" not in " ".join(text)
    assert (
        "That mean is over other seeds than theirs; on the seeds in common these are ahead of tisa: none (-0.500)."
        in text
    )


def test_one_seed_allows_no_judgment():
    text = " ".join(conclusions(table_of({"none": [4.0], "tisa": [3.0]})))
    assert "whether the gap is chance is unknown: none (+1.000)" in text
    assert "Against none with one seed, so without any measure of chance: tisa (-1.000) nats." in text
    assert "clearly" not in text and "beats" not in text


def test_conclusions_on_length_shift_cost_and_gaps():
    found = findings(make_table(broken={("tisa", 1)}))
    text = {
        subject: " ".join(one.text for one in found if one.subject == subject) for subject in {f.subject for f in found}
    }
    assert "At 64 tokens (2x) tisa has the lowest loss" in text["length"]
    assert (
        "tupe_r and absolute cannot be evaluated at 64 tokens (2x) and 128 tokens (4x): its table has 32 rows."
        in text["length"]
    )
    assert "huang_m4, tisa and none do not change under shifted ids (largest change 0.0000 nats)." in text["shift"]
    assert "absolute (up to 0.10 nats)" in text["shift"]
    assert "Training: none is fastest (52,300 tokens/s), huang_m4 slowest (32,426, 62% of none)." in text["cost"]
    assert "tisa: 1 of 2 runs did not finish (seed 1: loss was nan at step 612)" in text["gap"]
    assert "one model size (412,032 to 422,400 parameters), 1,500 training steps and 2 seeds" in text["limit"]


def test_an_order_of_speeds_needs_rounds_that_do_not_overlap():
    def cost(none, tisa):
        speeds = {
            label: median_speed([Speed(value, 2 * value, 5.0, 4.0) for value in values])
            for label, values in (("none", none), ("tisa", tisa))
        }
        table = dataclasses.replace(table_of({"none": [4.0, 4.1], "tisa": [3.0, 3.1]}), speeds=speeds)
        return " ".join(one.text for one in findings(table) if one.subject == "cost")

    apart = cost([90.0, 100.0, 120.0], [40.0, 50.0, 89.0])
    assert "Training: none is fastest (100 tokens/s), tisa slowest (50, 50% of none)." in apart
    assert "tisa, lowest in mean loss, trains at 50% of the speed of none." in apart
    level = cost([88.0, 100.0, 120.0], [40.0, 50.0, 89.0])
    assert "even the rounds of tisa (50 tokens/s) and none (100), the ends by median, overlap." in level
    assert "50% of the speed of none (their rounds overlap)." in level and "fastest" not in level
    assert "tisa slowest (50, 50% of none). Measured in one round, so without any" in cost([100.0], [50.0])


def test_the_table_tells_when_rounds_lie_far_apart():
    def told(rounds):
        speed = median_speed([Speed(value, 100.0, 5.0, 4.0) for value in rounds])
        return to_text(dataclasses.replace(table_of({"none": [4.0], "tisa": [3.0]}), speeds={"tisa": speed}))

    assert "The rounds of tisa lie far apart: the machine was busy" in told([99.0, 150.0, 151.0])
    assert "far apart" not in told([100.0, 120.0, 150.0])


def test_a_baseline_without_a_number_and_a_failed_measurement_are_told():
    table = table_of({"none": [None, None], "tisa": [3.0, 3.1]})
    text = conclusions(
        dataclasses.replace(table, speeds={"tisa": Speed(None, None, None, None, "its process was killed")})
    )
    assert "Nothing can be compared with the baseline none, which has no loss at the trained length." in text
    assert "tisa: speed or memory lacks numbers (its process was killed)." in text
    assert not any("baseline" in one for one in conclusions(table_of({"none": [4.0], "tisa": [3.0]})))


def test_nothing_finished_is_said_plainly():
    text = conclusions(table_of({"none": [None, None], "tisa": [None, None]}))
    assert text[0].startswith("No run finished with a validation loss at the trained length")
    assert any("none: 2 of 2 runs did not finish" in sentence and "no number at all" in sentence for sentence in text)


@pytest.mark.parametrize("labels", [("none",), ("none", "tisa"), tuple(PROFILES)])
@pytest.mark.parametrize("seeds", [(0,), (0, 1), (0, 1, 7)])
def test_every_shape_of_table_gives_whole_sentences(labels, seeds):
    for sentence in conclusions(make_table(labels, seeds)):
        assert sentence.endswith(".") and "None" not in sentence and "nan" not in sentence and "{" not in sentence


# --- text and CSV ----------------------------------------------------------------------------------------------------


def test_text_table_is_aligned_and_marks_what_is_clear():
    text = to_text(make_table())
    lines = text.splitlines()
    head, rule = lines[1], lines[2]
    assert "loss at 64 (2x)" in head and "against none" in head
    edges = [i for i, (one, other) in enumerate(zip(rule, rule[1:] + " ", strict=True)) if one == "-" and other == " "]
    for line in lines[3:8]:
        for edge in edges[2:]:
            assert edge >= len(line) or line[edge] != " ", f"column edge {edge} is ragged in {line!r}"
    assert any(line.startswith("1") and "*" in line and "cannot" in line for line in lines)
    assert "tupe_r at 64: its table has 32 rows" in text and "baseline" in text


def test_text_table_names_failed_runs():
    text = to_text(make_table(broken={("tisa", 0), ("tisa", 1)}))
    assert "0 of 2" in text and "tisa: seed 0: loss was nan at step 612" in text


def test_csv_has_one_row_for_each_run_and_for_each_encoding_with_full_floats():
    table = make_table(seeds=(0, 1, 2), broken={("tisa", 1)})
    runs = list(csv.DictReader(io.StringIO(runs_csv(table))))
    assert len(runs) == 15 and float(runs[0]["loss_at_32"]) == table.runs[0].lengths[0].loss
    failed = next(row for row in runs if row["status"] == "failed")
    assert failed["loss_at_32"] == "" and failed["reason"] == "loss was nan at step 612"
    encodings = list(csv.DictReader(io.StringIO(encodings_csv(table))))
    assert [row["encoding"] for row in encodings] == [row.encoding for row in summarise(table)]
    tisa = next(row for row in encodings if row["encoding"] == "tisa")
    assert tisa["seeds_done"] == "2" and tisa["n_at_32"] == "2"
    assert float(tisa["loss_mean_at_32"]) == row_of(table, "tisa").loss
    absolute = next(row for row in encodings if row["encoding"] == "absolute")
    assert absolute["loss_mean_at_64"] == "" and absolute["reason_at_64"] == "its table has 32 rows"


def test_csv_quotes_what_labels_may_hold():
    table = ResultTable({}, 'a,"b"\nc', 32, (RunResult('a,"b"\nc', {"clip": 3}, 0, "missing"),))
    row = next(csv.DictReader(io.StringIO(runs_csv(table), newline="")))
    assert row["encoding"] == 'a,"b"\nc' and json.loads(row["options"]) == {"clip": 3}


def test_where_no_speed_was_measured_there_is_no_column_for_it() -> None:
    table = table_of({"none": [3.0], "tisa": [2.5]})
    assert not table.speeds
    text, page = to_text(table), render(table)
    assert "tok/s" not in text and "\nParameters\nencoding" in text
    assert "Speed and memory were not measured" in page and "Inference<small>" not in page
    timed = dataclasses.replace(table, speeds={"none": Speed(5.0, 7.0, 1.0, 1.0)})
    assert "train tok/s" in to_text(timed) and "Inference<small>" in render(timed)
