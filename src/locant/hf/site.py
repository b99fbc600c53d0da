"""A stack of layers as `attach` sees it, and what can be told of the modules in it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

CROSS_NAMES = ("cross", "encoder_attn", "encoder_decoder_attention", "EncDecAttention")


@dataclass(frozen=True)
class Family:
    """One model family on the attention interface of transformers v5.

    ``stacks``: classes that embed tokens and run layers. ``encoders``: classes that only run layers (a bare encoder).
    ``attention``: classes of self-attention. ``projections``: the query and key projections of an attention module, or
    one fused module. ``table``, ``rotary``: the host's own positions, as paths below the stack; ``bias``: as a name
    below an attention module. ``padded_rows``: position 0 is row pad_token_id + 1 of the table (RoBERTa).
    """

    name: str
    stacks: tuple[str, ...]
    attention: tuple[str, ...]
    projections: tuple[str, ...]
    encoders: tuple[str, ...] = ()
    table: str | None = None
    rotary: str | None = None
    bias: str | None = None
    padded_rows: bool = False

    @property
    def own_positions(self) -> str:
        """What the host brings of its own, which `attach` switches off unless it is kept."""
        parts = [
            f"the learned absolute table ({self.table})" if self.table else "",
            f"rotary positions ({self.rotary})" if self.rotary else "",
            f"the bucketed bias ({self.bias} of the first block)" if self.bias else "",
        ]
        return " and ".join(part for part in parts if part) or "nothing"


@dataclass(frozen=True)
class Site:
    """One stack of layers found in a model: its path, the module, its family, its self-attention modules in order.

    ``embeds``: whether the stack embeds tokens (a bare encoder does not). ``own``: the host's own positions, as (kind,
    path below the stack). ``runner``: for hosts that are given no tokens (images, sound), the path below the stack of
    the module that runs its layers, which are ``layers``; tokens are counted where the first of them begins.
    ``hands_on``: whether keywords reach the attention function; where they do not, the route lies ready at the modules.
    """

    path: str
    module: nn.Module
    family: Family
    attention: tuple[tuple[str, nn.Module], ...]
    embeds: bool
    own: tuple[tuple[str, str], ...]
    runner: str | None = None
    layers: tuple[nn.Module, ...] = ()
    hands_on: bool = True


def class_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and of all classes above it."""
    return tuple(cls.__name__ for cls in type(module).__mro__)


def calls_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls the attention interface of transformers v5."""
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False


def hands_on(module: nn.Module) -> bool:
    """Whether the module's forward hands keywords that it does not know to what it calls."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return True
    (name,) = [p.name for p in parameters(module) if p.kind is inspect.Parameter.VAR_KEYWORD] or [None]
    return name is not None and source.count(f"**{name}") > 1


def parameters(module: nn.Module) -> list[inspect.Parameter]:
    """What a module's forward takes."""
    return list(inspect.signature(module.forward).parameters.values())


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether an attention module looks at another sequence."""
    near = ".".join(path.split(".")[-2:])
    named = any(name in near for name in CROSS_NAMES) or "CrossAttention" in type(module).__name__
    return named or bool(getattr(module, "is_cross_attention", False))


def embedding(stack: nn.Module) -> nn.Module | None:
    """The module that embeds a stack's tokens; None where it embeds none, or something else than tokens."""
    try:
        found = stack.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Embedding) or hasattr(found, "embedding_dim") else None


def size(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of the named fields that a config has."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # a config may refuse to tell what differs between its layers
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def below(path: str, above: str) -> bool:
    """Whether a module's path is at or below another one."""
    return path == above or not above or path.startswith(f"{above}.")


def paths_above(path: str) -> Iterator[str]:
    """The paths above one, nearest first."""
    while path:
        path = path.rpartition(".")[0]
        yield path
