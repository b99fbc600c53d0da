"""The page of a run: scores, seeds, curves and settings; self-contained, escaped, and narrow enough for a phone."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from locant.finetune.results import Outcome, SeedResult
from locant.pretrain.run import Pretrained
from locant.report import RunPage, render_run, write_run_page
from locant.report.finetune_page import finetune_page, write_finetune_page
from locant.report.pretrain_page import pretrain_page, write_pretrain_page
from tests.browser import Page, browse
from tests.test_curves import steps, write_log

BAD = "<script>alert(1)</script>&\"'"


def outcome(label: str, values: list[float], reason: str | None = None) -> Outcome:
    runs = [SeedResult(seed, {"dev": {"accuracy": value}}, 9, 0.5, 11.0, 3.0) for seed, value in enumerate(values, 1)]
    runs += [SeedResult(9, {}, 2, None, None, None, reason)] if reason else []
    return Outcome(
        task="glue/rte",
        label=label,
        recipe={"settings": {"learning_rate": 3e-5}, "data": [{"file": "train.tsv", "sha256": "f0"}]},
        environment={
            "hardware": {"processor": "an abacus"},
            "date": "2026-11-30T11:00:00",
            "command": "locant finetune x",
        },
        examples={"train": 37, "dev": 19},
        parameters={"model": 12345, "encodings": 67},
        baseline={"dev": {"accuracy": 0.5}},
        notices=("3 texts were cut",),
        runs=tuple(runs),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in (1, 2, 3):
        write_log(tmp_path / "runs" / f"seed{seed}", steps([0.9, 0.7, 0.5 + seed / 100]))
    return tmp_path


def check_page(text: str) -> Page:
    page = Page(text)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for target in [*page.values("href"), *page.values("aria-labelledby")]:
        assert target.lstrip("#") in ids, f"{target} leads nowhere"
    assert not re.search(r"https?:|src=|@import|<link|<iframe|xmlns", text), "the page refers to something outside"
    assert all(head.get("scope") for head in page.all("th"))
    assert len([tag for tag, _ in page.tags if tag == "h1"]) == 1
    return page


def test_the_page_has_scores_seeds_majority_differences_curves_and_settings(folder: Path) -> None:
    path = write_finetune_page(
        outcome("m4", [0.60, 0.62, 0.64], "loss is nan"), folder, [outcome("plain", [0.58, 0.6, 0.59])]
    )
    assert path == folder / "report.html"
    text = path.read_text(encoding="utf-8")
    page = check_page(text)
    cells = [content for tag, content in page.text if tag == "td"]
    assert cells == ["62.00 ± 2.00", "50.00", "60.00", "62.00", "64.00"]
    for words in (
        "dev accuracy against the majority class: +12.00 (95% interval +7.03 to +16.97), shown",
        "dev accuracy against plain: +3.00",
        "Seed 9 has no scores: loss is nan",
        "Note: 3 texts were cut",
        "3 of 4 seeds; examples: train 37, dev 19; parameters: 12,345 in the model, 67 in the encodings",
        "an abacus",
        "3e-05",
        "train.tsv",
        "locant finetune x",
    ):
        assert words in text, words
    drawings = page.all("svg")
    assert len(drawings) == 2 and all(svg["aria-label"] == "Line plot: glue/rte: m4, loss" for svg in drawings)


def test_curves_are_those_of_the_logs(folder: Path) -> None:
    page = finetune_page(outcome("m4", [0.6]), folder)
    assert [curve.losses for curve in page.curves] == [(0.9, 0.7, 0.5 + seed / 100) for seed in (1, 2, 3)]


def test_a_run_without_scores_or_logs_has_a_page_that_says_so(tmp_path: Path) -> None:
    text = write_finetune_page(outcome("m4", [], "loss is nan"), tmp_path).read_text(encoding="utf-8")
    page = check_page(text)
    assert "There are no scores." in text and "Seed 9 has no scores: loss is nan" in text
    assert page.all("svg") == []


def test_the_page_of_a_pre_training_run_has_its_losses_curves_and_recipe(tmp_path: Path) -> None:
    lines = [*steps([9.5, 8.25]), {"event": "validation", "step": 2, "tokens": 14, "loss": 8.125}]
    folder = write_log(tmp_path / "bert-tisa", lines)
    body = {
        "recipe": {"host": {"family": "bert", "num_layers": 5}, "encoding": {"label": "tisa"}},
        "parameters": {"all": {"model": 12345}},
        "environment": {"date": "2026-11-30T11:00:00", "commit": "0a1b2c"},
    }
    (folder / "run.json").write_text(json.dumps(body), encoding="utf-8")
    found = Pretrained(2, 14, 8.25, {"loss": 8.125}, 1234.5, 0.025, 61.0)
    text = write_pretrain_page(found, folder).read_text(encoding="utf-8")
    page = check_page(text)
    cells = [content for tag, content in page.text if tag == "td"]
    assert cells == ["8.2500", "8.1250", "1,234", "2.5%", "61"]
    for words in (
        "bert-tisa",
        "bert of 5 layers, width 128, 2 heads, with tisa; 2 steps, 14 tokens",
        "0a1b2c",
        "12345",
    ):
        assert words in text, words
    assert [curve.validation for curve in pretrain_page(found, folder).curves] == [False, True]
    failed = Pretrained(2, 14, None, {}, None, None, None, "loss is nan at step 3")
    assert "There is no model: loss is nan at step 3" in render_run(pretrain_page(failed, folder))


def test_whatever_a_label_or_setting_holds_is_text_on_the_page(folder: Path) -> None:
    plain = finetune_page(outcome("m4", [0.6, 0.7]), folder)
    hostile = RunPage(
        command=BAD,
        title=BAD,
        overview=BAD,
        head=(BAD, BAD),
        rows=((BAD, BAD),),
        sentences=(BAD,),
        curves=tuple(dataclasses.replace(curve, group=BAD) for curve in plain.curves),
        setting={BAD: [BAD]},
        environment={BAD: BAD},
    )
    text = render_run(hostile)
    assert "<script" not in text.lower()
    check_page(text)


def test_a_row_that_does_not_fit_its_head_is_refused(tmp_path: Path) -> None:
    page = RunPage("locant x", "t", "o", ("Score", "Mean"), (("loss", "1", "2"),), (), (), {}, {})
    with pytest.raises(ValueError, match=r"a row of 3 cells \('loss'\), needed 2"):
        write_run_page(page, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


PROBE = """
function probe(frame) {
  const page = frame.contentDocument, view = frame.contentWindow, root = page.documentElement;
  return {
    client: root.clientWidth,
    scroll: root.scrollWidth,
    wide: view.getComputedStyle(page.querySelector(".wide")).display,
    background: view.getComputedStyle(page.body).backgroundColor,
  };
}
"""


def test_a_browser_shows_the_page_at_phone_width_and_in_the_dark(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = render_run(finetune_page(outcome("a_label_of_many_letters_" * 9, [0.60, 0.62, 0.64]), folder))
    seen = browse(tmp_path_factory.mktemp("light"), text, PROBE)
    assert "error" not in seen and not seen["console"], seen
    assert seen["w360"]["scroll"] == seen["w360"]["client"] == 360, "the page scrolls sideways on a phone"
    assert (seen["w360"]["wide"], seen["w1280"]["wide"]) == ("none", "block")
    dark = browse(tmp_path_factory.mktemp("dark"), text, PROBE, "--blink-settings=preferredColorScheme=0")
    assert dark["w360"]["background"] == "rgb(13, 17, 23)"
