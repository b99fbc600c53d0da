"""Figures of a comparison: what is drawn is what the table says, whatever the table lacks."""

from __future__ import annotations

import dataclasses
import itertools
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

import locant.plots
from locant.compare.results import CurvePoint, LengthScore, ResultTable, RunResult, ShiftScore, Speed
from locant.compare.summary import summarise
from locant.plots import (
    ONE_COLUMN,
    TWO_COLUMN,
    loss_by_length,
    loss_by_shift,
    loss_by_step,
    save,
    speed_against_quality,
    to_svg,
)
from locant.plots.labels import place_around, shorten, spread_apart
from locant.plots.style import COLORS, DARK, NONE_COLOR, PAPER, SLOTS, marks
from tests.compare_tables import PROFILES, make_table

PLOTS = (loss_by_step, loss_by_length, loss_by_shift, speed_against_quality)


def bare(label: str = "none", **fields) -> ResultTable:
    return ResultTable({}, label, 32, (RunResult(label, {}, 0, **{"status": "done", **fields}),))


SPARSE = {
    "no run at all": ResultTable({}, "none", 32, ()),
    "nothing measured": bare(),
    "missing": bare(status="missing"),
    "failed at once": bare(status="failed", reason="loss was nan"),
    "failed later": bare(status="failed", reason="loss was nan", curve=(CurvePoint(5, 9, 0.1, 3.0),)),
    "one point": bare(curve=(CurvePoint(5, 9, 0.1, 3.0, 2.9),), lengths=(LengthScore(32, 1, 2.9, 0.3),)),
    "only a longer length": bare(lengths=(LengthScore(48, 1, 2.9, 0.3),)),
    "no shift zero": bare(shifts=(ShiftScore(8, 2.9),)),
    "negative shifts": bare(shifts=(ShiftScore(0, 2.9), ShiftScore(-5, 3.1))),
    "strange label": bare('$x_1$ <b>&"é" 位置', lengths=(LengthScore(32, 1, 2.9, 0.3), LengthScore(64, 2, 3.9, 0.3))),
}


