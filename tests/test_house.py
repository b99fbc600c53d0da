"""The tests' own machinery: filled memory, accounted skips, fixed seeds, gathered changelog."""

from __future__ import annotations

import datetime
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from tests.scripts import ROOT, load_script
from tests.skips import ROWS, has_row, read_rows

# Uninitialized memory


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 5),
        lambda: torch.empty((3, 5), dtype=torch.float64, requires_grad=True),
        lambda: torch.empty_like(torch.zeros(3, 5)),
        lambda: torch.empty_strided((3, 5), (5, 1)),
        lambda: torch.zeros(2).new_empty(3, 5),
        lambda: torch.nn.utils.skip_init(torch.nn.Linear, 5, 3).weight,
    ],
)
def test_uninitialized_floats_read_as_nan(make):
    assert make().shape == (3, 5)
    assert make().isnan().all()


def test_uninitialized_integers_read_as_the_largest_value():
    assert torch.empty(3, dtype=torch.int32).tolist() == [2**31 - 1] * 3
    assert torch.empty(3, dtype=torch.bool).all()


def test_the_fill_forces_no_deterministic_algorithms():
    assert not torch.are_deterministic_algorithms_enabled()


def test_device_contexts_still_reach_the_wrapped_constructors():
    with torch.device("meta"):
        assert torch.empty(3, 5).is_meta
        assert torch.nn.Linear(3, 5).weight.is_meta


def test_the_wrapped_functions_pickle_as_the_originals():
    assert pickle.loads(pickle.dumps(torch.empty)) is torch.empty
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())(3).shape)"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(torch.empty), capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == "torch.Size([3])"


@pytest.mark.parametrize("_", range(2))
def test_every_test_starts_from_the_same_seeds(_):
    torch.testing.assert_close(torch.rand(2), torch.tensor([0.4962566, 0.7682218]))
    assert numpy.random.rand() == pytest.approx(0.5488135)


# Skips


def test_rows_name_files_that_exist():
    rows = read_rows(ROWS.read_text(encoding="utf-8"))
    written = sum(line.startswith("| `") for line in ROWS.read_text(encoding="utf-8").splitlines())
    assert len({reason for reason, _ in rows}) == written, (
        "a row of tests/SKIPS.md lacks its reason, its place or its why"
    )
    missing = [where for _, where in rows if not (ROOT / where).exists()]
    assert not missing


def test_reasons_match_whole_and_only_stars_are_special():
    assert has_row("no GPU here (0 found)", ["no GPU here (* found)"])
    assert not has_row("no GPU here (0 found), maybe", ["no GPU here (* found)"])
    assert not has_row("set C", ["set ?"])
    assert has_row("[a] set ?", ["[a] set ?"])


SKIPPING = """
import pytest

def test_passes(): pass

@pytest.mark.skipif(True, reason="known reason 1")
def test_known(): pass

def test_known_too(): pytest.skip("known reason 2")
"""
UNKNOWN = {
    "mark": "@pytest.mark.skip(reason='nobody knows')\ndef test_unknown(): pass",
    "call": "def test_unknown(): pytest.skip('nobody knows')",
    "xfail": "@pytest.mark.xfail(reason='nobody knows')\ndef test_unknown(): assert False",
    "module": "pytest.skip('nobody knows', allow_module_level=True)",
}


def run_inside(pytester: pytest.Pytester, more: str, *arguments: str) -> pytest.RunResult:
    shutil.copy(ROOT / "tests" / "skips.py", pytester.path / "ledger.py")
    (pytester.path / "SKIPS.md").write_text("| `known reason *` | `here` | as a test |\n")
    pytester.makepyfile(test_one=SKIPPING, test_two="import pytest\n" + more)
    return pytester.runpytest_subprocess("-p", "ledger", "-p", "no:cacheprovider", *arguments)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_run_passes_when_every_skip_has_a_row(pytester, workers):
    done = run_inside(pytester, "", *workers)
    assert done.ret == 0
    done.stdout.fnmatch_lines(["*1 passed, 2 skipped*"])


@pytest.mark.parametrize("kind, workers", [*((kind, ()) for kind in UNKNOWN), ("call", ("-n", "2"))])
def test_a_skip_without_a_row_fails_the_run(pytester, kind, workers):
    done = run_inside(pytester, UNKNOWN[kind], *workers)
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["*'nobody knows': 1 skipped, the first is test_two.py*", "*1 passed*"])


def test_an_interrupted_run_keeps_its_own_exit_code(pytester):
    done = run_inside(pytester, UNKNOWN["mark"] + "\ndef test_stop(): raise KeyboardInterrupt")
    assert done.ret == pytest.ExitCode.INTERRUPTED


# Options


def test_the_golden_folder_defaults_to_the_copy_beside_the_tests(golden_dir, pytestconfig):
    assert golden_dir == pytestconfig.getoption("--golden")


# Changelog

gather = load_script("changes/gather.py")
DAY = datetime.date(2026, 2, 3)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.7.1"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\nNewest first.\n\n## 0.7.0 (2026-01-01)\n\n- Old.\n")
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("how")
    return tmp_path


def test_fragments_move_into_the_changelog_above_older_versions(release):
    (release / "changes" / "b.fixed.md").write_text("A fault\nis gone.\n")
    (release / "changes" / "a.added.md").write_text("A thing.\n")
    gather.gather(release, DAY)
    assert (release / "CHANGELOG.md").read_text() == (
        "# Changelog\n\nNewest first.\n\n"
        "## 0.7.1 (2026-02-03)\n\n### Added\n\n- A thing.\n\n### Fixed\n\n- A fault is gone.\n\n"
        "## 0.7.0 (2026-01-01)\n\n- Old.\n"
    )
    assert [path.name for path in (release / "changes").iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("x.improved.md", "text", "'x.improved.md' is no fragment"),
        ("x.added.md", " \n", "'x.added.md' is empty"),
        (None, None, "no fragment to gather for 0.7.1"),
    ],
)
def test_bad_fragments_are_refused(release, name, text, message):
    if name:
        (release / "changes" / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        gather.gather(release, DAY)


def test_a_version_is_gathered_once(release):
    (release / "pyproject.toml").write_text('[project]\nversion = "0.7.0"\n')
    (release / "changes" / "a.added.md").write_text("A thing.\n")
    with pytest.raises(ValueError, match=r"already has 0\.7\.0"):
        gather.gather(release, DAY)


def test_the_fragments_of_this_tree_are_well_formed():
    assert set(gather.read_fragments(ROOT / "changes")) == set(gather.KINDS)
