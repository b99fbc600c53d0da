"""Running a model to look inside: exact attention weights of every layer, hidden states, positions moved by k.

Kernels such as SDPA give no weights, so a pass that asks for them runs the host's own eager attention; afterwards the
host is as it was. Weights are handed over layer by layer and never kept for all layers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.func import functional_call

from locant.analysis.model import Host, submodule
from locant.hf.families import class_names
from locant.hf.interface import NAME, Route

Visit = Callable[[int, Tensor], None]  # (layer, weights [B H I J])


@dataclass(frozen=True)
class Pass:
    """What a pass returns: the model's output, and the hidden states [B I M] where they were asked for."""

    output: Any
    hidden: tuple[Tensor, ...]  # the last may be of another width (OPT)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode without gradient; every module gets its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _eager(host: Host) -> Iterator[None]:
    """The host's eager attention, in this stack alone; attached models have their own function, which gives weights."""
    configs = {id(c): c for m in host.stack.modules() if (c := getattr(m, "config", None)) is not None}
    internal = "_attn_implementation_internal"
    kernels = [] if host.attachment else [(c, vars(c)[internal]) for c in configs.values() if internal in vars(c)]
    try:
        for config, _ in kernels:
            setattr(config, internal, "eager")  # the property of transformers would reach other models' configs
        yield
    finally:
        for config, kernel in kernels:
            setattr(config, internal, kernel)


def _ask_for_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    route: Route | None = kwargs.get(NAME)
    return args, kwargs if route is None else {**kwargs, NAME: replace(route, weights=True)}


@contextmanager
def _watched(host: Host, visit: Visit) -> Iterator[None]:
    """Each attention module hands its weights to ``visit`` and passes on none."""
    calls = 0

    def look(module: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        weights = output[-1] if isinstance(output, tuple) else None
        if not isinstance(weights, Tensor) or weights.dim() != 4:
            raise ValueError(
                f"analysis: {type(module).__name__} returned no attention weights (a {type(weights).__name__}); "
                "its family computes attention in a way that cannot be watched"
            )
        visit(calls, weights)
        calls += 1
        return (*output[:-1], None)

    with ExitStack() as hooks:
        for module in host.attention:
            hooks.callback(module.register_forward_hook(look).remove)
        if host.attachment is not None:
            handle = host.stack.register_forward_pre_hook(_ask_for_weights, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def run(
    host: Host,
    ids: Int[Tensor, "B I"],
    *,
    visit: Visit | None = None,
    hidden: bool = False,
    shift: int = 0,
    shift_specials: bool = True,
    whole: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Pass:
    """One pass over unpadded token ids, with positions 0, 1, 2, ... moved by ``shift``.

    ``visit`` is called with each layer's weights. ``whole``: the model as it was given, head and all, instead of its
    stack of layers; ``more``: further arguments. ``shift_specials=False`` leaves the first token where it is.
    Raises: ValueError for a shift past the table, and where a model gives no weights or states.
    """
    module = host.model if whole else host.stack
    device = next(host.model.parameters()).device
    arguments: dict[str, Any] = {"input_ids": ids.to(device), **(more or {})}
    parameters = inspect.signature(module.forward).parameters
    if "use_cache" in parameters:
        arguments["use_cache"] = False
    if hidden:
        arguments["output_hidden_states"] = True
    if visit is not None and host.layout.asks:
        arguments["output_attentions"] = True
    with ExitStack() as around:
        around.enter_context(evaluating(host.model))
        if visit is not None:
            around.enter_context(_eager(host))
            around.enter_context(_watched(host, visit))
        call = around.enter_context(_moved(host, module, ids.shape[-1], shift, shift_specials)) if shift else module
        if shift and not shift_specials and "attention_mask" in parameters:
            arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])  # else a gap reads as two documents
        output = call(**arguments)
    states = getattr(output, "hidden_states", None) if hidden else None
    if hidden and states is None:
        raise ValueError(f"analysis: {type(module).__name__} returned no hidden states, which this analysis reads")
    return Pass(output, tuple(states or ()))


# --- moving positions ---


def how_to_shift(host: Host) -> str:
    """How the positions of a model are moved: ``position_ids``, ``table rolled``, or ``no positions to move``."""
    if "position_ids" in inspect.signature(host.stack.forward).parameters or host.attachment is not None:
        return "position_ids"
    return "table rolled" if host.table is not None else "no positions to move"


@contextmanager
def _moved(host: Host, module: nn.Module, n: int, shift: int, specials: bool) -> Iterator[Callable[..., Any]]:
    limit = host.trained_length
    if limit is not None and n + shift > limit:
        raise ValueError(
            f"phase shift: {n} tokens moved by {shift} reach position {n + shift} but the model has {limit}; "
            f"shift by at most {max(limit - n, 0)}"
        )
    how = how_to_shift(host)
    if how != "position_ids":
        rolled = rolled_tables(host, module, shift, specials) if how == "table rolled" else {}
        yield lambda **arguments: functional_call(module, rolled, (), arguments)
        return
    ids = shifted_ids(host, n, shift, specials).to(next(host.model.parameters()).device)

    def put_in(stack: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "position_ids": ids}

    with ExitStack() as hooks:
        for stack in _stacks(host, module):
            hooks.callback(stack.register_forward_pre_hook(put_in, with_kwargs=True, prepend=True).remove)
        yield module


def _stacks(host: Host, module: nn.Module) -> list[nn.Module]:
    """The stacks of layers below a module that positions enter: two in an encoder with a decoder."""
    kind = type(host.stack)
    same = [
        stack for stack in module.modules() if type(stack) is kind or set(host.layout.stacks) & set(class_names(stack))
    ]
    return same or [host.stack]


def shifted_ids(host: Host, n: int, shift: int, specials: bool = True) -> Int[Tensor, "1 n"]:
    """Position ids as the host counts them (from its spare rows on where it reads ids as rows), moved by ``shift``."""
    reads_rows = host.attachment is None and host.table is not None and not hasattr(host.table, "offset")
    ids = torch.arange(n) + (host.spare_rows if reads_rows else 0)
    moved = ids + shift
    if not specials:
        moved[:1] = ids[:1]
    return moved[None]


def rolled_tables(host: Host, module: nn.Module, shift: int, specials: bool = True) -> dict[str, Tensor]:
    """The position tables below a module with row i + shift in place of row i, as copies."""
    named = {id(value): name for name, value in module.named_parameters()}
    rolled = {}
    for stack in _stacks(host, module):
        table: Any = submodule(stack, host.layout.table)
        rows = torch.arange(table.weight.shape[0], device=table.weight.device)
        first, last = host.spare_rows + (not specials), len(rows) - shift
        moved = rows.clone()
        moved[first:last] = rows[first:last] + shift
        rolled[named[id(table.weight)]] = table.weight[moved]
    return rolled
