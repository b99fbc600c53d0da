"""Sizes of a recipe: tables `[sizes.NAME]` that are laid over the rest of it, one of them chosen by name."""

from __future__ import annotations

from typing import Any

from locant.compare.fields import kind_of

DEFAULT = "cpu"  # taken where a recipe has it and none is asked for


def choose_size(table: dict[str, Any], size: str = "") -> dict[str, Any]:
    """A recipe, as parsed TOML with a name, at one of its sizes; the name of the size ends that of the recipe.

    Without a size: `cpu` where the recipe has it, else the recipe as it is written. Tables of a size may be partial;
    lists take the place of lists. Raises: ValueError for a size that the recipe lacks, naming those that it has.
    """
    sizes = table.get("sizes", {})
    if not isinstance(sizes, dict):
        raise ValueError(f"recipe: sizes = {sizes!r} is {kind_of(sizes)}, needed tables; write [sizes.cpu]")
    for name, part in sizes.items():
        if not isinstance(part, dict):
            raise ValueError(f"recipe: sizes.{name} = {part!r} is {kind_of(part)}, needed a table [sizes.{name}]")
    if size and size not in sizes:
        known = f"known: {', '.join(sizes)}" if sizes else "the recipe has no tables [sizes.NAME]; leave --size out"
        raise ValueError(f"recipe: size {size!r} is not a size of {table['name']}; {known}")
    written = {key: value for key, value in table.items() if key != "sizes"}
    chosen = size or (DEFAULT if DEFAULT in sizes else "")
    if not chosen:
        return written
    sized = _over(written, sizes[chosen])
    return {**sized, "name": f"{sized['name']}-{chosen}"}


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """One table laid over another, key by key."""
    merged = dict(below)
    for key, value in above.items():
        before = merged.get(key)
        merged[key] = _over(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
