"""What happens in a forward of an attached model: hooks on each stack of layers, and one on each attention module.

Hooks are plain functions and read everything from the module they run on, so that copies of a model are independent.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from locant.hf import entrance
from locant.hf.attachment import Attachment, attachment_of
from locant.hf.families import embedding
from locant.hf.interface import NAME, Route
from locant.positions import Positions


def kernel_of(config: Any) -> str | None:
    """The attention implementation a config asks for."""
    return getattr(config, "_attn_implementation", None)


@dataclass
class Waiting:
    """What travels in place of a route where tokens are counted only when the first layer is reached (images, sound).

    ``first`` is that layer: it fills in the route, and embeds (again, when its forward is replayed).
    """

    attachment: Attachment
    arguments: dict[str, Any]
    weights: bool
    route: Route | None = None
    first: nn.Module | None = None


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Before a stack: positions, what layers share, the input embedding; all of it read from the module itself."""
    attachment = attachment_of(module)
    assert attachment is not None
    arguments = {**dict(zip(attachment.parameter_names, args, strict=False)), **kwargs}
    _check_kernel(module, attachment)
    at = entrance.arrival(arguments)
    _check_filled(attachment, at.device)
    given_ids = arguments.get("position_ids")
    documents = arguments.get("document_ids")
    came = entrance.positions_of(arguments, at, attachment.spec.sizes["max_length"])
    positions = attachment.stack.prepare(came, at.batch)
    _check_kept(attachment, at, given_ids)
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
    route = attachment.route(positions, _wants_weights(module, arguments), at.tokens, came)
    return (), _send(module, attachment, arguments, route)


def _send(module: nn.Module, attachment: Attachment, kwargs: dict[str, Any], route: Route | Waiting) -> dict[str, Any]:
    """On its way as a keyword; or laid down where it is needed, for hosts that do not hand keywords on."""
    if attachment.hands_on:
        return {**kwargs, NAME: route}
    for layer in module.modules():
        if "locant_route" in vars(layer):
            layer.__dict__["locant_route"] = route
    return kwargs


