"""What `attach` puts into a stack of layers: the encodings, how they were asked for, what they replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locant.encoding import Encoding, Stack
from locant.hf.families import Site
from locant.hf.interface import NAME, Route, Seen
from locant.positions import Positions


@dataclass(frozen=True)
class Spec:
    """How an attachment was asked for; ``encoding`` is None where an object was given instead of names.

    ``init``: how the parameters started; ``keep_scale``: the logit factors of encodings are left out. ``remedy``: what
    to do where it cannot be built again from a name.
    """

    encoding: str | tuple[str, ...] | None
    options: dict[str, Any]
    share_layers: bool | None
    keep_absolute: bool
    backend: str
    sizes: dict[str, Any]
    init: str = "paper"
    keep_scale: bool = False
    remedy: str = "attach it by name with its options"


@dataclass(frozen=True)
class Held:
    """A module of the host that was taken out, and where it goes back to; not registered, so in no state dict.

    ``order``: the names of its parent's parameters, where it is one of those (a `Kept`).
    """

    kind: str
    path: str
    module: nn.Module
    order: tuple[str, ...] = ()


class Attachment(nn.Module):
    """A stack's submodule ``locant``: the encodings, every distinct one once, and each tensor once in the state dict.

    ``layer_of`` says which encoding serves each attention module, ``acts`` whether it changes attention at all.
    """

    def __init__(self, stack: Stack, spec: Spec, site: Site, kernel: str | None) -> None:
        super().__init__()
        self.serve(stack)
        self.spec, self.family, self.kernel, self.own = spec, site.family, kernel, site.own
        self.bare = not site.embeds
        self.runner, self.hands_on = site.runner, site.hands_on
        self.parameter_names = parameter_names(site.module)
        self.held: list[Held] = []
        self.kept_rows: int | None = None  # rows of a kept absolute table
        self.spare_rows = 0  # rows of it before position 0
        self.fit: Any = None  # the report of init="fit"
        self.watch: Callable[[Seen], None] | None = None  # shown every call of an attention module
        self.longest_trained = 0  # tokens of the longest input in training mode, for the model card
        self.feeds_zeros = False  # the host reads buffers of limited length with its position ids
        keep_once(self)

    def serve(self, stack: Stack) -> None:
        """From here on, these encodings."""
        distinct = list(dict.fromkeys(stack))
        self.encodings = nn.ModuleList(distinct)
        self.layer_of = tuple(distinct.index(layer) for layer in stack)
        self.acts = tuple(_acts(layer) for layer in stack)
        self.embeds = any("embed" in layer.sites for layer in distinct)
        self._stack = (stack,)  # a tuple: the encodings are registered once, above

    @property
    def stack(self) -> Stack:
        """Which encoding serves each attention module."""
        return self._stack[0]

    def layers(self) -> tuple[Encoding, ...]:
        """The encoding of each attention module, in order."""
        return tuple(self.encodings[i] for i in self.layer_of)  # pyright: ignore[reportReturnType]

    def route(self, positions: Positions, weights: bool, tokens: int | None, came: Positions) -> Route:
        """What travels to the attention modules; ``came``: the positions before encodings prepared them."""
        if self.training and not torch.compiler.is_compiling():
            self.longest_trained = max(self.longest_trained, positions.num_keys)
        return Route(
            positions=positions,
            encodings=self.layers(),
            acts=self.acts,
            projections=self.family.projections,
            backend=self.spec.backend,
            host_kernel=self.kernel,
            keeps_bias=self.spec.keep_absolute or not self.family.bias,
            weights=weights,
            tokens=tokens,
            key_ids=None if came.contiguous else came.key,
            keeps_scale=self.spec.keep_scale,
            watch=self.watch,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Attachment:
        """Moves and casts reach what was taken out, too, and what layers share stays shared (also off ``meta``)."""
        for held in self.held:
            held.module._apply(fn)
        shared = list(_duplicates(self.named_parameters(remove_duplicate=False)))
        super()._apply(fn, recurse)
        for name, first in shared:
            above, _, last = name.rpartition(".")
            self.get_submodule(above)._parameters[last] = self.get_parameter(first)
        return self


def attachments(model: nn.Module) -> list[tuple[str, nn.Module, Attachment]]:
    """Every (path, stack of layers, attachment) of a model."""
    found = (
        (path, module, attachment_of(module)) for path, module in model.named_modules() if NAME not in vars(module)
    )
    return [(path, module, there) for path, module, there in found if there is not None]


def attachment_of(module: nn.Module) -> Attachment | None:
    """What is attached to a stack, or to the stack above a module that runs its layers."""
    there: Any = vars(module).get(NAME, module)._modules.get(NAME)
    if there is not None and not isinstance(there, Attachment):  # a wrapper of PEFT (modules_to_save): the one in use
        in_use = [] if there.disable_adapters else there.active_adapters
        there = there.modules_to_save[in_use[0]] if in_use else there.original_module
    return there


def _acts(encoding: Encoding) -> bool:
    return bool({"query_key", "terms"} & set(encoding.sites)) or encoding.logit_factor != 1.0


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The names of what a module's forward takes, in order."""
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _duplicates(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """(name, first name) of every tensor that appears under more than one name."""
    first: dict[int, str] = {}
    for name, tensor in named:
        if id(tensor) in first:
            yield name, first[id(tensor)]
        first.setdefault(id(tensor), name)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names: layers may share a transform, which has buffers alone."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def keep_once(module: nn.Module) -> None:
    """Tensors that appear under several names lie in the state dict once, and are loaded under all of them."""
    module.register_state_dict_post_hook(_drop_duplicates)
    module.register_load_state_dict_pre_hook(_fill_duplicates)


def _drop_duplicates(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, _ in _duplicates(_tensors(module)):
        state.pop(prefix + name, None)


def _fill_duplicates(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for name, first in _duplicates(_tensors(module)):
        if prefix + first in state:
            state.setdefault(prefix + name, state[prefix + first])


class StandIn(nn.Module):
    """Stands where a module of the host was, which stays out of the state dict; hosts may read its attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # a tuple: not registered

    def __getattr__(self, name: str) -> Any:
        """What hosts read beside calling it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"][0], name)


class Nothing(StandIn):
    """Stands where a position table was: adds exactly zero, whatever it is asked for.

    ``rows``: the length that is served instead, for hosts that compare their input with the rows of the table (CLIP).
    """

    def __init__(self, original: nn.Module, rows: int = 0) -> None:
        super().__init__(original)
        self.rows = rows

    @property
    def weight(self) -> Tensor:
        """The table as zeros, for hosts that read it."""
        table: Tensor = self._original[0].weight.detach()  # pyright: ignore
        return table.new_zeros(max(len(table), self.rows), *table.shape[1:])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Zero, on the device of the first tensor; as many as there are hidden states, where it is given those."""
        given = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if given is not None and given.is_floating_point() and given.dim() == 3:
            return torch.zeros_like(given)
        return torch.zeros((), device=None if given is None else given.device)


class NoRotation(StandIn):
    """Stands where rotary positions were: what they give for the angle zero, in the form and shape they have."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cosine 1 (times the host's own factor) and sine 0; or angles, or complex numbers."""
        (rotary,) = self._original
        with torch.no_grad():
            return _unturned(rotary(*args, **kwargs), float(getattr(rotary, "attention_scaling", None) or 1.0))


def _unturned(given: Any, factor: float) -> Any:
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(t, Tensor) for t in given):
        return torch.full_like(given[0], factor), torch.zeros_like(given[1])
    if isinstance(given, Tensor):
        return torch.full_like(given, factor) if given.is_complex() else torch.zeros_like(given)
    raise TypeError(
        f"attach: a rotary module gave {type(given).__name__}; locant knows cosine and sine, angles and complex "
        "numbers, so attach with keep_absolute=True, which leaves it as it is"
    )


class Kept(nn.Module):
    """Holds a parameter that was taken out."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter
