"""Finding golden cases: what a file holds decides who checks it, never what the file is called.

Two layouts exist. A: `X.json` (library, class, config) beside `X.safetensors` (`weights/`, `inputs/`, `outputs/`).
B: `index.json`, a list of entries with a `kind`, the files of the case and its tolerances. C: `index.json` with one
entry for each group of cases, whose tensors are called `<case>/<tensor>`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

ATOL, RTOL = 1e-5, 1e-5  # float32 numbers of set A, unless a check says otherwise


@dataclass(frozen=True)
class Case:
    """One golden case: ``key`` is what it is dispatched on, ``meta`` its JSON, ``files`` the files that hold it."""

    id: str
    key: tuple[str, str]
    meta: Mapping[str, Any]
    folder: Path
    files: tuple[str, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration or the constructor arguments (set A)."""
        return self.meta.get("config") or {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of set A, or those of the case's main file in set B."""
        return load_file(self.folder / self.files[0])

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Tensors under a prefix, without it."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}

    @cached_property
    def members(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of each named case of a group of set C."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            member, _, rest = name.partition("/")
            found.setdefault(member, {})[rest] = tensor
        return found

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The state dict of the public class."""
        return self.part("weights/")

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        """What the public class was called with."""
        return self.part("inputs/")

    @cached_property
    def outputs(self) -> dict[str, Tensor]:
        """What it returned."""
        return self.part("outputs/")


@dataclass(frozen=True)
class Comparison:
    """One number of ours beside the golden one; integers must be equal."""

    name: str
    actual: Tensor
    expected: Tensor
    atol: float = ATOL
    rtol: float = RTOL

    def verify(self) -> None:
        """Raise an AssertionError that names the tensor where they differ."""
        exact = not self.expected.is_floating_point()
        torch.testing.assert_close(
            self.actual,
            self.expected,
            atol=0 if exact else self.atol,
            rtol=0 if exact else self.rtol,
            check_dtype=False,
            msg=lambda text: f"{self.name}: {text}",
        )


@dataclass(frozen=True)
class Folder:
    """The cases below a folder, and the files below it that belong to none."""

    cases: list[Case] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)


def find_cases(root: Path) -> Folder:
    """Every case below ``root`` (a set, or a folder of sets)."""
    found = Folder()
    folders = [root, *sorted(p for p in root.rglob("*") if p.is_dir())] if root.is_dir() else []
    for folder in folders:
        names = {p.name for p in folder.iterdir() if p.is_file() and p.name != "README.md"}
        label = folder.relative_to(root.parent).as_posix()
        cases = list(_indexed(folder, label) if "index.json" in names else _described(folder, label, names))
        found.cases.extend(cases)
        owned = {"index.json"}.union(*(case.files for case in cases))
        if any(case.key[0] == "C" for case in cases):
            owned |= names  # the files of set C are listed by group, and not one by one
        found.strays.extend(f"{label}/{name}" for name in sorted(names - owned))
    return found


def _indexed(folder: Path, label: str) -> Iterator[Case]:
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    if isinstance(index, dict):
        for group, entry in index.items():
            yield Case(f"{label}/{group}", ("C", group), entry, folder, tuple(entry.get("files", ())))
        return
    for entry in index:
        files = tuple(entry[k] for k in ("file", "params", "grad_file", "values") if k in entry)
        yield Case(f"{label}/{Path(entry['file']).stem}", ("B", entry["kind"]), entry, folder, files)


def _described(folder: Path, label: str, names: Iterable[str]) -> Iterator[Case]:
    for name in sorted(n for n in names if n.endswith(".json")):
        meta = json.loads((folder / name).read_text(encoding="utf-8"))
        if isinstance(meta, dict) and {"library", "class"} <= meta.keys():
            tensors = Path(name).with_suffix(".safetensors").name
            yield Case(f"{label}/{Path(name).stem}", (meta["library"], meta["class"]), meta, folder, (tensors, name))
