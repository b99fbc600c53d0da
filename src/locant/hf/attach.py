"""Attach a position encoding to a Hugging Face model in place, and detach it again.

A stack of layers gets a submodule ``locant`` (the encodings) and a forward pre-hook, which computes the positions of the
call and hands them to the attention modules as a keyword. What the host brings of its own is taken out, unless it is kept.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.backends import BACKENDS
from locant.encoding import SIZES, Encoding, Stack, Sum, encoding_class, load, option_names, stack
from locant.hf import entrance, interface
from locant.hf.attachment import Attachment, Held, NoRotation, Nothing, Spec, attachments
from locant.hf.families import FAMILIES, Site, embedding, find_sites, size
from locant.hf.interface import NAME, Route

EncodingLike = str | Sequence[str] | Callable[[], Encoding] | Encoding | Stack
FIELDS = {  # size: the public config fields that tell it
    "num_heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "model_dim": ("hidden_size", "d_model", "dim", "n_embd"),
    "head_dim": ("head_dim", "d_kv", "attention_head_size", "key_value_proj_dim"),
    "max_length": ("max_position_embeddings", "n_positions"),
}
DEFAULT_LENGTH = 512  # max_length of hosts that have no limit of their own


def attach(
    model: nn.Module,
    encoding: EncodingLike,
    *,
    keep_absolute: bool = False,
    share_layers: bool | None = None,
    backend: str = "auto",
    **options: Any,
) -> nn.Module:
    """Give every self-attention layer of a Hugging Face model a position encoding, in place; returns the model.

    ``encoding``: a name (``"a+b"`` composes), one name for each layer, an `Encoding`, or a `Stack`. Sizes (num_heads,
    head_dim, model_dim, max_length, causal) are read from the model; ``options`` override them and go to the encoding.
    What the host brings of its own (absolute table, rotary positions, T5's bias) is switched off, and its parameters leave
    the model, unless ``keep_absolute=True`` keeps it as it is. Models with several stacks (T5) get one attachment for each.
    Initial values are drawn from torch's global generator.

    In attached models ``position_ids`` count from 0 (ids that restart at 0, without a mask, are packed documents),
    ``positions=`` takes a `Positions`, and ``document_ids=`` keeps packed documents apart. Without ids they are counted
    over a 2-D ``attention_mask`` (eager on the CPU, the mask is looked at once, so that batches without left padding keep
    the fast path). ``output_attentions=True`` returns the weights, computed by the reference backend.
    Raises: ValueError for a model without known attention, one that is attached already, sizes it does not tell, and
    whatever the encoding refuses.
    """
    there = attachments(model)
    if there:
        raise ValueError(
            f"attach: {type(model).__name__} already has {there[0][2].stack.name!r} attached; call locant.hf.detach(model) first"
        )
    if backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"attach: unknown backend {backend!r}; choose 'auto' or one of {', '.join(map(repr, BACKENDS))}"
        )
    sites = find_sites(model)
    if len(sites) > 1 and not _named(encoding):
        raise ValueError(
            f"attach: {type(model).__name__} has {len(sites)} stacks of layers ({', '.join(s.path for s in sites)}), which "
            f"cannot share one {type(encoding).__name__}; give its name, or attach to each stack"
        )
    prepared = []
    for site in sites:
        sizes = {**host_sizes(site, options), **{k: v for k, v in options.items() if k in SIZES}}
        chosen = {k: v for k, v in options.items() if k not in SIZES}
        built = _build(site, encoding, share_layers, sizes, chosen, "model_dim" in options)
        names = encoding if isinstance(encoding, str) else tuple(encoding) if _named(encoding) else None  # pyright: ignore
        spec = Spec(names, options, share_layers, keep_absolute, backend, sizes)
        prepared.append((site, built, spec, [] if keep_absolute else _stand_ins(site)))
    interface.register()
    _give_own_configs(model, sites)
    for site, built, spec, stand_ins in prepared:
        _install(site, built, spec, stand_ins)
    return model


def detach(model: nn.Module) -> nn.Module:
    """Take the encodings out again and put back what the host had, bit for bit; returns the model.

    Raises: ValueError where nothing is attached.
    """
    found = attachments(model)
    if not found:
        raise ValueError(
            f"detach: {type(model).__name__} has nothing attached; call locant.hf.attach(model, name) first"
        )
    kernels = {}
    for _, site_module, attachment in found:
        for held in attachment.held:
            parent, name = _parent(site_module, held.path)
            parent._modules[name] = held.module.train(site_module.training)
            if held.kind == "bias":
                parent.has_relative_attention_bias = True  # pyright: ignore[reportAttributeAccessIssue]
        for module in site_module.modules():
            _remove_hooks(module)
            module.__dict__.pop("locant_index", None)
            config = getattr(module, "config", None)
            if config is not None and kernel_of(config) == NAME:
                kernels[id(config)] = (config, attachment.kernel)
        del site_module.locant
    for config, kernel in kernels.values():
        _set_kernel(config, kernel)
    return model


# --- building -----------------------------------------------------------------------------------------------------------


def _named(encoding: EncodingLike) -> bool:
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
            found = size(config, FIELDS[name]) or size(attention, FIELDS[name])
            if found is None:
                raise ValueError(
                    f"attach: {type(site.module).__name__} does not tell {name} (looked for {', '.join(FIELDS[name])} in its "
                    f"config); give {name}=..."
                )
            sizes[name] = found
    if sizes.get("head_dim") is None:
        told = size(config, FIELDS["head_dim"]) or size(attention, FIELDS["head_dim"])
        sizes["head_dim"] = told or sizes["model_dim"] // sizes["num_heads"]
    if sizes.get("max_length") is None:
        sizes["max_length"] = _host_length(site, config)
    sizes.setdefault("causal", bool(getattr(attention, "is_causal", False)))
    return sizes


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


def _build(
    site: Site, encoding: Any, share_layers: bool | None, sizes: dict[str, Any], options: dict[str, Any], forced: bool
) -> Stack:
    count = len(site.attention)
    runs = size(getattr(site.module, "config", None), ("num_hidden_layers",)) or count
    if share_layers is False and runs > count:
        raise ValueError(
            f"attach: {type(site.module).__name__} runs {runs} layers through {count} attention module(s), so layers share "
            "their encoding as they share their weights; leave out share_layers=False"
        )
    if isinstance(encoding, Stack):
        if len(encoding) != count:
            raise ValueError(
                f"attach: the stack has {len(encoding)} layers but {type(site.module).__name__} has {count}"
            )
        return encoding
    if isinstance(encoding, Encoding) or not _named(encoding):
        return stack(encoding, count, share_layers=share_layers)
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


def _parts(name: str) -> list[str]:
    return [part.strip() for part in name.split("+")]


def _embeds(name: str) -> bool:
    return encoding_class(name).embed is not Encoding.embed


def _load(name: str, sizes: dict[str, Any], width: int, options: dict[str, Any]) -> Encoding:
    """Where tokens are embedded with another width than layers have (ELECTRA, ALBERT), encodings of the input get that."""
    parts = _parts(name)
    if len(parts) == 1:
        return load(name, **{**sizes, **({"model_dim": width} if _embeds(name) else {})}, **options)
    for option in options:
        if not any(option in option_names(part) for part in parts):
            raise ValueError(f"{name}: no part takes the option {option!r}={options[option]!r}")
    return Sum(
        *(_load(part, sizes, width, {k: v for k, v in options.items() if k in option_names(part)}) for part in parts)
    )


# --- changing the host --------------------------------------------------------------------------------------------------


def _parent(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return root.get_submodule(above), name


def _stand_ins(site: Site) -> list[tuple[str, str, nn.Module]]:
    """(kind, path, module) that takes the place of each thing the host brings of its own."""
    if not site.own and site.embeds and site.family not in FAMILIES:
        raise ValueError(
            f"attach: {type(site.module).__name__} has no positions of its own that locant knows how to switch off (looked for "
            "modules called position_embeddings, embed_positions, wpe, rotary_emb); keep_absolute=True leaves it as it is"
        )
    found = []
    for kind, path in site.own:
        module = site.module.get_submodule(path)
        found.append((kind, path, _no_rotation(site, path, module) if kind == "rotary" else Nothing()))
    return found


def _no_rotation(site: Site, path: str, module: nn.Module) -> NoRotation:
    device = next((t.device for t in module.buffers()), None)
    kinds = getattr(getattr(site.module, "config", None), "layer_types", None)
    kinds = sorted(set(kinds)) if kinds and "layer_type" in inspect.signature(module.forward).parameters else [None]
    try:
        x, ids = torch.zeros(1, 1, 1, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.no_grad():
            widths = {module(x, ids, *([] if kind is None else [kind]))[0].shape[-1] for kind in kinds}
        (width,) = widths
        return NoRotation(width)
    except Exception as error:
        raise ValueError(
            f"attach: {path} of {type(site.module).__name__} is no rotary module locant knows (called with x and position_ids "
            f"it gave {type(error).__name__}: {error}); keep_absolute=True leaves it as it is"
        ) from error


def kernel_of(config: Any) -> str | None:
    """The attention implementation a config asks for."""
    return getattr(config, "_attn_implementation", None)


def _set_kernel(config: Any, kernel: str | None) -> None:
    """Set it for this config only (the property of transformers would set it for all configs below, too)."""
    internal = "_attn_implementation_internal"
    setattr(config, internal if internal in vars(config) else "_attn_implementation", kernel)


def _give_own_configs(model: nn.Module, sites: list[Site]) -> None:
    """Configs of the attached stacks are copied, everywhere in the model: another model may share the object."""
    used = {id(m.config): m.config for site in sites for m in site.module.modules() if hasattr(m, "config")}
    copies = {key: copy.copy(config) for key, config in used.items()}
    for module in model.modules():
        own = copies.get(id(module.__dict__.get("config")))
        if own is not None:
            module.config = own  # pyright: ignore[reportAttributeAccessIssue]


def _install(site: Site, built: Stack, spec: Spec, stand_ins: list[tuple[str, str, nn.Module]]) -> None:
    module, attention = site.module, site.attention
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    built.to(device=None if like is None else like.device, dtype=None if like is None else like.dtype)
    kernel = kernel_of(attention[0][1].config)
    attachment = Attachment(built, spec, site, kernel)
    if spec.keep_absolute:
        attachment.kept_rows, attachment.spare_rows = table_rows(site), spare_rows(site)
    for kind, path, stand_in in stand_ins:
        parent, name = _parent(module, path)
        attachment.held.append(Held(kind, path, parent._modules[name]))  # pyright: ignore[reportArgumentType]
        parent._modules[name] = stand_in
        if kind == "bias":
            parent.has_relative_attention_bias = False  # pyright: ignore[reportAttributeAccessIssue]
        attachment.feeds_zeros |= kind == "table" and any(
            "_ids" in name for name, _ in parent.named_buffers(recurse=False)
        )
    module.locant = attachment.train(module.training)
    module.register_forward_pre_hook(enter, with_kwargs=True)
    for index, (_, layer) in enumerate(attention):
        layer.locant_index = index  # pyright: ignore[reportArgumentType]
        layer.register_forward_pre_hook(meet, with_kwargs=True)
    for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
        _set_kernel(config, NAME)


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (enter, meet):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


# --- during a forward ---------------------------------------------------------------------------------------------------


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Before a stack: positions, what layers share, the input embedding; all of it read from the module itself."""
    attachment: Attachment = module.locant  # pyright: ignore[reportAssignmentType]
    arguments = {**dict(zip(attachment.parameter_names, args, strict=False)), **kwargs}
    config = getattr(module, "config", None)
    if config is not None and kernel_of(config) != NAME:
        raise RuntimeError(
            f"attach: the attention implementation of {type(module).__name__} was set to {kernel_of(config)!r} after attaching, "
            f"which would leave out {attachment.stack.name!r}; call locant.hf.detach(model) first, or set it to {NAME!r}"
        )
    at = entrance.arrival(arguments)
    given_ids = arguments.get("position_ids")
    documents = arguments.get("document_ids")
    positions = entrance.positions_of(arguments, at, attachment.spec.sizes["max_length"])
    positions = attachment.stack.prepare(positions)
    _check_kept(attachment, at, positions)
    if "position_ids" in attachment.parameter_names:
        _tell_host(module, attachment, arguments, at, given_ids, documents, positions)
    if (
        given_ids is not None
        and attachment.spec.sizes["causal"]
        and arguments.get("attention_mask") is None
        and at.fresh
    ):
        # documents are kept apart by their ids here; without a mask, the host would guess them from gaps in the ids
        arguments["attention_mask"] = torch.ones(at.batch, at.new, dtype=torch.long, device=at.device)
    if attachment.bare:
        _mask_for_bare(arguments)
    if attachment.embeds:
        _embed(module, attachment, arguments, positions)
    weights = arguments.get("output_attentions")
    weights = getattr(config, "output_attentions", False) if weights is None else weights
    arguments[NAME] = attachment.route(positions, bool(weights))
    return (), arguments


def _check_kept(attachment: Attachment, at: entrance.Arrival, positions: Any) -> None:
    if attachment.kept_rows is None or not isinstance(at.past, int):
        return
    limit, length = attachment.kept_rows - attachment.spare_rows, at.past + at.new
    if length > limit:
        raise ValueError(
            f"attach: the kept table of {attachment.family.name} has {limit} positions but the input reaches {length}; "
            f"truncate to {limit} tokens, or attach without keep_absolute"
        )


def _tell_host(
    module: nn.Module,
    attachment: Attachment,
    arguments: dict[str, Any],
    at: entrance.Arrival,
    given_ids: Tensor | None,
    documents: Tensor | None,
    positions: Any,
) -> None:
    """The host's own ``position_ids``: for a kept table by its own rule, else such that no buffer of it is too short."""
    if attachment.feeds_zeros:
        arguments["position_ids"] = torch.zeros(1, at.new, dtype=torch.long, device=at.device)
    elif attachment.kept_rows is None or given_ids is not None:
        return
    elif documents is not None:
        ids = positions.query + attachment.spare_rows
        arguments["position_ids"] = ids if ids.dim() == 2 else ids[None]
    elif attachment.spare_rows and attachment.embeds and arguments.get("input_ids") is not None:
        rule = module.embeddings.create_position_ids_from_input_ids  # pyright: ignore[reportAttributeAccessIssue]
        arguments["position_ids"] = rule(arguments["input_ids"], attachment.spare_rows - 1, at.past)


def _mask_for_bare(arguments: dict[str, Any]) -> None:
    """A bare encoder hands its mask to attention as it is: a padding mask [B J] becomes [B 1 1 J]."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        arguments["attention_mask"] = mask[:, None, None, :].bool()


def _embed(module: nn.Module, attachment: Attachment, arguments: dict[str, Any], positions: Any) -> None:
    if attachment.bare:
        arguments["hidden_states"] = attachment.stack.embed(arguments["hidden_states"], positions)
        return
    x = arguments.get("inputs_embeds")
    if x is None:
        table = embedding(module)
        assert table is not None
        x = table(arguments["input_ids"])
        arguments["input_ids"] = None
    arguments["inputs_embeds"] = attachment.stack.embed(x, positions)


def meet(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before an attention module: its input joins the route."""
    route: Route | None = kwargs.get(NAME)
    if route is None:
        return None
    x = args[0] if args else kwargs.get("hidden_states")
    return args, {**kwargs, NAME: replace(route, x=x)}