def _sent(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    return kwargs.get(NAME, vars(module).get("locant_route"))


def clear(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """After a stack: what was laid down is taken away, so that nothing is computed with positions of another call."""
    for layer in module.modules():
        if "locant_route" in vars(layer):
            layer.__dict__["locant_route"] = None


class Direct:
    """The forward of a stack for those who call it by name, past the hooks (sentence-transformers does).

    An object, since a bound method would come out of a pickle as that of the class.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self.module).forward, self.module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the class computes, with positions."""
        module: Any = self.module
        forward = type(module).forward
        if NAME in kwargs:
            return forward(module, *args, **kwargs)
        args, kwargs = enter(module, args, kwargs)
        output = forward(module, *args, **kwargs)
        leave(module, args, kwargs, output)
        return output


def _check_kernel(module: nn.Module, attachment: Attachment) -> None:
    config = getattr(module, "config", None)
    if config is not None and kernel_of(config) != NAME:
        raise RuntimeError(
            f"attach: the attention implementation of {type(module).__name__} was set to {kernel_of(config)!r} after "
            f"attaching, which would leave out {attachment.stack.name!r}; call locant.hf.detach(model) first, or set "
            f"it to {NAME!r}"
        )


def _check_filled(attachment: Attachment, device: torch.device) -> None:
    """Refuse encodings without numbers: their tensors are read here, where no hook of accelerate brings them back."""
    some = None if torch.compiler.is_compiling() else next(attachment.parameters(), None)
    if some is not None and some.is_meta and device.type != "meta":
        raise RuntimeError(
            f"attach: the parameters of {attachment.stack.name!r} lie on meta but the input on {device}: they were "
            "never filled, or put aside by accelerate after attaching; save the model and load it with "
            "from_pretrained(folder, device_map=...), or put the host aside first and attach then"
        )


def _wants_weights(module: nn.Module, arguments: dict[str, Any]) -> bool:
    asked = arguments.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if asked is None else asked)


def wait(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the module that runs the layers of a host that is given no tokens: what was given waits for the count."""
    attachment = attachment_of(module)
    assert attachment is not None
    _check_kernel(module, attachment)
    own = {name: kwargs.pop(name) for name in ("positions", "document_ids") if name in kwargs}
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    arguments = {**own, "attention_mask": kwargs.get("attention_mask"), "past_key_values": cache}
    return args, _send(module, attachment, kwargs, Waiting(attachment, arguments, _wants_weights(module, kwargs)))


def begin(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a layer of such a host: the first one that is reached counts the tokens and embeds."""
    waiting = _sent(module, kwargs)
    if not isinstance(waiting, Waiting):
        return None
    x = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(x, Tensor) or x.dim() not in (2, 3):
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"attach: the layers of {waiting.attachment.family.name} were given {shape}, but a sequence [batch, "
            "tokens, width] is needed to tell who sits where; detach, and give the model no encoding here"
        )
    batched = x if x.dim() == 3 else x[None]
    if waiting.route is None:
        waiting.route, waiting.first = _counted(waiting, batched), module
    if waiting.first is not module or not waiting.attachment.embeds:
        return None
    x = waiting.attachment.stack.embed(batched, waiting.route.positions).reshape(x.shape)
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _counted(waiting: Waiting, x: Tensor) -> Route:
    attachment, arguments = waiting.attachment, {**waiting.arguments, "hidden_states": x}
    mask = arguments["attention_mask"]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != x.shape[:2]:
        arguments["attention_mask"] = None  # of pixels or samples, not of tokens
    at = entrance.arrival(arguments)
    came = entrance.positions_of(arguments, at, attachment.spec.sizes["max_length"])
    return attachment.route(attachment.stack.prepare(came, at.batch), waiting.weights, at.tokens, came)


def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """After a stack: a cache that the host made itself gets the ids of its keys, as they came."""
    laid = (vars(layer)["locant_route"] for layer in module.modules() if "locant_route" in vars(layer))
    route = kwargs[NAME] if NAME in kwargs else next(laid, None)
    if (
        not isinstance(route, Route)
        or route.key_ids is None
        or kwargs.get("cache", kwargs.get("past_key_values")) is not None
    ):
        return
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    for cache in values:
        if isinstance(cache, Cache):
            entrance.keep(cache, route.key_ids if route.key_ids.dim() == 2 else route.key_ids[None])


def _check_kept(attachment: Attachment, at: entrance.Arrival, given_ids: Tensor | None) -> None:
    if attachment.kept_rows is None:
        return
    who = f"attach: the kept table of {attachment.family.name}"
    check_rows(who, attachment.kept_rows, attachment.spare_rows, at, given_ids, "attach without keep_absolute")


def check_rows(who: str, rows: int, spare: int, at: entrance.Arrival, given_ids: Tensor | None, remedy: str) -> None:
    """Refuse input that reaches past a host's own table of positions; ``spare`` rows of it lie before position 0."""
    if not isinstance(at.past, int):
        return
    limit, length = rows - spare, at.past + at.new
    if given_ids is not None and given_ids.numel() and entrance.readable(given_ids):
        # the table reads explicit ids as they are, and the host would fail on the index
        limit, length = rows, int(given_ids.max()) + 1
    if length > limit:
        raise ValueError(
            f"{who} has {limit} positions but the input reaches {length}; truncate to {limit} tokens, or {remedy}"
        )


def _tell_host(
    module: nn.Module,
    attachment: Attachment,
    arguments: dict[str, Any],
    at: entrance.Arrival,
    given_ids: Tensor | None,
    documents: Tensor | None,
    positions: Positions,
) -> None:
    """The host's own ``position_ids``: by its own rule for a kept table, else such that no buffer is too short."""
    if attachment.feeds_zeros:
        arguments["position_ids"] = torch.zeros(1, at.new, dtype=torch.long, device=at.device)
    elif attachment.kept_rows is None or given_ids is not None:
        return
    elif documents is not None:
        ids = positions.query + attachment.spare_rows
        arguments["position_ids"] = ids if ids.dim() == 2 else ids[None]
    elif attachment.spare_rows and attachment.embeds and arguments.get("input_ids") is not None:
        rule: Any = module.get_submodule("embeddings").create_position_ids_from_input_ids
        arguments["position_ids"] = rule(arguments["input_ids"], attachment.spare_rows - 1, at.past)


def _mask_for_bare(arguments: dict[str, Any]) -> None:
    """A bare encoder hands its mask to attention as it is: a padding mask [B J] becomes [B 1 1 J]."""
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        arguments["attention_mask"] = mask[:, None, None, :].bool()


def _embed(module: nn.Module, attachment: Attachment, arguments: dict[str, Any], positions: Positions) -> None:
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
    route: Route | Waiting | None = _sent(module, kwargs)
    if isinstance(route, Waiting):
        route = route.route
    if route is None:
        return None
    x = args[0] if args else kwargs.get("hidden_states")
    route = replace(route, x=x[None] if isinstance(x, Tensor) and x.dim() == 2 else x)  # towers hand on [tokens, width]
    if NAME in kwargs:
        return args, {**kwargs, NAME: route}
    module.__dict__["locant_route"] = route
    return None
