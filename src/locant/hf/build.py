"""What to build for a host: its sizes, and the encodings of its layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from locant.catalog import SIZES, encoding_class, load, option_names, stack
from locant.encoding import Encoding, Stack, Sum
from locant.hf.families import Site, embedding, size

FIELDS = {  # size: the public config fields that tell it
    "num_heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "model_dim": ("hidden_size", "d_model", "dim", "n_embd"),
    "head_dim": ("head_dim", "d_kv", "attention_head_size", "key_value_proj_dim"),
    "max_length": ("max_position_embeddings", "n_positions"),
}
WIDTHS = ("qk_head_dim", *FIELDS["head_dim"])  # of an attention module; the first is the whole width of latent heads
DEFAULT_LENGTH = 512  # max_length of hosts that have no limit of their own


def is_named(encoding: Any) -> bool:
    """Whether an encoding is given by name (or one name for each layer), not as an object."""
    return isinstance(encoding, str) or (isinstance(encoding, Sequence) and all(isinstance(n, str) for n in encoding))


def host_sizes(site: Site, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Sizes of one stack of layers, from public config fields or its attention modules.

    Raises: ValueError for a size that neither tells and that is not given.
    """
    given = given or {}
    attention = site.attention[0][1]
    config = getattr(site.module, "config", None) or getattr(attention, "config", None)
    sizes: dict[str, Any] = {k: given[k] for k in SIZES if k in given}
    for name in ("num_heads", "model_dim"):
        if sizes.get(name) is None:
            told = shape_of(attention).get(name)
            found = told or size(config, FIELDS[name]) or size(attention, FIELDS[name])
            if found is None:
                raise ValueError(
                    f"attach: {type(site.module).__name__} does not tell {name} (looked for {', '.join(FIELDS[name])} "
                    f"in its config); give {name}=..."
                )
            sizes[name] = found
    if sizes.get("head_dim") is None:
        told = shape_of(attention).get("head_dim") or size(config, FIELDS["head_dim"])
        sizes["head_dim"] = told or sizes["model_dim"] // sizes["num_heads"]
    if sizes.get("max_length") is None:
        sizes["max_length"] = _host_length(site, config)
    sizes.setdefault("causal", bool(getattr(attention, "is_causal", False)))
    return sizes


def shape_of(attention: nn.Module) -> dict[str, int]:
    """Number of heads and head width, as far as an attention module tells them: layers may differ."""
    told = {"num_heads": size(attention, FIELDS["num_heads"]), "head_dim": size(attention, WIDTHS)}
    return {name: value for name, value in told.items() if value is not None}


def _host_length(site: Site, config: Any) -> int:
    rows = table_rows(site)
    if rows is None:
        rows = size(config, FIELDS["max_length"]) or DEFAULT_LENGTH + spare_rows(site)
    return rows - spare_rows(site)


def table_rows(site: Site) -> int | None:
    """Rows of the host's own position table, if it has one."""
    path = next((path for kind, path in site.own if kind == "table"), None)
    table = None if path is None else site.module.get_submodule(path)
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def spare_rows(site: Site) -> int:
    """Rows of the table before position 0: padding_idx + 1 for RoBERTa and its kin, the offset of OPT and BART."""
    path = next((path for kind, path in site.own if kind == "table"), None)
    table = None if path is None else site.module.get_submodule(path)
    if isinstance(table, nn.Embedding):
        return int(getattr(table, "offset", 0) if table.padding_idx is None else table.padding_idx + 1)
    pad = getattr(getattr(site.module, "config", None), "pad_token_id", None)
    return pad + 1 if site.family.padded_rows and isinstance(pad, int) else 0


def build(
    site: Site, encoding: Any, share_layers: bool | None, sizes: dict[str, Any], options: dict[str, Any], forced: bool
) -> Stack:
    """The encodings of one stack of layers. ``forced``: the user gave model_dim, which is then used everywhere.

    Raises: ValueError where layers that share weights cannot have separate encodings, for an encoding that needs the
    causal mask of a decoder in an encoder, or an image where the host reads text, and what `locant.stack` refuses.
    """
    built = _built(site, encoding, share_layers, sizes, options, forced)
    for layer in dict.fromkeys(built):
        layer.check_causal(sizes["causal"])
        if site.embeds and site.runner is None:
            layer.check_text()
    return built


