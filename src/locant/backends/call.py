"""The one signature all backends share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxtyping import Bool
from torch import Tensor

from locant.terms import Operands, Term

F = TypeVar("F", bound=Callable)


@dataclass(frozen=True)
class Call:
    """One attention call, checked: operands, terms, what is allowed ([B|1 H|1 I|1 J], None = everything), dropout.

    ``plain_causal``: ``allowed`` is nothing but the square causal mask.
    """

    operands: Operands
    terms: tuple[Term, ...]
    allowed: Bool[Tensor, "B H I J"] | None
    plain_causal: bool
    dropout: float
    return_weights: bool


@dataclass(frozen=True)
class Backend:
    """``refuses`` gives the reason why a call cannot be served (None = it can), ``run`` serves it."""

    refuses: Callable[[Call], str | None]
    run: Callable[[Call], Tensor | tuple[Tensor, Tensor]]


def constant(function: F) -> F:
    """While compiling, the function is called once and its result is a constant.

    It is the mark that `torch.compiler.assume_constant_result` sets, without the compiler, which takes seconds to load.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
