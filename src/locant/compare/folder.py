"""The output folder of a comparison: one recipe, one lock, one folder for each run, every file written whole.

recipe.json                the recipe, with every default filled in
text/                      tokenizer and token streams
runs/<label>-seed<N>/      run.json (only when the run is finished), log.txt, checkpoints/ where asked for
speed/<label>-round<N>.json
results.json, runs.csv, table.csv, plots/, report.html
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from locant.compare.recipe import Recipe, shared_part
from locant.compare.results import RunResult, Speed
from locant.training.checkpoints import PREFIX
from locant.training.folder import differences, lock_folder, read_whole, unwritable, write_atomically


class OutputFolder:
    """Where things lie in an output folder, and how they are written and read; `open_folder` checks it first."""

    def __init__(self, path: str | Path, recipe: Recipe) -> None:
        self.path, self.recipe = Path(path), recipe

    @property
    def text(self) -> Path:
        """Where the tokenized text is kept."""
        return self.path / "text"

    def run_dir(self, label: str, seed: int) -> Path:
        """Folder of one run."""
        return self.path / "runs" / f"{slug(label)}-seed{seed}"

    def finished(self, label: str, seed: int) -> RunResult | None:
        """The result of a finished run of this recipe, or None."""
        body = read_whole(self.run_dir(label, seed) / "run.json")
        if body is None or body.get("key") != self.recipe.run_key(label, seed):
            return None
        return RunResult.from_dict(body["result"], str(self.run_dir(label, seed) / "run.json"))

    def write_run(self, result: RunResult, environment: dict[str, Any]) -> None:
        """Keeps a finished run. Raises: OSError."""
        choice = self.recipe.choice(result.encoding)
        body = {
            "key": self.recipe.run_key(result.encoding, result.seed),
            "encoding": {"label": choice.label, "name": choice.name, "options": choice.options},
            "seed": result.seed,
            "recipe": self.recipe.to_dict(),
            "environment": environment,
            "result": result.to_dict(),
        }
        _write(self.run_dir(result.encoding, result.seed) / "run.json", body)

    def speed_path(self, label: str, round_: int) -> Path:
        """File of one round of speed measurement."""
        return self.path / "speed" / f"{slug(label)}-round{round_}.json"

    def speed_key(self, label: str) -> dict[str, Any]:
        """What a speed depends on, besides the machine."""
        choice, recipe = self.recipe.choice(label), self.recipe.to_dict()
        return {"name": choice.name, "options": choice.options, "measure": {**recipe["measure"], "rounds": None}}

    def measured(self, label: str, round_: int) -> Speed | None:
        """A finished round of speed measurement, or None."""
        body = read_whole(self.speed_path(label, round_))
        if body is None or body.get("key") != self.speed_key(label):
            return None
        return Speed(**body["speed"])

    def write_speed(self, label: str, round_: int, speed: Speed) -> None:
        """Keeps one round of speed measurement. Raises: OSError."""
        body = {name: value for name, value in vars(speed).items() if value != ()}  # one round has no rounds
        _write(self.speed_path(label, round_), {"key": self.speed_key(label), "speed": body})

    def write(self, name: str, text: str) -> Path:
        """Writes one file of the folder whole or not at all. Raises: OSError."""
        try:
            return write_atomically(self.path / name, text)
        except OSError as error:
            raise unwritable(self.path / name, error) from error


@contextlib.contextmanager
def open_folder(path: str | Path, recipe: Recipe) -> Iterator[OutputFolder]:
    """The output folder of this recipe, made where it is new, and locked until the block ends.

    Raises: ValueError where it belongs to another recipe, holds other files or is in use; OSError where it cannot be
    written.
    """
    folder = OutputFolder(path, recipe)
    lock = None
    try:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder.path)
            _check_recipe(folder)
            for name in ("runs", "speed"):
                (folder.path / name).mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(folder.path, error) from error
        folder.write("recipe.json", json.dumps({"recipe": recipe.to_dict()}, indent=1, ensure_ascii=False) + "\n")
        yield folder
    finally:
        if lock is not None:
            lock.close()


def _check_recipe(folder: OutputFolder) -> None:
    """Raises ValueError unless the folder is empty, or of a recipe that differs in the grid alone.

    Another recipe's folder in which no run ever finished or kept a checkpoint, as a mistake in the recipe leaves it, is
    begun anew.
    """
    path, recipe = folder.path, folder.recipe
    body = read_whole(path / "recipe.json")
    if body is None:
        if others := sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")):
            raise ValueError(
                f"compare: {str(path)!r} holds other files ({', '.join(others[:3])}), needed an empty folder or one of "
                "this recipe; give another --out"
            )
        return
    before = body.get("recipe", {})
    changed = differences(shared_part(before), recipe.shared())
    kept = any(found for name in ("run.json", f"{PREFIX}*") for found in path.glob(f"runs/*/{name}"))
    if changed and set(before) == set(recipe.to_dict()) and not kept:
        for made in ("text", "speed"):
            shutil.rmtree(path / made, ignore_errors=True)
    elif changed:
        raise ValueError(
            f"compare: {str(path)!r} belongs to another recipe: {'; '.join(changed[:6])}; give another --out, or set "
            "these back"
        )
    for choice in recipe.encodings:
        for seed in recipe.seeds:
            run = read_whole(folder.run_dir(choice.label, seed) / "run.json")
            if run is not None and run.get("key") != recipe.run_key(choice.label, seed):
                there = {key: run.get("encoding", {}).get(key) for key in ("name", "options")}
                here = {"name": choice.name, "options": choice.options}
                raise ValueError(
                    f"compare: {str(path)!r} has a run {choice.label!r} of another encoding: {there} there, {here} "
                    "here; give it another label, or another --out"
                )


def slug(label: str) -> str:
    """A file name for a label; labels that differ only in signs get different ones."""
    plain = re.sub(r"[^\w.+-]+", "-", label).strip("-.") or "run"
    return plain if plain == label else f"{plain}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def _write(path: Path, body: dict[str, Any]) -> None:
    try:
        write_atomically(path, json.dumps(body, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise unwritable(path, error) from error