def words(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("name", SPARSE)
def test_whatever_a_table_lacks_there_is_a_figure(plot, name):
    svg = to_svg(plot(SPARSE[name], ONE_COLUMN))
    assert svg.count("<svg") == 1
    ElementTree.fromstring(svg)
    assert "nan" not in svg.replace("nanometer", "").split("<defs>")[0]


@pytest.mark.parametrize("plot", PLOTS)
@pytest.mark.parametrize("width", [ONE_COLUMN, TWO_COLUMN])
def test_twenty_encodings_are_all_named(plot, width):
    table = make_table(tuple(PROFILES), (0, 1, 2), broken={("t5", 1)})
    figure = plot(table, width)
    text = " ".join(" ".join(words(figure)).split())
    for label in PROFILES:
        assert shorten(label, 15) in text or label in text, f"{label} is not named in {plot.__name__}"


def numbers(values: object) -> list[float]:
    return [float(value) for value in np.asarray(values, float)]


def test_curves_are_the_means_over_the_finished_seeds():
    table = make_table(("none", "tisa"), (0, 1, 2), broken={("tisa", 1)})
    axes = loss_by_step(table).axes[0]
    one, other = (
        [point.validation_loss for point in run.curve if point.validation_loss is not None]
        for run in table.of("tisa")
        if run.status == "done"
    )
    want = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    color = marks(table.encodings)["tisa"].color
    drawn = [numbers(line.get_ydata()) for line in axes.lines if line.get_color() == color]
    assert any(len(line) == len(want) and line == pytest.approx(want) for line in drawn)
    crosses = [numbers(line.get_xdata()) for line in axes.lines if line.get_marker() == "x"]
    assert crosses == [[500]]  # the failed run ends at its last validation


def test_training_loss_is_drawn_where_no_validation_was_taken():
    curve = (CurvePoint(0, 0, 0.0, 5.0), CurvePoint(10, 9, 0.1, 3.0))
    figure = loss_by_step(bare(curve=curve))
    assert figure.axes[0].get_ylabel().startswith("Training loss")
    assert numbers(figure.axes[0].lines[0].get_ydata()) == [5.0, 3.0]


def test_a_validation_at_the_end_alone_leaves_the_training_loss_as_the_curve():
    curve = (CurvePoint(10, 1, 1.0, 6.0), CurvePoint(20, 2, 2.0, 5.0), CurvePoint(30, 3, 3.0, 4.0, 4.5))
    figure = loss_by_step(bare(curve=curve))
    assert "Training loss" in figure.axes[0].get_ylabel()
    assert list(figure.axes[0].lines[0].get_xdata()) == [10.0, 20.0, 30.0]


def test_lengths_that_cannot_be_had_are_named_and_not_drawn():
    figure = loss_by_length(make_table(("none", "absolute")))
    assert any("Cannot be evaluated: absolute at 64, 128." in text for text in words(figure))
    lines = [line for line in figure.axes[0].lines if line.get_color() == marks(["absolute"])["absolute"].color]
    assert {x for line in lines for x in numbers(line.get_xdata())} == {32}


def test_loss_by_length_shows_mean_and_deviation():
    table = make_table(("none", "tisa"), (0, 1, 2))
    axes = loss_by_length(table).axes[0]
    row = next(row for row in summarise(table) if row.encoding == "tisa")
    container = next(c for c in axes.containers if c[0].get_color() == marks(["tisa"])["tisa"].color)
    assert numbers(container[0].get_ydata()) == pytest.approx([one.loss.mean for one in row.lengths])
    segments = container[2][0].get_segments()
    assert [s[1][1] - s[0][1] for s in segments] == pytest.approx([2 * (one.loss.std or 0) for one in row.lengths])


def test_an_encoding_that_cannot_be_shifted_is_named_below_and_not_drawn():
    shifts = (ShiftScore(0, 3.0), ShiftScore(16, None, "its table has 9 rows"))
    figure = loss_by_shift(bare(shifts=shifts))
    assert not figure.axes[0].lines
    assert any("at 16" in text.get_text() for text in figure.texts)


@pytest.mark.parametrize("width", [ONE_COLUMN, TWO_COLUMN])
@pytest.mark.parametrize("loss", [2.9, 123456.75, -0.00021])
@pytest.mark.parametrize("plot", PLOTS)
def test_the_name_of_the_axis_stays_in_the_figure(plot, loss, width):
    lengths = tuple(LengthScore(32 * k, k, loss * (1 + k / 1e3), 0.3) for k in (1, 2))
    shifts = tuple(ShiftScore(k, loss + k * loss) for k in (0, 5))
    curve = tuple(CurvePoint(k, 9, 0.1, loss + k) for k in (1, 2))
    table = bare(curve=curve, lengths=lengths, shifts=shifts)
    figure = plot(dataclasses.replace(table, speeds={"none": Speed(1.0, 1.0, 1.0, 1.0)}), width)
    figure.draw_without_rendering()
    assert figure.axes[0].yaxis.label.get_window_extent().x0 >= 0


def test_shifts_that_change_nothing_are_drawn_at_the_foot():
    figure = loss_by_shift(bare(shifts=(ShiftScore(0, 3.0), ShiftScore(16, 3.0))))
    assert figure.axes[0].get_ylim() == pytest.approx((-0.01, 0.05))


def test_encodings_that_ignore_shifts_share_one_line():
    figure = loss_by_shift(make_table(("none", "tisa", "sinusoidal")))
    text = words(figure)
    assert "no change (2)" in text and any("No change: tisa, none." in part for part in text)
    assert "sinusoidal" in text and "tisa" not in text


def test_the_front_holds_what_none_beats_in_both():
    figure = speed_against_quality(make_table())
    front = next(line for line in figure.axes[0].lines if line.get_drawstyle() == "steps-pre")
    rows = {row.encoding: row for row in summarise(make_table())}
    want = [rows[name].loss for name in ("tupe_r", "absolute", "none")]  # huang_m4 and tisa are slower and worse
    assert numbers(front.get_ydata()) == pytest.approx(want)


def test_an_encoding_without_speed_is_named_below():
    table = bare(lengths=(LengthScore(32, 1, 2.9, 0.3),))
    assert any("No speed or no loss: none." in text for text in words(speed_against_quality(table)))
    with_speed = ResultTable({}, "none", 32, table.runs, {"none": Speed(None, 1.0, 1.0, 1.0)})
    assert any("No speed or no loss: none." in text for text in words(speed_against_quality(with_speed)))


# --- labels ----------------------------------------------------------------------------------------------------------


def test_spread_labels_keep_order_distance_and_bounds():
    draw = random.Random(0)
    for count in (1, 2, 5, 13):
        wanted = [draw.uniform(-0.2, 1.2) for _ in range(count)]
        places = spread_apart(wanted, 0.06, 0.0, 1.0)
        assert all(0 <= place <= 1 + 1e-9 for place in places)
        order = sorted(range(count), key=lambda i: wanted[i])
        gaps = [places[b] - places[a] for a, b in itertools.pairwise(order)]
        assert all(gap >= 0.06 - 1e-9 for gap in gaps)
    assert spread_apart([0.2, 0.5, 0.9], 0.1, 0.0, 1.0) == pytest.approx([0.2, 0.5, 0.9])  # nothing moves without need
    assert spread_apart([0.5, 0.5], 0.1, 0.0, 1.0) == pytest.approx([0.45, 0.55])
    assert spread_apart([0.5] * 5, 0.5, 0.0, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1])  # too many: the gap shrinks
    assert spread_apart([], 0.1, 0.0, 1.0) == []