def _built(
    site: Site, encoding: Any, share_layers: bool | None, sizes: dict[str, Any], options: dict[str, Any], forced: bool
) -> Stack:
    count = len(site.attention)
    runs = size(getattr(site.module, "config", None), ("num_hidden_layers",)) or count
    if share_layers is False and runs > count:
        raise ValueError(
            f"attach: {type(site.module).__name__} runs {runs} layers through {count} attention module(s), so layers "
            "share their encoding as they share their weights; leave out share_layers=False"
        )
    if isinstance(encoding, Stack):
        for option, value in {**options, "share_layers": share_layers}.items():
            if value is not None:
                raise ValueError(
                    f"attach: {option}={value!r} was given beside a Stack, which is built already; give it to "
                    "locant.stack"
                )
        if len(encoding) != count:
            raise ValueError(
                f"attach: the stack has {len(encoding)} layers but {type(site.module).__name__} has {count}"
            )
        return encoding
    if isinstance(encoding, Encoding) or not is_named(encoding):
        return stack(encoding, count, share_layers=share_layers, **options)
    shapes = [shape_of(module) for _, module in site.attention]
    if any(shape != shapes[0] for shape in shapes) and shapes[0].items() <= sizes.items():
        return _unequal(
            [encoding] * count if isinstance(encoding, str) else list(encoding), shapes, share_layers, sizes, options
        )
    table = embedding(site.module) if site.embeds else None
    width = getattr(table, "embedding_dim", sizes["model_dim"])
    names = [encoding] if isinstance(encoding, str) else list(encoding)
    inputs = [name for name in names if any(_embeds(part) for part in _parts(name))]
    if forced or width == sizes["model_dim"] or not inputs:
        return stack(encoding, count, share_layers=share_layers, **sizes, **options)
    if not isinstance(encoding, str):
        raise ValueError(
            f"attach: {type(site.module).__name__} embeds tokens with width {width} but its layers have "
            f"{sizes['model_dim']}; layers of different kinds cannot use {inputs[0]!r} there, give one name"
        )
    return stack(lambda: _load(encoding, sizes, width, options), count, share_layers=share_layers)


def _unequal(
    names: list[str],
    shapes: list[dict[str, int]],
    share_layers: bool | None,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> Stack:
    """Layers of different head counts or widths: one object is shared by those layers for which it is the same."""
    shared: dict[Any, Encoding] = {}

    def part(name: str, shape: dict[str, int]) -> Encoding:
        own = {**sizes, **shape}
        taken = option_names(name)
        asked = inspect.signature(encoding_class(name).__init__).parameters
        key = name, *(own[fact] for fact in SIZES if fact in asked)
        built = load(name, **own, **{k: v for k, v in options.items() if k in taken})
        share = built.properties.layers == "shared" if share_layers is None else share_layers
        return shared.setdefault(key, built) if share or _embeds(name) else built

    for option in options:
        if not any(option in option_names(p) for name in names for p in _parts(name)):
            raise ValueError(
                f"{', '.join(dict.fromkeys(names))}: no part takes the option {option!r}={options[option]!r}"
            )
    layers = []
    for name, shape in zip(names, shapes, strict=True):
        parts = [part(p, shape) for p in _parts(name)]
        layers.append(parts[0] if len(parts) == 1 else Sum(*parts))
    return Stack(layers)


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split("+")]


def _embeds(name: str) -> bool:
    return encoding_class(name).embed is not Encoding.embed


def _load(name: str, sizes: dict[str, Any], width: int, options: dict[str, Any]) -> Encoding:
    """Where tokens are embedded with another width than layers have (ELECTRA, ALBERT), input encodings get it."""
    parts = _parts(name)
    if len(parts) == 1:
        return load(name, **{**sizes, **({"model_dim": width} if _embeds(name) else {})}, **options)
    for option in options:
        if not any(option in option_names(part) for part in parts):
            raise ValueError(f"{name}: no part takes the option {option!r}={options[option]!r}")
    return Sum(
        *(_load(part, sizes, width, {k: v for k, v in options.items() if k in option_names(part)}) for part in parts)
    )
