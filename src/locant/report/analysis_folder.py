"""The output folder of an analysis: one lock, every file written whole, another model's analysis kept.

analysis.json, compared.json      the model, and the one beside it: all numbers, null where undefined
index.html                        the page
tables/<name>.csv                 one for each table, both models in it
figures/<name>.svg, .png          figures/compared/ for the model beside it
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from locant.analysis import Analysis
from locant.plots import analysis_figures, save
from locant.report.analysis_page import render_analysis
from locant.report.analysis_tables import analysis_tables
from locant.training.folder import lock_folder, write_atomically

MAIN, BESIDE = "analysis.json", "compared.json"
MAKER = "locant analyze"


class AnalysisFolder:
    """An output folder that is checked and locked; see `open_analysis_folder`."""

    def __init__(self, path: Path, before: Sequence[str]) -> None:
        self.path, self.before = path, before

    def write(self, analyses: Sequence[Analysis], environment: Mapping[str, Any]) -> Path:
        """Writes all files, takes away those of an earlier analysis that this one has not, and returns the page.

        The numbers come first: a folder that was left half written is still known as an analysis of these models.
        Raises: OSError where the folder cannot be written.
        """
        figures = {
            f"{folder}/{name}.{kind}": figure
            for folder, one in zip(("figures", "figures/compared"), analyses, strict=False)
            for name, figure in analysis_figures(one).items()
            for kind in ("svg", "png")
        }
        texts = {f"tables/{name}.csv": text for name, text in analysis_tables(analyses).items()}
        texts["index.html"] = render_analysis(analyses, environment=environment)
        files = [*figures, *texts, *(BESIDE for _ in analyses[1:])]
        body = {"made_by": MAKER, "models": identity(analyses), "files": files, "environment": environment}
        whole = {
            name: json.dumps({**body, **one.to_dict()}, allow_nan=False, ensure_ascii=False) + "\n"
            for name, one in zip((MAIN, BESIDE), analyses, strict=False)
        }
        try:
            for name, text in (whole | texts).items():
                write_atomically(self.path / name, text)
            for name, figure in figures.items():
                save(figure, self.path / name)
            for stale in set(self.before) - set(files):
                (self.path / stale).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        return self.path / "index.html"


def identity(analyses: Sequence[Analysis]) -> list[dict[str, Any]]:
    """By what a folder tells whose analysis it holds."""
    return [{"name": one.model.name, "parameters": one.model.parameters} for one in analyses]


@contextlib.contextmanager
def open_analysis_folder(
    path: str | Path, models: Sequence[Mapping[str, Any]], *, overwrite: bool = False
) -> Iterator[AnalysisFolder]:
    """The output folder for these models (name and parameters each), made where it is new, locked until the block ends.

    An analysis of the same models in it is replaced; that of others only with ``overwrite``. A folder that was new, and
    to which nothing was written, is taken away again.
    Raises: ValueError where it is in use, or holds other files or other models; OSError where it cannot be written.
    """
    path = Path(path)
    new = not path.exists()
    lock = None
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(path, "analyze")
        except OSError as error:
            raise _unwritable(path, error) from error
        yield AnalysisFolder(path, _check(path, list(models), overwrite))
    finally:
        if lock is not None:
            lock.close()
            if new and [entry.name for entry in path.iterdir()] == [".lock"]:
                (path / ".lock").unlink()
                path.rmdir()


def _check(path: Path, models: list[Mapping[str, Any]], overwrite: bool) -> list[str]:
    """The files of the analysis that may be replaced, none in an empty folder; raises ValueError otherwise."""
    others = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    if not others:
        return []
    try:
        body = json.loads((path / MAIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        body = None
    if not isinstance(body, dict) or body.get("made_by") != MAKER:
        raise ValueError(
            f"analyze: {str(path)!r} holds other files ({', '.join(others[:3])}), needed an empty folder or an "
            "analysis of this model; give another --out"
        )
    if body["models"] != models and not overwrite:
        there, here = (" and ".join(one["name"] for one in each) for each in (body["models"], models))
        raise ValueError(
            f"analyze: {str(path)!r} holds the analysis of {there}, not of {here}; give another --out, or --overwrite"
        )
    return [name for name in body["files"] if ".." not in name and not Path(name).is_absolute()]


def _unwritable(path: Path, error: OSError) -> OSError:
    return OSError(f"analyze: cannot write {str(path)!r}: {error.strerror or error}; free space, or give another --out")
