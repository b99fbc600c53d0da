"""The README and the generated pages say what is so."""

from __future__ import annotations

import re
import textwrap
import tomllib

import pytest
import torch

import locant
from tests.scripts import ROOT, load_script

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", README, flags=re.DOTALL) for kind in ("python", "sh")}

docs = load_script("docs/generate.py")


def test_the_python_of_the_readme_runs(capsys):
    (code,) = BLOCKS["python"]
    assert 8 <= sum(bool(line.strip()) for line in code.splitlines()) <= 12
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["loss"].isfinite()
    assert scope["out"].shape == scope["q"].shape
    assert "huang_m4" in capsys.readouterr().out


def test_the_commands_of_the_readme_are_make_targets():
    (commands,) = BLOCKS["sh"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = [line.split()[1] for line in commands.splitlines() if line.startswith("make ")]
    assert named == ["demo", "test"]
    assert set(named) <= set(targets)


def test_the_links_of_the_readme_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > len(locant.names())
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_and_the_pages_are_up_to_date():
    assert [str(path.relative_to(ROOT)) for path in docs.stale(docs.render())] == [], "run make docs"


def test_every_encoding_has_one_row_and_a_page():
    rows = re.findall(r"^\| \[`(\w+)`\]", README.split(docs.START)[1].split(docs.END)[0], flags=re.MULTILINE)
    assert rows == locant.names() + locant.names("transforms")
    assert {path.stem for path in (ROOT / "docs" / "encodings").glob("*.md")} == {*rows, "README"}


def test_a_changed_docstring_and_a_removed_encoding_are_found():
    files = docs.render()
    before, path = docs.stale(files), ROOT / "docs" / "encodings" / "shaw.md"
    changed = {**files, path: files[path] + "new"}
    assert path in docs.stale(changed)
    del changed[path]
    assert path in docs.stale(changed)
    assert path not in before, "run make docs"


def test_a_readme_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="'<!-- end -->' once each"):
        docs.readme(docs.START)


def test_the_encoding_of_the_contributing_guide_follows_its_equation():
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", guide, flags=re.DOTALL)
    scope: dict = {"__name__": "contributed"}
    exec(compile(textwrap.dedent(code), "CONTRIBUTING.md", "exec"), scope)
    encoding = scope["OffsetBias"](num_heads=3, clip=2)
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)
    positions = locant.Positions.arange(5)

    def attend(*terms):
        return locant.attention(q, k, v, terms, positions, backend="reference", return_weights=True)

    _, weights = attend(*encoding.terms(positions, locant.Layer(q, k)))
    logits = [q[1, 2, 3] @ k[1, 2, j] / 8**0.5 + encoding.table[2, max(-2, min(2, j - 3)) + 2] for j in range(5)]
    torch.testing.assert_close(weights[1, 2, 3].log(), torch.stack(logits).log_softmax(0))
    encoding.neutralize()
    torch.testing.assert_close(attend(*encoding.terms(positions, locant.Layer(q, k))), attend())


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cited is not None
    assert project["version"] == cited[1] == locant.__version__
