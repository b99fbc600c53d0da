"""Sizes of a recipe and the figures it quotes: chosen by name, laid over strictly, and no part of what a run is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from locant.cli import app
from locant.compare.executors import InlineExecutor
from locant.compare.grid import compare
from locant.compare.published import Published, published
from locant.compare.recipe import load_recipe, read_recipe
from locant.compare.sizes import choose_size
from locant.compare.tables import to_text
from locant.report.page import render
from tests.compare_runs import table, toml, write_text

SIZES = {"cpu": {"train": {"steps": 5}, "seeds": [4]}, "paper": {"model": {"num_layers": 7}, "encodings": ["none"]}}
FIGURE = {"claim": "Method 9, F1 <of a test>", "value": "90.53", "source": "arXiv:0000.00001, table 7"}


def sized(**changes: Any) -> dict[str, Any]:
    return {"name": "study", **table(Path("text.txt")), "sizes": SIZES, **changes}


def test_a_size_is_laid_over_the_recipe_key_by_key() -> None:
    paper = choose_size(sized(), "paper")
    assert paper["model"] == {"num_layers": 7, "model_dim": 8, "num_heads": 2, "dropout": 0.0}
    assert paper["encodings"] == ["none"] and paper["train"]["steps"] == 3
    assert paper["name"] == "study-paper" and "sizes" not in paper


def test_without_a_size_the_one_for_a_cpu_is_taken_or_the_recipe_as_written() -> None:
    assert choose_size(sized()) == choose_size(sized(), "cpu")
    assert choose_size(sized())["train"]["steps"] == 5
    written = choose_size(sized(sizes={"paper": {}}))
    assert written["name"] == "study" and written["train"]["steps"] == 3


def test_overrides_come_after_the_size(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    sizes = "\n[sizes.cpu]\nseeds = [4]\n[sizes.cpu.train]\nsteps = 5\n"
    path.write_text(toml(table(Path("text.txt"))) + sizes, encoding="utf-8")
    recipe = load_recipe(path, ["train.steps=6"])
    assert (recipe.name, recipe.train.steps, recipe.seeds) == ("study-cpu", 6, (4,))
    with pytest.raises(ValueError, match="size 'papr' is not a size of study; known: cpu"):
        load_recipe(path, size="papr")
    result = CliRunner().invoke(app, ["compare", str(path), "--size", "papr"])
    assert result.exit_code == 2 and "known: cpu" in result.output


@pytest.mark.parametrize(
    ("body", "size", "message"),
    [
        (sized(), "large", "size 'large' is not a size of study; known: cpu, paper"),
        ({"name": "bare"}, "cpu", r"size 'cpu' is not a size of bare; the recipe has no tables \[sizes.NAME\]"),
        (sized(sizes=3), "", "sizes = 3 is an integer, needed tables"),
        (sized(sizes={"cpu": 3}), "", r"sizes.cpu = 3 is an integer, needed a table \[sizes.cpu\]"),
    ],
)
def test_a_size_that_is_not_there_is_named(body: dict[str, Any], size: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_size(body, size)


def test_keys_of_a_size_are_read_strictly() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'stesp' in \[train\]; did you mean 'steps'"):
        read_recipe(choose_size(sized(sizes={"cpu": {"train": {"stesp": 1}}})))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**FIGURE, "value": " "}, "value = ' ' of a published figure is empty"),
        ({**FIGURE, "value": 90.53}, r"published\[0\].value = 90.53 is a number, needed a text"),
        ({**FIGURE, "page": "7"}, r"unknown key 'page' in \[published\[0\]\]"),
        ({"claim": "x", "value": "1"}, "lacks 'source'"),
    ],
)
def test_a_published_figure_is_read_strictly(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(table(Path("text.txt"), published=[row]))


def test_published_figures_are_no_part_of_a_run() -> None:
    bare = read_recipe(table(Path("text.txt")))
    quoting = dataclasses.replace(bare, published=(Published(**FIGURE),))
    assert bare.shared() == quoting.shared()
    assert bare.run_key("none", 1) == quoting.run_key("none", 1)
    assert read_recipe(quoting.to_dict()) == quoting


def test_published_figures_stand_beside_the_results_of_a_folder_from_before(tmp_path: Path) -> None:
    body = table(write_text(tmp_path / "text.txt"), encodings=["none"])
    recipe = read_recipe(body)
    out = tmp_path / "out"
    before = compare(recipe, out, executor=InlineExecutor)
    old = json.loads((out / "recipe.json").read_text(encoding="utf-8"))
    del old["recipe"]["published"]  # as it was written before there were any
    (out / "recipe.json").write_text(json.dumps(old), encoding="utf-8")
    assert "Published" not in to_text(before) and "Published" not in render(before)
    after = compare(read_recipe({**body, "published": [FIGURE]}), out, executor=InlineExecutor)
    assert after.runs == before.runs and published(after) == (Published(**FIGURE),)
    assert "Method 9, F1 <of a test>  90.53  arXiv:0000.00001, table 7" in to_text(after)
    page = render(after)
    assert "Method 9, F1 &lt;of a test&gt;" in page and "arXiv:0000.00001" in page and "published[0]" not in page
