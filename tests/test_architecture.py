"""The layout holds: imports point one way, the package is light, softmax and matplotlib stay in their places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import (
    DIRECT,
    PACKAGE,
    ROOT,
    allowed,
    backward_imports,
    foreign_imports,
    imported_modules,
    module_name,
    nameless_files,
    softmax_calls,
)

FILES = sorted(PACKAGE.rglob("*.py"))
SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in FILES}

LIGHT = {"locant", "torch", "numpy", "jaxtyping", "wadler_lindig", "typing_extensions"}
LIMIT = 0.2  # seconds that importing locant may add to importing torch

# Processor time, with that of children: other processes do not count, so the check holds on a loaded machine.
PROBE = """
import os, sys
import torch
before = set(sys.modules)
start = sum(os.times()[:4])
import locant
seconds = sum(os.times()[:4]) - start
import json
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def import_in_fresh_process(code: str = PROBE, path: Path | None = None) -> dict:
    lines = code if path is None else f"import sys; sys.path.insert(0, {str(path)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def heavy(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} - LIGHT - set(sys.stdlib_module_names)


# The tree as it is


def test_imports_point_one_way():
    assert [finding for module, source in SOURCES.items() for finding in backward_imports(source, module)] == []


def test_only_plots_imports_matplotlib():
    outside = {module: source for module, source in SOURCES.items() if not module.startswith("locant.plots.")}
    for library in ("matplotlib", "pylab", "seaborn"):
        assert [
            finding for module, source in outside.items() for finding in foreign_imports(source, module, library)
        ] == []


def test_softmax_is_called_only_where_attention_is_computed_or_analyzed():
    assert [finding for module, source in SOURCES.items() for finding in softmax_calls(source, module)] == []


def test_every_file_is_named_after_its_subject():
    paths = [path.relative_to(ROOT) for folder in ("src", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) >= len(FILES)
    assert nameless_files(paths) == []


def test_import_locant_brings_nothing_heavier_and_takes_little_longer_than_torch():
    found = import_in_fresh_process()
    assert heavy(found["modules"]) == set()
    seconds = min(found["seconds"], import_in_fresh_process()["seconds"])
    assert seconds <= LIMIT, f"import locant adds {seconds:.2f} s to import torch; {LIMIT} s are allowed"


# The checks can fail


@pytest.mark.parametrize(
    "module, source, target",
    [
        ("locant.positions", "from locant.terms import Term", "locant.terms.Term"),
        ("locant.terms", "def f():\n    import locant.attention", "locant.attention"),
        ("locant.terms", "def f():\n    from . import encoding", "locant.encoding"),
        ("locant.encoding", "from .attention import attention", "locant.attention.attention"),
        ("locant.encoding", "import importlib\nimportlib.import_module('locant.hf')", "locant.hf"),
        ("locant.catalog", "import locant.encodings.shaw", "locant.encodings.shaw"),
        ("locant.catalog", "from locant.encodings import shaw", "locant.encodings.shaw"),
        ("locant.encodings.shaw", "from locant.backends.reference import attend", "locant.backends.reference.attend"),
        ("locant.backends.sdpa", "from ..encodings.shaw import Shaw", "locant.encodings.shaw.Shaw"),
        ("locant.backends.native.loader", "from ...encoding import load", "locant.encoding.load"),
        ("locant.attention", "from locant import names", "locant.names"),
        ("locant.attention", "import locant", "locant"),
        ("locant.__init__", "from locant.hf import attach", "locant.hf.attach"),
        ("locant.data.text", "from locant.training.mlm import train", "locant.training.mlm.train"),
        ("locant.hf.attach", "if TYPE_CHECKING:\n    from locant.compare import run", "locant.compare.run"),
        ("locant.training.mlm", "from locant import compare", "locant.compare"),
        ("locant.plots.curves", "from ..report import page", "locant.report.page"),
        ("locant.report.page", "from locant.cli import app", "locant.cli.app"),
    ],
)
def test_a_planted_backward_import_is_found(module, source, target):
    (finding,) = backward_imports(source, module)
    assert finding.startswith(f"{module}:") and f"imports {target}, which is not below" in finding


def test_a_planted_sibling_import_is_found():
    for source in ("from .tisa import Tisa", "from locant.encodings import tisa", "import locant.encodings.tisa"):
        (finding,) = backward_imports(source, "locant.encodings.shaw")
        assert "imports its sibling locant.encodings.tisa" in finding
    assert backward_imports("from .tisa import Tisa", "locant.encodings.__init__") == []


def test_a_module_without_a_place_is_found():
    (finding,) = backward_imports("", "locant.novelty")
    assert "'novelty' has no place" in finding


@pytest.mark.parametrize(
    "module, source",
    [
        ("locant.encodings.shaw", "import torch\nfrom ..terms import Term\nfrom locant.encoding import Encoding"),
        ("locant.catalog", "import locant.encodings as folder"),
        ("locant.attention", "from .backends import BACKENDS\nfrom .positions import Positions"),
        ("locant.compare.run", "from .results import Result\nfrom locant import hf, load\nimport locant.training.mlm"),
        ("locant.cli.compare", "from locant.plots.curves import draw"),
        ("locant.hf.attach", "from .families import FAMILIES\nfrom transformers import AttentionInterface"),
    ],
)
def test_imports_that_point_down_pass(module, source):
    assert backward_imports(source, module) == []


def test_no_unit_is_below_itself():
    assert [unit for unit in DIRECT if unit in allowed(unit)] == []


def test_relative_imports_resolve_from_modules_and_packages():
    assert list(imported_modules("from . import a\nfrom ..b import c", "locant.hf.attach")) == [
        (1, "locant.hf.a"),
        (2, "locant.b.c"),
    ]
    assert list(imported_modules("from .a import b", "locant.hf.__init__")) == [(1, "locant.hf.a.b")]


@pytest.mark.parametrize(
    "source",
    ["import matplotlib", "from matplotlib import pyplot", "def f():\n    import matplotlib.pyplot as plt"],
)
def test_a_planted_matplotlib_is_found(source):
    (finding,) = foreign_imports(source, "locant.report.page", "matplotlib")
    assert "locant.report.page" in finding


@pytest.mark.parametrize(
    "call", ["x.softmax(-1)", "torch.softmax(x, -1)", "F.softmax(x)", "softmax(x)", "nn.Softmax(-1)"]
)
def test_a_planted_softmax_is_found(call):
    (finding,) = softmax_calls(f"def f(x):\n    return {call}", "locant.encodings.shaw")
    assert finding == "locant.encodings.shaw:2 calls softmax"
    assert softmax_calls(f"y = {call}", "locant.backends.reference") == []


def test_a_planted_nameless_file_is_found():
    paths = [
        Path("src/locant/hf/utils.py"),
        Path("tests/common/cases.py"),
        Path("src/locant/_misc.py"),
        Path("src/ok.py"),
    ]
    assert nameless_files(paths) == [str(path) for path in paths[:3]]


def plant(folder: Path, source: str) -> Path:
    (folder / "locant").mkdir()
    (folder / "locant" / "__init__.py").write_text(source)
    return folder


def test_a_planted_heavy_and_slow_import_is_found(tmp_path):
    source = "import torch, json, jinja2\nfor _ in range(5 * 10**7): pass"
    found = import_in_fresh_process(path=plant(tmp_path, source))
    assert heavy(found["modules"]) == {"jinja2", "markupsafe"}
    assert found["seconds"] > LIMIT
