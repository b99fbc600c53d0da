"""One token too many is a clear error, before any kernel runs: a hook for plain hosts with a table of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from locant.hf import entrance
from locant.hf.attachment import attachment_of, parameter_names
from locant.hf.build import spare_rows, table_rows
from locant.hf.families import Site, find_sites
from locant.hf.hooks import check_rows

Model = TypeVar("Model", bound=nn.Module)
FIELD = "locant_guard"


@dataclass(frozen=True)
class Guard:
    """What the hook needs: rows of the table, those before position 0, and names for the message and arguments."""

    family: str
    rows: int
    spare: int
    names: tuple[str, ...]


def guard(model: Model) -> Model:
    """From here on, input longer than the host's own table is a ValueError before any kernel runs; returns the model.

    Counted are tokens, cached and new ones, padding included; explicit ``position_ids`` are read as they are. What is
    attached by locant is guarded anyway. The hook lives as long as the object: it is not saved with the model.
    Raises: ValueError where no stack of layers has a table.
    """
    sites = [site for site in find_sites(model) if table_rows(site) is not None]
    if not sites:
        raise ValueError(
            f"guard: {type(model).__name__} has no table of positions, so no length is too long for it; leave it out"
        )
    for site in sites:
        guard_site(site)
    return model


def guard_site(site: Site) -> None:
    """Guard one stack of layers, or tell its guard the new size."""
    rows = table_rows(site)
    assert rows is not None
    names = parameter_names(site.module)
    fresh = FIELD not in site.module.__dict__
    site.module.__dict__[FIELD] = Guard(site.family.name, rows, spare_rows(site), names)
    if fresh:
        site.module.register_forward_pre_hook(_check, with_kwargs=True)


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    known: Guard = module.__dict__[FIELD]
    if attachment_of(module) is not None:
        return
    arguments = {**dict(zip(known.names, args, strict=False)), **kwargs}
    if not any(isinstance(arguments.get(name), Tensor) for name in ("input_ids", "inputs_embeds")):
        return
    at = entrance.arrival(arguments)
    who, ids = f"guard: the table of {known.family}", arguments.get("position_ids")
    check_rows(who, known.rows, known.spare, at, ids, "make it longer with locant.hf.extend")
