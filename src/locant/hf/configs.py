"""The configs of a model: copies of its own, and which of them tell about one stack of layers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from locant.hf.families import Site, paths_above


def give_own_configs(model: nn.Module, sites: list[Site]) -> None:
    """Configs of the stacks and of the models around them are copied: another model may share the object.

    What is one object in several places of the model is one copy there.
    """
    around = [model.get_submodule(path) for site in sites for path in paths_above(site.path)]
    copies: dict[int, Any] = {}
    for module in (*around, *(module for site in sites for module in site.module.modules())):
        if hasattr(module, "config"):
            _copied(module.config, copies)
    for module in model.modules():
        own = copies.get(id(module.__dict__.get("config")))
        if own is not None:
            module.config = own


def _copied(config: Any, copies: dict[int, Any]) -> Any:
    """A copy of a config and of the configs in it, each object once."""
    if id(config) not in copies:
        copies[id(config)] = fresh = copy.copy(config)
        for name, part in _parts(config):
            setattr(fresh, name, _copied(part, copies))
    return copies[id(config)]


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, config) of the configs that lie in one."""
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            yield name, part


def _nested(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in _parts(config):
        yield f"{path}{name}", part
        yield from _nested(part, f"{path}{name}.")


def configs_of(model: nn.Module, site: Site) -> list[Any]:
    """Every config of a model that tells about one stack: its own, and those that are saved for it.

    Raises: ValueError where the config of a model around it holds several that could be meant.
    """
    own: Any = getattr(site.module, "config", None)
    found = {} if own is None else {id(own): own}
    for path in paths_above(site.path) if found else ():
        config: Any = getattr(model.get_submodule(path), "config", None)
        alike = [(name, part) for name, part in (("", config), *_nested(config)) if type(part) is type(own)]
        same = [part for _, part in alike if id(part) in found] or [part for name, part in alike if not name]
        same = same or [part for name, part in alike if len(alike) == 1 or _names(name, site.path)]
        if alike and not same:
            raise ValueError(
                f"extend: the config of {type(model).__name__} holds {', '.join(name for name, _ in alike)}, and which "
                f"of them is that of {site.path} cannot be told; extend that part, and build the whole from its config"
            )
        found |= {id(part): part for part in same}
    return list(found.values())


def _names(name: str, path: str) -> bool:
    """Whether a config's name is that of a module on a path (``text_config``: ``text_model``, ``text``)."""
    stem = name.rpartition(".")[2].removesuffix("_config")
    return any(part == stem or part.startswith(f"{stem}_") for part in path.split("."))
