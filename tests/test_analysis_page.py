"""The page of an analysis: whole, self-contained, true to the numbers, and alive in a real browser at two widths."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy
import pytest
import torch

from locant.analysis import Analysis, Course, analyze, plain
from locant.analysis.course import Checkpoint, Correlation
from locant.analysis.distance import by_distance, uniform_distance
from locant.analysis.kernels import fit_kernels
from locant.analysis.locality import locality, uniform_locality
from locant.analysis.patterns import HeadPattern, LayerPatterns, Patterns
from locant.analysis.phase_shift import shift_matrix
from locant.analysis.translation_invariance import TranslationInvariance
from locant.plots import (
    ONE_COLUMN,
    TWO_COLUMN,
    analysis_figures,
    invariance_over_training,
    similarity_of_positions,
    to_svg,
    tuned_and_tested,
)
from locant.report import render_analysis, write_analysis_page
from locant.report.analysis_data import SOURCES, pack, page_data, rounded
from locant.report.analysis_findings import findings, number
from locant.report.analysis_tables import TABLES, analysis_tables
from tests.analysis_models import family
from tests.browser import Page, browse, photograph
from tests.hf_models import tokens

BAD = "<script>alert(1)</script>&\"'</script>"
FAST = ("translation_invariance", "correlations", "patterns", "distance", "phase_shift", "locality", "table")


@pytest.fixture(scope="module")
def bert() -> Analysis:
    return analyze(family("bert-mlm"), windows=tokens(12, 17), name="tiny-bert")


@pytest.fixture(scope="module")
def llama() -> Analysis:
    return analyze(family("llama"), windows=tokens(5, 17), only=FAST, name="tiny-llama")


@pytest.fixture(scope="module")
def run(bert) -> Analysis:
    counts = ({"whole": 6}, {"whole": 4, "local": 2}, {"whole": 1, "local": 3, "previous": 2})
    points = tuple(
        Checkpoint(
            100 * at,
            r2=0.1 + 0.2 * at,
            heads_null=0.1,
            words_r2=r2,
            words_null=0.2,
            attention=counts[at],
            loss=3.5 - at,
        )
        for at, r2 in enumerate((None, 0.25, 0.75))
    )
    course = Course(17, points, {"r2": Correlation(-1.0, -0.875, 3), "words_r2": Correlation(None, None, 2)})
    return dataclasses.replace(bert, over_training=course)


@pytest.fixture(scope="module")
def both(bert, llama) -> str:
    return render_analysis([bert, llama], environment={"date": "2031-02-03T04:05", "command": "locant analyze x"})


def data_of(text: str) -> list[dict]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def large(bert: Analysis, layers: int = 12, heads: int = 12, n: int = 128) -> Analysis:
    """An analysis of the size of BERT-base with a position bias in every layer, filled with noise."""
    noise = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=noise, dtype=torch.float64)

    offsets, pattern = torch.arange(-40, 41), HeadPattern("local", *[1 / 3] * 7)
    assert (
        bert.distance and bert.translation_invariance and bert.translation_invariance.position_table and bert.locality
    )
    distance = dataclasses.replace(
        bert.distance,
        offsets=offsets,
        counts=torch.ones(81, dtype=torch.long),
        mean=rand(layers, heads, 81),
        mass=rand(layers, heads, 81),
        mean_distance=rand(layers, heads),
        maps=rand(layers, heads, 48, 48).float(),
    )
    one = dataclasses.replace(
        bert.translation_invariance.heads[0],
        offsets=offsets,
        **{key: rand(heads) for key in ("r2", "r2_off_diagonal", "null_shuffled", "spread")},
        profile=rand(heads, 81),
        maps=rand(heads, 64, 64),
    )
    sources = [(0, source) for source in SOURCES if source != "terms"] + [(layer, "terms") for layer in range(layers)]
    listed = tuple(dataclasses.replace(one, layer=layer, source=source) for layer, source in sources)
    raw = bert.translation_invariance.position_table.raw
    wide = dataclasses.replace(raw, offsets=torch.arange(-511, 512), profile=rand(1023), map=rand(128, 128))
    table = dataclasses.replace(
        bert.translation_invariance.position_table, raw=wide, layernorm=wide, layernorm_meanword=wide
    )
    words = dataclasses.replace(bert.locality.identical_words, map=rand(n, n), length=n)
    named = tuple(LayerPatterns(layer, "attention", (pattern,) * heads) for layer in range(layers))
    return dataclasses.replace(
        bert,
        model=dataclasses.replace(bert.model, num_layers=layers, num_heads=heads, name="large"),
        length=n,
        distance=distance,
        patterns=Patterns(n, named, named),
        translation_invariance=TranslationInvariance(table, listed, bert.translation_invariance.kernels),
        locality=dataclasses.replace(bert.locality, identical_words=words),
    )


# --- structure -------------------------------------------------------------------------------------------------------


def check_page(text: str) -> Page:
    page = Page(text)
    assert text.lower().startswith("<!doctype html>") and page.all("html") == [{"lang": "en"}]
    ids = page.values("id")
    assert len(ids) == len(set(ids)), f"ids used twice: {sorted({one for one in ids if ids.count(one) > 1})}"
    for target in page.values("href"):
        assert target.startswith("#") and target[1:] in ids, f"{target} leads nowhere"
    for target in page.values("aria-labelledby"):
        assert target in ids
    assert not re.search(r"https?:|src=|@import|<link|<iframe|xmlns|url\(", text), (
        "the page refers to something outside"
    )
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(head.get("scope") for head in page.all("th"))
    return page


def test_a_page_of_one_and_of_two_models_is_whole(bert, llama, run, both):
    for text in (both, render_analysis([bert]), render_analysis([llama]), render_analysis([run, llama])):
        page = check_page(text)
        captions = re.findall(r"<figcaption>(.*?)</figcaption>", text, flags=re.DOTALL)
        assert len(page.all("figure")) == len(captions) >= 8
        assert all("<b>Held against:</b>" in caption for caption in captions[1:]), "a figure lacks its control"
        panels = {panel["data-panel"] for panel in page.all("div") if panel.get("data-panel")}
        script = re.search(r"const panels = \{(.*?)\n\};", text, flags=re.DOTALL)
        assert script is not None and panels <= set(re.findall(r"^  (\w+)\(model", script[1], flags=re.MULTILINE))
    assert "tiny-bert and tiny-llama do" in both and "2031-02-03" in both


def test_what_did_not_run_has_no_section_and_its_reason(bert, llama):
    alone = render_analysis([llama])
    assert 'id="positions"' not in alone and 'id="probes"' not in alone and 'id="figure-map"' in alone
    assert "not run: the model adds no position vectors to its input" in alone
    bare = Analysis(bert.model, 17, 0, table=bert.table, skipped={"probe": "needs text"})
    page = check_page(render_analysis([bare]))
    assert {"figure-axes", "positions"} <= set(page.values("id")) and "treatment" not in page.values("id")
    assert "figure-map" not in page.values("id")


def test_every_number_to_cite_stands_beside_its_control(bert, llama, both):
    said = " ".join(content for _, content in Page(both).text)
    for finding in [*findings(bert), *findings(llama)]:
        assert finding.measure in said and finding.value in said and finding.control in said
        assert finding.value in finding.sentence and finding.sentence.endswith(".")
    assert bert.translation_invariance and bert.translation_invariance.position_table
    raw = bert.translation_invariance.position_table.raw
    assert raw.r2 is not None and f"{raw.r2:.3f}" in said and f"{raw.null:.3f}" in said
    assert {finding.protocol for finding in findings(bert)} == {
        *("translation_invariance", "correlations", "patterns", "distance", "phase_shift", "locality", "probe", "table")
    }


def test_numbers_are_written_for_people():
    assert number(0.12345) == "0.123" and number(-0.5, 1) == "\N{MINUS SIGN}0.5" and number(0.0) == "0.000"
    assert number(None) == number(math.nan) == "undefined"
    assert number(0.00001234) == "1.23e\N{MINUS SIGN}05" and number(3.4e9) == "3.40e+09"


def test_maps_are_stored_true_to_one_step(bert):
    assert bert.distance is not None
    maps = bert.distance.maps[1].double()
    for power in (1.0, 0.5):
        packed = pack(maps, power)
        cells = torch.tensor(list(base64.b64decode(packed["bytes"])), dtype=torch.float64).view(maps.shape)
        low, high = (torch.tensor(packed[key], dtype=torch.float64)[:, None, None] for key in ("low", "high"))
        back = low + (high - low) * (cells / 255) ** (1 / power)
        assert float((back - maps).abs().max()) < 1.2 * float((high - low).max()) / 255
    flat = pack(torch.full((2, 3, 3), 0.25))
    assert flat["low"] == flat["high"] == [0.25, 0.25]


def test_data_has_the_numbers_of_the_analysis(bert, llama, both):
    first, second = data_of(both)
    assert [view["id"] for view in first["views"]][:2] == ["attention", "layernorm_bias"]
    assert [view["id"] for view in second["views"]] == ["attention"] and second["table"] is None
    assert bert.distance is not None and bert.probe is not None and bert.translation_invariance is not None
    assert first["views"][0]["layers"]["1"]["curve"] == rounded(bert.distance.mean[1])
    seen = next(one for one in bert.translation_invariance.heads if one.source == "layernorm_bias")
    assert first["views"][1]["layers"]["0"]["r2"] == pytest.approx(seen.r2.tolist(), rel=1e-4)
    assert first["views"][1]["layers"]["0"]["patterns"][2]["label"] is not None
    assert first["probe"]["distance"] == pytest.approx(bert.probe.distance.tolist(), rel=1e-4)
    assert second["skipped"].keys() == {"translation_invariance", "correlations", "table"}
    assert page_data(llama)["shift"]["relative"] is True and page_data(llama)["shift"]["control"] is True


def test_rounding_keeps_five_digits_and_leaves_undefined_open():
    assert rounded({"a": (1.23456789, math.nan, 3, None, "x")}) == {"a": [1.2346, None, 3, None, "x"]}


def test_a_model_of_twelve_layers_stays_under_five_megabytes(bert):
    text = render_analysis([large(bert)])
    check_page(text)
    assert len(data_of(text)[0]["views"]) == len(SOURCES) + 1
    assert 1_000_000 < len(text.encode()) < 5_000_000


def test_whatever_a_name_or_a_reason_holds_is_text(bert):
    hostile = dataclasses.replace(
        bert, model=dataclasses.replace(bert.model, name=BAD, positions=BAD), skipped={"probe": BAD}, probe=None
    )
    text = render_analysis([hostile, hostile], environment={BAD: BAD})
    page = check_page(text)
    assert "<script>alert" not in text and len(page.all("script")) == 2
    assert [one["name"] for one in data_of(text)] == [f"{BAD} (1)", f"{BAD} (2)"]


def test_a_page_takes_one_or_two_analyses(bert):
    with pytest.raises(ValueError, match="got 3 analyses, needed 1, or 2"):
        render_analysis([bert] * 3)


def test_a_page_is_written_whole_or_not_at_all(bert, tmp_path, monkeypatch):
    path = write_analysis_page([bert], tmp_path / "deep" / "index.html")
    before = path.read_bytes()
    assert before == render_analysis([bert]).encode()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_analysis_page([bert, bert], path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


# --- controls, tables, figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_what_equal_weights_give_is_what_the_protocols_measure_on_them(causal):
    n = 11
    weights = torch.ones(n, n, dtype=torch.float64)
    weights = weights.tril() if causal else weights
    weights = weights / weights.sum(-1, keepdim=True)
    assert locality(weights) == pytest.approx(uniform_locality(n, causal=causal), rel=1e-12)
    found = by_distance(weights[None, None], causal=causal).mean_distance
    assert found.tolist() == pytest.approx([uniform_distance(n, causal=causal)], rel=1e-12)


def test_tables_hold_every_digit_of_both_models(bert, llama):
    tables = analysis_tables([bert, llama])
    assert tables.keys() == TABLES.keys() - {"companions", "over_training"}  # no relative encoding, no run
    rows = list(csv.DictReader(io.StringIO(tables["mean_distance"])))
    assert bert.distance and llama.distance
    want = [x for one in (bert, llama) for layer in plain(one.distance.mean_distance) for x in layer]
    assert [float(row["mean_distance"]) for row in rows] == want
    assert [row["model"] for row in rows] == ["tiny-bert"] * 6 + ["tiny-llama"] * 12
    ahead = [
        row
        for row in csv.DictReader(io.StringIO(tables["attention_by_distance"]))
        if row["model"] == "tiny-llama" and int(row["offset"]) > 0
    ]
    assert len(ahead) == 12 * 16 and {(row["count"], row["mean"], row["mass"]) for row in ahead} == {("0", "", "0.0")}


def test_every_result_has_its_figure_at_both_widths(bert, llama):
    names = {
        *("similarity_of_positions", "scoring_functions", "word_position_maps", "patterns_of_heads"),
        *("attention_by_offset", "drift_by_shift", "locality_by_layer", "probe_by_layer", "spectrum_of_table"),
    }
    assert analysis_figures(bert).keys() == names
    assert analysis_figures(llama).keys() == {
        *("patterns_of_heads", "attention_by_offset", "drift_by_shift", "locality_by_layer")
    }
    for width in (ONE_COLUMN, TWO_COLUMN):
        for name, figure in analysis_figures(bert, width).items():
            assert figure.get_size_inches()[0] == width
            svg = to_svg(figure)
            ElementTree.fromstring(svg)
            assert "<text" in svg, f"the words of {name} are no text"


def test_figures_draw_the_numbers(bert):
    figures = analysis_figures(bert)
    assert bert.probe and bert.phase_shift and bert.translation_invariance
    lines = figures["probe_by_layer"].axes[0].lines
    assert list(lines[0].get_ydata()) == bert.probe.distance.tolist()
    assert list(lines[2].get_ydata()) == [bert.probe.chance] * 2
    drawn = [list(line.get_ydata()) for line in figures["drift_by_shift"].axes[0].lines]
    assert bert.phase_shift.drift.cosine[:, 2].tolist() in drawn
    titles = [axes.get_title() for axes in figures["similarity_of_positions"].axes]
    assert any("random rows 0.453" in title for title in titles)
    bare = TranslationInvariance(None, bert.translation_invariance.heads, ())
    with pytest.raises(ValueError, match="position_table=None"):
        similarity_of_positions(bare)


def test_scoring_functions_are_drawn_with_their_fit(bert):
    heads = bert.translation_invariance.heads
    one = next(head for head in heads if head.source == "layernorm_bias")
    kernels = fit_kernels(one.profile, layer=0, source="layernorm_bias")
    figure = analysis_figures(
        dataclasses.replace(bert, translation_invariance=TranslationInvariance(None, heads, (kernels,)))
    )
    first = figure["scoring_functions"].axes[0].lines
    assert list(first[0].get_ydata()) == one.profile[0].tolist()
    assert list(first[1].get_ydata()) == kernels.scores(one.offsets)[0].tolist()


def test_a_course_is_drawn_with_and_without_losses():
    points = tuple(
        Checkpoint(step, r2=0.1 * step, heads_r2=0.2 * step, loss=loss)
        for step, loss in ((1, 3.0), (2, 2.5), (3, None))
    )
    figure = invariance_over_training(Course(9, points, {"heads_r2": Correlation(-1.0, -0.75, 3)}))
    assert list(figure.axes[0].lines[1].get_ydata()) == pytest.approx([0.2, 0.4, 0.6])
    assert "-0.750" in figure.axes[1].get_title() and len(figure.axes) == 2
    without = tuple(dataclasses.replace(point, loss=None) for point in points)
    assert len(invariance_over_training(Course(9, without, {})).axes) == 1


def test_a_run_has_its_course_in_figures_tables_numbers_and_on_the_page(run):
    figure = analysis_figures(run)["invariance_over_training"]
    heads = {line.get_label(): list(line.get_ydata()) for line in figure.axes[2].lines}
    assert heads == {"previous": [0, 0, 2], "whole": [6, 4, 1], "local": [0, 2, 3]}
    rows = list(csv.DictReader(io.StringIO(analysis_tables([run])["over_training"])))
    assert [(row["step"], row["words_r2"], row["attention_local"], row["loss"]) for row in rows] == [
        ("0", "", "0", "3.5"),
        ("100", "0.25", "2", "2.5"),
        ("200", "0.75", "3", "1.5"),
    ]
    assert rows[2]["position_logits_local"] == "", "patterns that nobody looked for are not 0"
    told = [finding for finding in findings(run) if finding.protocol == "over_training"]
    assert [finding.value for finding in told] == ["0.500", "0.750"]
    assert "step 0: 0.100; Spearman with the loss −0.875, n = 3" == told[0].control
    assert "no independent samples" in told[0].sentence
    data = page_data(run)["course"]
    assert data["steps"] == [0, 100, 200] and data["by"] == "measured attention" and data["heads"] == 6
    assert data["patterns"] == {"local": [0, 2, 3], "previous": [0, 0, 2], "whole": [6, 4, 1]}


def test_the_matrix_of_shifts_is_drawn_as_it_is():
    found = shift_matrix(lambda k, seed: (k, seed), lambda model, k: 0.5 - 0.01 * abs(model[0] - k), (0, 20), (0, 1))
    figure = tuned_and_tested(found)
    axes = figure.axes[0]
    assert (
        numpy.asarray(axes.images[0].get_array()).tolist() == found.mean.tolist()
        and axes.get_ylabel() == "trained at shift"
    )
    assert [text.get_text() for text in axes.texts][:2] == ["0.500\n±0.000", "0.300\n±0.000"]
    assert axes.get_title() == "mean of 2 seeds"


def test_the_course_of_a_run_follows_the_step(tmp_path, run, llama):
    look = """function probe(frame) {
      const page = frame.contentDocument, view = frame.contentWindow, seen = {};
      const panel = (name, model) => page.querySelector(`[data-panel="${name}"][data-model="${model}"]`);
      const said = (name) => panel(name, 0).querySelector("[data-number]").textContent;
      seen.last = ["course", "losses", "kinds"].map(said);
      const step = page.getElementById("step");
      seen.steps = step.max;
      step.value = 1;
      step.dispatchEvent(new view.Event("input", { bubbles: true }));
      seen.middle = ["course", "losses", "kinds"].map(said);
      seen.beside = panel("course", 1).textContent;
      seen.lines = panel("course", 0).querySelectorAll("path").length;
      return seen;
    }"""
    seen = browse(tmp_path, render_analysis([run, llama]), look)
    assert "error" not in seen and seen["console"] == [], seen
    for width in (360, 1280):
        view = seen[f"w{width}"]
        assert view["last"][0].startswith("attention on one repeated word, step 200: 0.750 (step 0: undefined")
        assert view["last"][1] == "step 200: 1.500 (step 0: 3.500)" and view["steps"] == "2"
        assert view["last"][2] == "step 200: 2 previous, 1 whole, 3 local (by measured attention; 6 heads)"
        assert view["middle"][0].startswith("attention on one repeated word, step 100: 0.250")
        assert view["middle"][1].startswith("step 100: 2.500") and "4 whole, 2 local" in view["middle"][2]
        assert "Not a run with checkpoints" in view["beside"] and view["lines"] == 2


def test_an_analysis_of_five_tokens_has_its_page_figures_and_tables():
    short = analyze(family("bert-mlm"), windows=tokens(9, 5))
    said = " ".join(content for _, content in check_page(render_analysis([short])).text)
    assert "patterns of heads, measured attention 6 too short to tell" in said
    assert analysis_figures(short).keys() >= {"attention_by_offset"}
    assert ",," in analysis_tables([short])["patterns"]


def test_windows_that_fill_the_table_have_no_shift_to_show(tmp_path, bert, llama):
    shift, scored = bert.phase_shift, llama.phase_shift.perplexity
    assert shift is not None and len(shift.shifts) > 1 and scored is not None
    drift = dataclasses.replace(shift.drift, cosine=shift.drift.cosine[:1], l2=shift.drift.l2[:1])
    first = {key: getattr(scored, key)[:1] for key in ("mean", "per_text", "mean_rank", "delta")}
    only = dataclasses.replace(shift, shifts=(0,), drift=drift, perplexity=dataclasses.replace(scored, **first))
    still = dataclasses.replace(bert, phase_shift=only)
    assert [one for one in findings(still) if one.protocol == "phase_shift"] == []
    look = """function probe(frame) {
      const panel = (name) => frame.contentDocument.querySelector(`[data-panel="${name}"]`);
      return { drift: panel("drift").textContent, scores: panel("scores").textContent };
    }"""
    seen = browse(tmp_path, render_analysis([still]), look)
    assert "error" not in seen and seen["console"] == [], seen
    want = "Windows of 17 tokens fill the table of this model, so no shift fits; analyze shorter windows (--length)."
    assert seen["w360"]["drift"] == want and seen["w1280"]["scores"].startswith(
        want + "causal perplexity where it is: "
    )


# --- a real browser --------------------------------------------------------------------------------------------------

PROBE = (Path(__file__).parent / "analysis_probe.js").read_text(encoding="utf-8")


def test_controls_change_what_is_drawn_at_phone_and_desktop_width(tmp_path, both):
    seen = browse(tmp_path, both, PROBE)
    assert "error" not in seen and seen["console"] == [], seen
    for width in (360, 1280):
        view = seen[f"w{width}"]
        assert view["scroll"] == view["client"] == width, "the page scrolls sideways"
        assert view["cut"] == 0, "numbers to cite are cut off"
        assert view["names"] == (['"tiny-bert"', '"tiny-llama"'] if width == 360 else ["none", "none"])
        assert view["wide"] == 0 and view["unreachable"] == 0 and view["unnamed"] == 0
        assert view["background"] == "rgb(244, 246, 248)" and view["empty"] == []
        assert view["heads"] == [6, 12] and "position table" in view["missing"]
        for action in ("click", "arrow", "offset", "tint", "view", "treatment", "expansion", "shift", "probed", "read"):
            assert all(view[action]), f"{action} left a drawing as it was: {view[action]}"
        assert view["chosen"].startswith("Layer 1, head 1;") and view["focus"].startswith("layer 1, head 0")
        assert view["edge"] == [False]
        assert view["disabled"] == 3 and "has no such logits" in view["nothing"]


def test_a_browser_in_dark_mode_gets_a_dark_page(tmp_path, bert):
    look = """function probe(frame) {
      const canvas = frame.contentDocument.querySelector('[data-panel="repeated"] canvas');
      const cells = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      let light = 0;
      for (let k = 0; k < cells.length; k += 4) light = Math.max(light, cells[k] + cells[k + 1] + cells[k + 2]);
      const view = frame.contentWindow;
      return { ground: view.getComputedStyle(frame.contentDocument.body).backgroundColor, light };
    }"""
    page = render_analysis([bert])
    dark = browse(tmp_path, page, look, "--blink-settings=preferredColorScheme=0")
    assert dark["console"] == [] and dark["w360"]["ground"] == dark["w1280"]["ground"] == "rgb(13, 17, 23)"
    assert dark["w360"]["light"] > 600, "the strongest cell is light on a dark ground"


@pytest.mark.parametrize("width", [390, 1280])
def test_pictures_of_the_page_are_not_blank(tmp_path, both, width):
    from PIL import Image

    with Image.open(photograph(tmp_path, both, width)) as picture:
        assert picture.size == (width, 2000)
        colors = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colors is not None and len(colors) > 200
    assert max(count for count, _ in colors) < 0.9 * width * 2000
