"""Where hosts without a row keep their layers and positions: a search by names, classes and the code of forwards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from locant.hf.site import (
    Family,
    Site,
    below,
    calls_interface,
    class_names,
    embedding,
    hands_on,
    is_cross,
    parameters,
    paths_above,
)

# What a host without a row is searched for: tables are modules or parameters, by name; rotary modules by class.
TABLE_NAMES = (
    "position_embeddings",
    "position_embedding",
    "mid_position_embeddings",
    "positions_embed",
    "position_embeds_layer",
    "positional_embedding",
    "embed_positions",
    "pos_embed",
    "pos_embedding",
    "pos_conv_embed",
    "wpe",
)
ROTARY_NAMES = ("rotary_emb", "rotary_pos_emb")
ROTARY_CLASSES = ("RotaryEmbedding", "RotaryPositionEmbedding", "RotaryPositionalEmbedding", "RopePositionEmbedding")
BIAS_NAME = "relative_attention_bias"
PROJECTION_NAMES = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"), ("c_attn",))


def generic_sites(model: nn.Module) -> Iterator[Site]:
    """Families without a row: modules whose forward calls the interface, below the smallest stack that has tokens.

    Stacks that embed tokens come first; only a model without one is served where its layers run.
    """
    modules = dict(model.named_modules())
    attention = {p: m for p, m in modules.items() if calls_interface(m) and not is_cross(p, m)}
    homes = list(dict.fromkeys(h for h in (_token_home(p, modules) for p in attention) if h is not None))
    homes = [h for h in homes if not any(other != h and below(other, h) for other in homes)]
    if homes:
        for home in homes:
            depth = {p: _depth(_runner(p, modules)) for p in attention if below(p, home)}  # towers sit deeper
            found = tuple((_relative(p, home), attention[p]) for p in depth if depth[p] == min(depth.values()))
            yield _generic_site(home, modules[home], found)
        return
    if _takes_tokens(model):
        return  # its own attention is not on the interface, a tower within it is not the model
    runs: dict[str, list[str]] = {}
    for path in attention:
        runner = _runner(path, modules)
        if runner is not None:
            runs.setdefault(runner, []).append(path)
    for runner, paths in runs.items():
        home = _home(runner, [r for r in runs if r != runner], modules)
        found = tuple((_relative(p, home), modules[p]) for p in paths)
        layers = dict.fromkeys(modules[_layer(p, modules)] for p in paths)
        yield _generic_site(home, modules[home], found, _relative(runner, home), tuple(layers))


def _generic_site(
    path: str,
    module: nn.Module,
    attention: tuple[tuple[str, nn.Module], ...],
    runner: str | None = None,
    layers: tuple[nn.Module, ...] = (),
) -> Site:
    own = _found_own(module, runner or "")
    first = attention[0][1]
    biases = [p for p, m in attention if hasattr(m, BIAS_NAME)]
    family = Family(
        str(getattr(getattr(module, "config", None), "model_type", type(module).__name__)),
        (type(module).__name__,),
        tuple({type(m).__name__ for _, m in attention}),
        next((names for names in PROJECTION_NAMES if all(hasattr(first, n) for n in names)), ()),
        table=next((p for kind, p in own if kind in ("table", "weight")), None),
        rotary=next((p for kind, p in own if kind == "rotary"), None),
        bias=BIAS_NAME if biases else None,
    )
    own += tuple(("bias", f"{p}.{BIAS_NAME}") for p in biases)
    between = dict.fromkeys(p for a, _ in attention for p in (a, *paths_above(a)) if below(p, runner or ""))
    links = (module.get_submodule(p) for p in between)
    handed = all(hands_on(link) for link in links if not isinstance(link, (nn.ModuleList, nn.ModuleDict)))
    return Site(path, module, family, attention, runner is None, own, runner, layers, handed)


def _found_own(stack: nn.Module, runner: str) -> tuple[tuple[str, str], ...]:
    """Position tables (modules or parameters) and rotary modules below a stack, by name and class, towers left out."""
    tables, rotary = [], []
    towers = [path for path, module in stack.named_modules() if is_tower(module) and not below(runner, path)]
    for path, module in stack.named_modules():
        if any(below(path, tower) for tower in towers):
            continue
        if path.rpartition(".")[2] in TABLE_NAMES:
            tables.append(("table", path))
        elif is_rotary(path, module):
            rotary.append(("rotary", path))
        tables += [
            ("weight", f"{path}.{name}" if path else name)
            for name, _ in module.named_parameters(recurse=False)
            if name in TABLE_NAMES
        ]
    return tuple(tables + rotary)


def is_rotary(path: str, module: nn.Module) -> bool:
    """Whether a module turns ids into rotary positions."""
    return path.rpartition(".")[2] in ROTARY_NAMES or any(
        name in cls for name in ROTARY_CLASSES for cls in class_names(module)
    )


# --- homes of attention modules ---


def _takes_tokens(module: nn.Module) -> bool:
    return embedding(module) is not None and "input_ids" in inspect.signature(module.forward).parameters


def is_tower(module: nn.Module) -> bool:
    """Whether a module is a model of images or sound (within another one, as a rule)."""
    reads = getattr(module, "main_input_name", "input_ids")
    return (
        reads != "input_ids" and reads in (names := [p.name for p in parameters(module)]) and "input_ids" not in names
    )


def _relative(path: str, above: str) -> str:
    return path[len(above) :].lstrip(".")


def _depth(path: str | None) -> int:
    return len(path.split(".")) if path else 0


def _token_home(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The nearest stack above an attention module that embeds tokens."""
    for above in paths_above(path):
        module = modules[above]
        if is_tower(module):
            return None
        if _takes_tokens(module):
            return above
    return None


def _layer(path: str, modules: dict[str, nn.Module]) -> str:
    """The layer an attention module belongs to: the element of the nearest list above it."""
    inner = path
    for above in paths_above(path):
        if isinstance(modules[above], (nn.ModuleList, nn.Sequential)):
            return inner
        inner = above
    return path


def _runner(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The module whose forward runs the list of layers that an attention module belongs to."""
    layer = _layer(path, modules)
    return next((p for p in paths_above(layer) if not isinstance(modules[p], (nn.ModuleList, nn.Sequential))), None)


def _home(runner: str, others: list[str], modules: dict[str, nn.Module]) -> str:
    """The model around a runner of layers that brings positions, if it runs no others; else the nearest model."""
    around: list[str] = []
    for path in (runner, *paths_above(runner)):
        if any(below(other, path) for other in others):
            break
        if hasattr(modules[path], "get_input_embeddings"):
            around.append(path)
    return next((p for p in around if _found_own(modules[p], _relative(runner, p))), around[0] if around else runner)
