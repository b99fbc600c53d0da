"""The report page: whole, self-contained, escaped, accessible, and the same in a real browser at two widths."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

import locant.report
from locant.compare.conclusions import conclusions
from locant.compare.results import ResultTable, RunResult
from locant.plots import figures
from locant.plots.style import DARK
from locant.report import render, write_report
from tests.browser import Page, browse
from tests.compare_tables import PROFILES, make_table

BAD = "<script>alert(1)</script>&\"'"


def sparse_tables() -> dict[str, ResultTable]:
    return {
        "quickstart": make_table(broken={("tisa", 1)}),
        "one seed": make_table(("none", "tisa"), (4,)),
        "nothing": ResultTable({}, "none", 32, ()),
        "all failed": ResultTable({}, "none", 32, (RunResult("none", {}, 0, "failed", "loss was nan"),)),
        "all missing": ResultTable({}, "none", 32, (RunResult("none", {}, 0, "missing"),)),
    }


def hostile() -> ResultTable:
    table = make_table(("none", "tisa"), (0, 1))
    runs = tuple(dataclasses.replace(run, encoding=run.encoding + BAD, options={BAD: BAD}) for run in table.runs)
    runs += (RunResult("rope" + BAD, {}, 0, "failed", "why " + BAD),)
    return dataclasses.replace(
        table,
        recipe={"name": BAD, BAD: [BAD]},
        baseline="none" + BAD,
        runs=runs,
        speeds={label + BAD: speed for label, speed in table.speeds.items()},
        environment={"hardware": {BAD: BAD}, "date": BAD, "commit": None},
    )


@pytest.fixture(scope="module")
def twenty() -> str:
    return render(make_table(tuple(PROFILES), (0, 1, 2), broken={("t5", 1)}))


@pytest.mark.parametrize("name", sparse_tables())
def test_every_table_gives_a_whole_page(name):
    table = sparse_tables()[name]
    check_page(render(table), len(figures(table)))


def test_figures_with_nothing_to_show_are_left_out():
    table = make_table()
    assert list(figures(table)) == ["loss_by_step", "loss_by_length", "loss_by_shift", "speed_against_quality"]
    trained = [score for score in table.runs[0].lengths if score.factor == 1]
    bare = tuple(dataclasses.replace(run, lengths=tuple(trained), shifts=()) for run in table.runs)
    table = dataclasses.replace(table, runs=bare, speeds={})
    assert list(figures(table)) == ["loss_by_step"]
    text = render(table)
    check_page(text, 1)
    assert "under shifted ids" not in text and "under shifted ids" in render(make_table())


def test_twenty_encodings_give_a_whole_page_under_two_megabytes(twenty):
    check_page(twenty)
    assert len(twenty.encode()) < 2_000_000


def check_page(text: str, count: int = 4) -> None:
    page = Page(text)
    assert text.lower().startswith("<!doctype html>") and page.all("html") == [{"lang": "en"}]
    ids = page.values("id")
    assert len(ids) == len(set(ids)), f"ids used twice: {sorted({one for one in ids if ids.count(one) > 1})}"
    for target in [*page.values("href"), *page.values("xlink:href")]:
        assert target.startswith("#") and target[1:] in ids, f"{target} leads nowhere"
    for target in re.findall(r"url\(([^)]*)\)", text):
        assert target.startswith("#") and target[1:] in ids, f"url({target}) leads nowhere"
    for target in page.values("aria-labelledby"):
        assert target in ids
    assert not re.search(r"https?:|src=|@import|<link|<iframe|xmlns", text), "the page refers to something outside"
    assert len(page.all("figure")) == len(page.all("figcaption")) == count
    drawings = page.all("svg")
    assert len(drawings) == 2 * count and all(svg["role"] == "img" and svg["aria-label"] for svg in drawings)
    captions = [content for tag, content in page.text if tag == "figcaption"]
    assert all(caption.endswith(".") and caption.count(". ") == 0 for caption in captions)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(head.get("scope") for head in page.all("th"))
    assert all(box.get("tabindex") == "0" and box.get("aria-label") for box in page.all("div") if box.get("role"))


def test_the_page_says_the_conclusions_and_what_was_run(twenty):
    table = make_table(tuple(PROFILES), (0, 1, 2), broken={("t5", 1)})
    said = " ".join(content for _, content in Page(twenty).text)
    for sentence in conclusions(table):
        assert sentence in said
    for part in ("locant compare recipes/invented.toml", "0123abcd", "Invented CPU, 2 cores", "2.13.0", "train.steps"):
        assert part in said
    assert "<dt>train.<wbr>steps</dt>" in twenty
    assert "loss was nan at step 612" in said and "clearly better" in said and "2 of 3" in said
    headings = [content for tag, content in Page(twenty).text if tag == "h2"]
    assert headings == ["The answer", "Table", "Plots", "Cost", "What was run", "Limits"]


def test_losers_are_shown_as_losers():
    table = make_table(("none", "sinusoidal", "tisa"), (0, 1))
    flipped = render(dataclasses.replace(table, baseline="tisa"))
    assert "clearly worse" in flipped and re.search(r'<td class="worse"[^>]*>\+1\.', flipped)


def test_whatever_a_recipe_or_label_holds_is_text_on_the_page():
    text = render(hostile())
    check_page(text)
    assert "<script>alert" not in text and "alert(1)&lt;/script&gt;" in text
    assert len(Page(text).all("script")) == 1


def test_a_page_is_written_whole_or_not_at_all_and_reproducibly(tmp_path, monkeypatch):
    table = make_table(("none",), (0, 1))
    path = write_report(table, tmp_path / "deep" / "report.html")
    before = path.read_bytes()
    assert path.name == "report.html" and before == render(table).encode()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(make_table(("none",), (0,)), path)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


# --- colors ----------------------------------------------------------------------------------------------------------


def contrast(one: str, other: str) -> float:
    def light(color: str) -> float:
        parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


def test_text_stands_out_from_its_ground_in_both_schemes():
    style = (Path(locant.report.__file__).parent / "page.css").read_text(encoding="utf-8")
    schemes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{([^}]*)\}", style)]
    assert len(schemes) == 2 and schemes[0].keys() == schemes[1].keys()
    for scheme in schemes:
        for ink in ("ink", "soft", "accent", "better", "worse"):
            for ground in ("card", "ground", "open-ground"):
                assert contrast(scheme[ink], scheme[ground]) >= 4.5, f"{ink} on {ground} in {scheme}"


def test_every_color_of_the_figures_follows_the_scheme(twenty):
    drawings = "".join(re.findall(r"<svg.*?</svg>", twenty, flags=re.DOTALL))
    loose = set(re.findall(r"(?<![,\w(] )(?:fill|stroke): (#[0-9a-f]{6})", drawings))
    assert loose == set(), f"colors that stay the same in the dark: {loose}"
    for color in re.findall(r"var\(--c-(\w{6})", drawings):
        assert f"#{color}" in DARK


# --- a real browser --------------------------------------------------------------------------------------------------

PROBE = """
function probe(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement, seen = {};
  seen.client = root.clientWidth;
  seen.scroll = root.scrollWidth;
  seen.wide = view.getComputedStyle(page.querySelector(".wide")).display;
  seen.narrow = view.getComputedStyle(page.querySelector(".narrow")).display;
  seen.background = view.getComputedStyle(page.body).backgroundColor;
  const box = page.querySelector('[data-toggle="3"]');
  box.click();
  const parts = [...page.querySelectorAll('[data-series="3"]')];
  seen.parts = parts.length;
  seen.hidden = parts.every((part) => view.getComputedStyle(part).display === "none");
  seen.others = [...page.querySelectorAll('[data-series="1"]')].some((part) => part.style.display === "none");
  box.click();
  seen.back = parts.every((part) => part.style.display === "");
  const table = page.querySelector("table.sortable"), head = table.tHead.rows[0].cells[1];
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].dataset.value);
  seen.before = names();
  head.querySelector("button").click();
  head.querySelector("button").click();
  seen.sort = head.getAttribute("aria-sort");
  seen.after = names();
  return seen;
}
"""


def test_a_browser_shows_the_page_at_phone_and_desktop_width(tmp_path, twenty):
    seen = browse(tmp_path, twenty, PROBE)
    assert "error" not in seen and not seen["console"], seen
    phone, desktop = seen["w360"], seen["w1280"]
    assert phone["client"] == 360 and phone["scroll"] == 360, "the page scrolls sideways on a phone"
    assert desktop["scroll"] == desktop["client"] == 1280
    assert (phone["wide"], phone["narrow"]) == ("none", "block")
    assert (desktop["wide"], desktop["narrow"]) == ("block", "none")
    for view in (phone, desktop):
        assert view["parts"] >= 8 and view["hidden"] and view["back"] and not view["others"]
        assert view["sort"] == "descending" and view["after"] == view["before"][::-1]
        assert view["background"] == "rgb(244, 246, 248)"


def test_a_browser_in_dark_mode_gets_a_dark_page(tmp_path, twenty):
    seen = browse(tmp_path, twenty, PROBE, "--blink-settings=preferredColorScheme=0")
    assert seen["w360"]["background"] == seen["w1280"]["background"] == "rgb(13, 17, 23)"


def test_hostile_labels_do_not_widen_the_page_or_run(tmp_path):
    table = make_table(("none", "tisa"), (0, 1))
    long = "an_encoding_with_a_name_of_many_letters_" * 5
    runs = tuple(
        dataclasses.replace(run, encoding=f"{run.encoding} {BAD}{long}", options={"o": long}) for run in table.runs
    )
    runs += tuple(RunResult(f"filler {k}", {}, 0, "failed", long) for k in range(2))
    named = dataclasses.replace(table, runs=runs, baseline=f"none {BAD}{long}", speeds={}, recipe={long: long})
    seen = browse(tmp_path, render(named), PROBE)
    assert "error" not in seen and not seen["console"], seen
    assert seen["w360"]["scroll"] == 360 and seen["w1280"]["scroll"] == 1280
