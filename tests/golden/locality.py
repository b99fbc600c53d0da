"""Set B: locality and symmetry of matrices, and the hand-made encodings that vary them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import torch
from torch import Tensor

import locant
from locant.analysis.locality import locality, symmetry
from locant.encodings.attenuated import Attenuated
from tests.golden.cases import Case, Comparison
from tests.golden.modules import bias_of
from tests.golden.registry import check


def number(value: float | None) -> Tensor:
    """A number, nan where undefined (null in JSON: the public code divides by zero)."""
    return torch.tensor([float("nan") if value is None else value], dtype=torch.float64)


@check("B", "locality_symmetry")
def check_locality_symmetry(case: Case) -> Iterator[Comparison]:
    """Both numbers of every matrix."""
    values = json.loads((case.folder / case.meta["values"]).read_text(encoding="utf-8"))
    assert values.keys() == case.tensors.keys(), f"{case.id}: numbers of {sorted(values)}"
    for name, matrix in case.tensors.items():
        found = {"locality": locality(matrix), "symmetry": symmetry(matrix)}
        stated = values[name].keys() - {"symmetry_public_code"}  # what it gives where symmetry is undefined
        assert found.keys() == stated, f"{case.id}: {name} has {sorted(values[name])}"
        for measure, value in found.items():
            expected = number(values[name][measure])
            assert (value is None) == bool(expected.isnan().all()), f"{case.id}: {measure} of {name} is {value}"
            if value is not None:
                yield Comparison(f"{name} ({measure})", number(value), expected, case.meta["atol"], 0)
            else:
                yield Comparison(f"{name} ({measure} undefined)", torch.tensor(1), torch.tensor(1))


# A window wider than the input: the public code leaves the identity there, an edge fault that is not followed.
@check("B", "attenuated", out_of_reach=("fixed_window3.n2",))
def check_attenuated(case: Case) -> Iterator[Comparison]:
    """The fixed bell with rows that sum to 1, the window, the start of the table and the biases it gives."""
    for name, expected in case.tensors.items():
        if name == "fixed_window3.n2":
            continue
        yield Comparison(name, made(case, name), expected, case.meta["atol"], 0)


def made(case: Case, name: str) -> Tensor:
    """Ours for a stored tensor; its name states the settings."""
    positions = locant.Positions.arange(case.tensors[name].shape[-1])
    if bell := re.fullmatch(r"gaussian\.w([\d.]+)\.n\d+", name):
        return bias_of(Attenuated(num_heads=1, w=float(bell[1]), edges="row"), positions)[0]
    if window := re.fullmatch(r"fixed_window(\d+)\.n\d+", name):
        return bias_of(Attenuated(num_heads=1, form="window", window=int(window[1])), positions)[0]
    table = re.fullmatch(r"learnable_init\.layers(\d+)_heads(\d+)_max(\d+)\.(table|bias_layer(\d+))", name)
    assert table, f"{case.id}: {name!r} names no setting"
    layers, heads, longest = (int(table[i]) for i in (1, 2, 3))
    stack = locant.stack("attenuated", layers, form="table", num_heads=heads, max_length=longest)
    if table[4] == "table":
        return torch.stack([layer.get_parameter("table").detach() for layer in stack])
    return bias_of(stack[int(table[5])], positions).detach()
