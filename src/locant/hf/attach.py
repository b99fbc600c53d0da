"""Attach a position encoding to a Hugging Face model in place, and detach it again.

A stack of layers gets a submodule ``locant`` (the encodings) and a forward pre-hook, which computes the positions of
the call and hands them to the attention modules as a keyword. What the host brings of its own is taken out or kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from locant.backends import BACKENDS
from locant.catalog import SIZES
from locant.encoding import Encoding, Stack
from locant.hf import interface, starts
from locant.hf.attachment import Attachment, Held, Kept, NoRotation, Nothing, Spec, attachments
from locant.hf.build import build, host_sizes, is_named, spare_rows, table_rows
from locant.hf.configs import give_own_configs
from locant.hf.families import FAMILIES, ROTARY_NAMES, TABLE_NAMES, Site, class_names, find_sites
from locant.hf.hooks import Direct, begin, clear, enter, kernel_of, leave, meet, wait
from locant.hf.interface import NAME

Model = TypeVar("Model", bound=nn.Module)
EncodingLike = str | Sequence[str] | Callable[[], Encoding] | Encoding | Stack


def attach(
    model: Model,
    encoding: EncodingLike,
    *,
    keep_absolute: bool = False,
    share_layers: bool | None = None,
    backend: str = "auto",
    init: str = "paper",
    fit_inputs: Any = None,
    keep_scale: bool | None = None,
    **options: Any,
) -> Model:
    """Give every self-attention layer of a Hugging Face model a position encoding, in place; returns the model.

    ``encoding``: a name (``"a+b"`` composes), one name for each layer, an `Encoding`, or a `Stack`. Sizes (num_heads,
    head_dim, model_dim, max_length, causal) are read from the model; ``options`` override them and go to the encoding.
    What the host brings of its own (absolute table, rotary positions, T5's bias) is switched off, and its parameters
    leave the model, unless ``keep_absolute=True`` keeps it as it is. Models with several stacks (T5) get one attachment
    for each.

    ``init``: how the parameters start. ``"paper"``: as the method's authors draw them, from torch's global generator.
    ``"neutral"``: where the encoding changes nothing, so that the model is its host without what was switched off (with
    ``keep_absolute=True`` the host itself). ``"fit"``: fitted to what the host's own positions do in the logits of each
    layer (see `locant.hf.starts`; `locant.hf.fit_report` tells how much of it they explain), on ``fit_inputs``: token
    ids, a batch, or a list of batches; without them, on words drawn from the vocabulary. ``keep_scale`` leaves out the
    factor by which some methods (TUPE, DeBERTa) change the scale of the logits; so do neutral and fitted starts.

    In attached models ``position_ids`` count from 0 (ids that restart at 0, without a mask, are packed documents),
    ``positions=`` takes a `Positions`, and ``document_ids=`` keeps packed documents apart. Without ids they are counted
    over a 2-D ``attention_mask`` (eager on the CPU, the mask is looked at once, so that batches without left padding
    keep the fast path). ``output_attentions=True`` returns the weights, computed by the reference backend.
    Raises: ValueError for a model without known attention, one that is attached already, sizes it does not tell, and
    whatever the encoding refuses.
    """
    sites = _free_sites(model)
    _check_choices(model, sites, encoding, backend, init, fit_inputs)
    keep_scale = init != "paper" if keep_scale is None else keep_scale
    choices = Spec(_names(encoding), options, share_layers, keep_absolute, backend, {}, init, keep_scale)
    plans = [_plan(site, encoding, choices) for site in sites]
    interface.register()
    inputs = None if init != "fit" else _fit_inputs(plans, fit_inputs)
    host = None if inputs is None else _host_logits(model, inputs)
    give_own_configs(model, sites)
    for plan in plans:
        _install(plan)
        if init == "neutral":
            starts.neutralize(dict.fromkeys(plan.built))
    if host is not None and inputs is not None:
        try:
            starts.fit(model, host, inputs)
        except BaseException:
            detach(model)
            raise
    return model


@dataclass(frozen=True)
class _Plan:
    """What one stack of layers gets: all of it checked and built, none of it installed.

    ``stand_ins``: (kind, path, module) that takes the place of each thing the host brings of its own.
    """

    site: Site
    built: Stack
    spec: Spec
    stand_ins: list[tuple[str, str, nn.Module]]


def _free_sites(model: nn.Module) -> list[Site]:
    """The stacks of a model. Raises: ValueError where one is attached, or served from a model above it."""
    there = attachments(model)
    if there:
        raise ValueError(
            f"attach: {type(model).__name__} already has {there[0][2].stack.name!r} attached; "
            "call locant.hf.detach(model) first"
        )
    sites = find_sites(model)
    if any(hasattr(layer, "locant_index") for site in sites for _, layer in site.attention):
        raise ValueError(
            f"attach: the layers of {type(model).__name__} are served from a model above it already; call "
            "locant.hf.detach on that model first"
        )
    return sites


def _check_choices(
    model: nn.Module, sites: list[Site], encoding: EncodingLike, backend: str, init: str, fit_inputs: Any
) -> None:
    if backend not in ("auto", *BACKENDS):
        raise ValueError(
            f"attach: unknown backend {backend!r}; choose 'auto' or one of {', '.join(map(repr, BACKENDS))}"
        )
    if len(sites) > 1 and not is_named(encoding):
        raise ValueError(
            f"attach: {type(model).__name__} has {len(sites)} stacks of layers ({', '.join(s.path for s in sites)}), "
            f"which cannot share one {type(encoding).__name__}; give its name, or attach to each stack"
        )
    if fit_inputs is not None and init != "fit":
        raise ValueError(f"attach: fit_inputs were given but init={init!r} fits nothing; give init='fit'")


def _plan(site: Site, encoding: EncodingLike, choices: Spec) -> _Plan:
    options = choices.options
    sizes = {**host_sizes(site, options), **{k: v for k, v in options.items() if k in SIZES}}
    chosen = {k: v for k, v in options.items() if k not in SIZES}
    built = build(site, encoding, choices.share_layers, sizes, chosen, "model_dim" in options)
    starts.check_start(choices.init, dict.fromkeys(built), choices.keep_absolute)
    stand_ins = [] if choices.keep_absolute else _stand_ins(site, sizes["max_length"])
    return _Plan(site, built, replace(choices, sizes=sizes), stand_ins)


def _fit_inputs(plans: list[_Plan], given: Any) -> starts.Inputs:
    if given is not None:
        return starts.given_inputs(given)
    return starts.drawn_inputs([plan.site for plan in plans], [plan.spec.sizes for plan in plans])


def _host_logits(model: nn.Module, inputs: starts.Inputs) -> list[list[interface.Seen]]:
    """What goes into the logits of the host as it is, recorded beside an encoding that does nothing."""
    attach(model, "none", keep_absolute=True)
    try:
        return starts.record(model, inputs)
    finally:
        detach(model)


def detach(model: Model) -> Model:
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
            if isinstance(held.module, Kept):
                _put_back(parent, name, held.module.parameter, held.order)
                continue
            parent._modules[name] = held.module.train(site_module.training)
            if held.kind == "bias":
                parent.has_relative_attention_bias = True  # pyright: ignore[reportArgumentType]
        for module in site_module.modules():
            _remove_hooks(module)
            module.__dict__.pop("locant_index", None)
            module.__dict__.pop("locant_route", None)
            module.__dict__.pop(NAME, None)
            config = getattr(module, "config", None)
            if config is not None and kernel_of(config) == NAME:
                kernels[id(config)] = (config, attachment.kernel)
        del site_module.locant
        if isinstance(vars(site_module).get("forward"), Direct):
            del site_module.forward
    for config, kernel in kernels.values():
        _set_kernel(config, kernel)
    return model


def _names(encoding: EncodingLike) -> str | tuple[str, ...] | None:
    if isinstance(encoding, str):
        return encoding
    return tuple(encoding) if is_named(encoding) else None  # pyright: ignore[reportReturnType, reportArgumentType]


def _parent(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return root.get_submodule(above), name


def _stand_ins(site: Site, length: int) -> list[tuple[str, str, nn.Module]]:
    """(kind, path, module) that takes the place of each thing the host brings of its own."""
    if not site.own and (site.embeds or site.runner is not None) and site.family not in FAMILIES:
        raise ValueError(
            f"attach: {type(site.module).__name__} has no positions of its own that locant could switch off (looked "
            f"for modules called {', '.join(TABLE_NAMES + ROTARY_NAMES)}); keep_absolute=True leaves it as it is"
        )
    return [(kind, path, _stand_in(site, kind, path, length)) for kind, path in site.own]


def _stand_in(site: Site, kind: str, path: str, length: int) -> nn.Module:
    if kind == "weight":
        parent, name = _parent(site.module, path)
        return Kept(parent._parameters[name])  # pyright: ignore[reportArgumentType]
    module = site.module.get_submodule(path)
    if kind != "rotary":
        return Nothing(module, length if kind == "table" else 0)
    if not any("rot" in name.lower() or "rope" in name.lower() for name in class_names(module)):
        raise ValueError(
            f"attach: {path} of {type(site.module).__name__} is no rotary module locant knows (its class is "
            f"{type(module).__name__}); keep_absolute=True leaves it as it is"
        )
    return NoRotation(module)


def _set_kernel(config: Any, kernel: str | None) -> None:
    """Set it for this config only (the property of transformers would set it for all configs below, too)."""
    internal = "_attn_implementation_internal"
    setattr(config, internal if internal in vars(config) else "_attn_implementation", kernel)


def _install(plan: _Plan) -> None:
    site, built, spec = plan.site, plan.built, plan.spec
    module, attention = site.module, site.attention
    like = next((p for p in module.parameters() if p.is_floating_point()), None)
    if like is not None:
        built.to(device=_runs_on(module) or like.device if like.is_meta else like.device, dtype=like.dtype)
    kernel = kernel_of(attention[0][1].config)
    attachment = Attachment(built, spec, site, kernel)
    if spec.keep_absolute:
        attachment.kept_rows, attachment.spare_rows = table_rows(site), spare_rows(site)
    for kind, path, stand_in in plan.stand_ins:
        parent, name = _parent(module, path)
        attachment.held.append(_replace(parent, name, kind, path, stand_in))
        attachment.feeds_zeros |= kind == "table" and any(
            "_ids" in name for name, _ in parent.named_buffers(recurse=False)
        )
    module.locant = attachment.train(module.training)
    if site.runner is None:
        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)
        if site.hands_on:
            vars(module).setdefault("forward", Direct(module))
    else:
        runner = module.get_submodule(site.runner)
        if runner is not module:
            runner.__dict__[NAME] = module  # where to look; not registered
        runner.register_forward_pre_hook(wait, with_kwargs=True)
        for layer in site.layers:
            layer.register_forward_pre_hook(begin, with_kwargs=True)
    if not site.hands_on:
        runner = module.get_submodule(site.runner or "")
        runner.register_forward_hook(clear, always_call=True)
        for layer in (*site.layers, *(layer for _, layer in attention)):
            layer.__dict__["locant_route"] = None
    for index, (_, layer) in enumerate(attention):
        layer.locant_index = index  # pyright: ignore[reportArgumentType]
        layer.register_forward_pre_hook(meet, with_kwargs=True)
    for config in {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}.values():
        _set_kernel(config, NAME)


def _runs_on(module: nn.Module) -> torch.device | None:
    """The device of a stack whose weights accelerate has put aside (disk, CPU) and brings there for each call."""
    hooks = [vars(m)["_hf_hook"] for m in module.modules() if "_hf_hook" in vars(m)]
    hooks = [inner for hook in hooks for inner in getattr(hook, "hooks", (hook,))]
    found = (getattr(hook, "execution_device", None) for hook in hooks)
    device = next((device for device in found if device is not None), None)
    return None if device is None else torch.device(device)


def _replace(parent: nn.Module, name: str, kind: str, path: str, stand_in: nn.Module) -> Held:
    """Take out one thing of the host's own: a module makes way for its stand-in, a parameter for zeros."""
    if isinstance(stand_in, Kept):
        order = tuple(parent._parameters)
        del parent._parameters[name]
        parent.register_buffer(name, torch.zeros_like(stand_in.parameter.detach()), persistent=False)
        return Held(kind, path, stand_in, order)
    held = Held(kind, path, parent._modules[name])  # pyright: ignore[reportArgumentType]
    parent._modules[name] = stand_in
    if kind == "bias":
        parent.has_relative_attention_bias = False  # pyright: ignore[reportArgumentType]
    return held


def _put_back(parent: nn.Module, name: str, parameter: nn.Parameter, order: tuple[str, ...]) -> None:
    """A parameter returns to its place among the others."""
    delattr(parent, name)
    there = {**parent._parameters, name: parameter}
    parent._parameters.clear()
    parent._parameters.update({key: there.pop(key) for key in order if key in there} | there)


def _remove_hooks(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook in (enter, wait, begin, meet):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key, hook in list(module._forward_hooks.items()):
        if hook in (leave, clear):
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)