def test_point_labels_stay_apart_when_there_is_room():
    points = [(50.0, 50.0), (58.0, 50.0), (54.0, 57.0), (160.0, 90.0)]
    widths = [40.0, 30.0, 35.0, 25.0]
    corners = place_around(points, widths, 8.0, (300.0, 200.0))
    boxes = [(x, y, x + width, y + 8.0) for (x, y), width in zip(corners, widths, strict=True)]
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
    assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= 300 and box[3] <= 200 for box in boxes)


def test_names_at_line_ends_do_not_overlap():
    figure = loss_by_step(make_table(tuple(PROFILES), (0,)), TWO_COLUMN)
    FigureCanvasAgg(figure).draw()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without their leaders
    bottoms = sorted(box.y0 for box in boxes)
    assert len(boxes) == 20
    assert min(b - a for a, b in itertools.pairwise(bottoms)) > 0.7 * min(box.height for box in boxes)
    assert max(box.x1 for box in boxes) <= figure.bbox.x1 + 1


# --- style -----------------------------------------------------------------------------------------------------------


def test_known_encodings_have_the_same_mark_in_every_table():
    alone = {label: marks([label])[label] for label in SLOTS}
    together = marks(["huang_m4 clip=8", "zzz", "none", *reversed(list(SLOTS))])
    assert all(together[label] == alone[label] for label in SLOTS)
    assert len({(mark.color, str(mark.dash)) for mark in together.values()}) == len(together)
    assert together["none"].color == NONE_COLOR


def test_a_variant_shares_the_hue_of_its_relative_and_not_its_dash():
    found = marks(["huang_m4", "huang_m4 clip=8"])
    assert found["huang_m4"].color == found["huang_m4 clip=8"].color
    assert found["huang_m4"].dash != found["huang_m4 clip=8"].dash


def test_more_labels_than_marks_still_draw():
    labels = [f"variant {k}" for k in range(50)]
    assert len(marks(labels)) == 50


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_series_colors_stand_out_from_their_ground(dark):
    for color in (*COLORS, NONE_COLOR):
        ground, shown = (DARK[PAPER], DARK[color]) if dark else (PAPER, color)
        assert contrast(shown, ground) >= 4.5, f"{shown} on {ground}"


def linear(color: str) -> np.ndarray:
    parts = np.array([int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB under D65."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 1e-4, 1) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
def test_hues_differ_for_eyes_without_red_or_green_cones(dark):
    """Simulated with the linear-RGB matrices of Machado, Oliveira and Fernandes 2009 at full severity."""
    protan = np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0519]])
    deutan = np.array([[0.3673, 0.8606, -0.2279], [0.2803, 0.6727, 0.0469], [-0.0118, 0.0429, 0.9689]])
    shown = [DARK[color] if dark else color for color in COLORS]
    for matrix in (np.eye(3), protan, deutan):
        seen = [lab(matrix @ linear(color)) for color in shown]
        for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
            assert np.linalg.norm(one - other) > 15, f"{shown[i]} and {shown[j]} look alike"


def test_svg_is_text_reproducible_and_tagged():
    table = make_table()
    one, other = to_svg(loss_by_length(table)), to_svg(loss_by_length(table))
    assert one == other and "<dc:date>" not in one
    root = ElementTree.fromstring(one)
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"huang_m4", "tisa", "none", "Window length (tokens)"} <= texts
    ids = {element.get("id", "") for element in root.iter()}
    for index in range(len(table.encodings)):
        assert any(name.startswith(f"series-{index}-") for name in ids)


def test_drawing_leaves_settings_and_pyplot_alone():
    before = dict(matplotlib.rcParams)
    for plot in PLOTS:
        to_svg(plot(make_table()))
    assert dict(matplotlib.rcParams) == before
    for path in Path(locant.plots.__file__).parent.glob("*.py"):
        assert "pyplot" not in path.read_text(encoding="utf-8").split('"""', 2)[2], f"{path.name} uses pyplot"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_save_writes_by_suffix(tmp_path, suffix, start):
    path = save(loss_by_shift(make_table(), ONE_COLUMN), tmp_path / "new" / f"figure.{suffix}")
    assert path.read_bytes().startswith(start) and [item.name for item in path.parent.iterdir()] == [path.name]


def test_save_refuses_other_suffixes_and_leaves_nothing_behind(tmp_path, monkeypatch):
    figure = loss_by_shift(make_table(), ONE_COLUMN)
    with pytest.raises(ValueError, match=r"'a\.gif' ends in '\.gif'"):
        save(figure, tmp_path / "a.gif")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        save(figure, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_shorten_keeps_the_limit():
    assert shorten("huang_m4", 15) == "huang_m4"
    assert shorten("huang_m4 with a long name", 12) == "huang_m4 wi…"
