"""Kernels as operators of torch, so that torch.compile keeps a call whole and every kernel has one way in.

An operator takes tensors and one line of text. `pack` writes a call that way: the text names terms, rules and settings
(never a size, so lengths may stay dynamic), the tensors are all the rest. `unpack` reads it back. A rule must be a
dataclass whose fields are numbers, texts, None or rules.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from locant.backends import dropout
from locant.backends.call import Call
from locant.positions import Positions
from locant.terms import LowRankBias, Operands, PairBias, Rule, Term, WeightScale

ID_NAMES = ("query_special", "key_special", "query_document", "key_document")


class Kernel:
    """Forward and backward of a backend, outside autograd.

    ``keeps``: whether backward wants the output and the logarithm of each row's sum of exponentials; otherwise it is
    given two empty tensors.
    """

    keeps: bool

    def forward(self, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        """Output [B H I E], and the logarithms [B H I] (empty where they are not kept)."""
        raise NotImplementedError

    def backward(
        self, call: Call, seed: int, out: Tensor, lse: Tensor, dout: Tensor, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """Gradients of q, k, v and of `tensors_of` every term, at least where ``wanted``."""
        raise NotImplementedError


def tensors_of(term: Any, positions: Positions) -> tuple[Tensor, ...]:
    """The tensors of a term that may want a gradient; pair tensors with four axes."""
    if isinstance(term, LowRankBias):
        return term.query, term.key
    if isinstance(term, PairBias):
        return (_four(term.tensor(positions)),)
    if isinstance(term, WeightScale):
        return (_four(PairBias(term.scale).tensor(positions)),)
    return (term.table,)


def _four(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.dim())]


# --- writing ---------------------------------------------------------------------------------------------------------


def pack(call: Call) -> tuple[list[Tensor], str]:
    """The tensors of a call, those that may want a gradient first, and its text."""
    operands, positions = call.operands, call.operands.positions
    tensors = [operands.q, operands.k, operands.v]
    for term in call.terms:
        tensors.extend(tensors_of(term, positions))
    wanted = "".join("1" if tensor.requires_grad else "0" for tensor in tensors)
    scale = "None" if isinstance(operands.scale, Tensor) else repr(float(operands.scale))
    if isinstance(operands.scale, Tensor):
        tensors.append(operands.scale)
    masked = call.allowed is not None and not call.plain_causal
    if masked:
        tensors.append(call.allowed)  # pyright: ignore[reportArgumentType]
    if not positions.contiguous:
        tensors.extend((positions.query, positions.key))
    given = ""
    for name in ID_NAMES:
        ids = getattr(positions, name)
        given += "0" if ids is None else "1"
        if ids is not None:
            tensors.append(ids)
    terms = "".join(f"{_term_text(term)}, " for term in call.terms)
    contiguous = int(positions.contiguous)
    settings = f"{scale}, {float(call.dropout)!r}, {int(call.plain_causal)}, {int(masked)}, {contiguous}, {given!r}"
    return tensors, f"({wanted!r}, {settings}, ({terms}))"


def _term_text(term: Any) -> str:
    name, scaled = type(term).__name__, int(getattr(term, "scaled", False))
    rule = _rule_text(term.rule) if hasattr(term, "rule") else "None"
    return f"({name!r}, {rule}, {scaled})"


def _rule_text(rule: Rule) -> str:
    parts = ""
    for value in vars(rule).values():
        if not isinstance(value, Rule | int | float | str | None):
            raise TypeError(
                f"attention: rule {type(rule).__name__} has a field that is a {type(value).__name__}; rules are "
                "dataclasses of numbers, texts and rules"
            )
        parts += f"{_rule_text(value) if isinstance(value, Rule) else repr(value)}, "
    return f"('{type(rule).__module__}.{type(rule).__qualname__}', {parts})"


# --- reading ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _read(text: str) -> tuple[Any, ...]:
    wanted, scale, probability, causal, masked, contiguous, given, terms = ast.literal_eval(text)
    kinds = {kind.__name__: kind for kind in _below(Term)}
    read = tuple((kinds[name], None if rule is None else _rule(rule), bool(scaled)) for name, rule, scaled in terms)
    flags = tuple(flag == "1" for flag in wanted)
    return flags, scale, probability, bool(causal), bool(masked), bool(contiguous), given, read


def _below(kind: type) -> Iterator[type]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


def _rule(given: tuple[Any, ...]) -> Rule:
    name, *fields = given
    kind = next(kind for kind in _below(Rule) if f"{kind.__module__}.{kind.__qualname__}" == name)
    return kind(*(_rule(field) if isinstance(field, tuple) else field for field in fields))


def unpack(tensors: list[Tensor], text: str) -> tuple[Call, tuple[bool, ...]]:
    """The call that `pack` wrote, and which tensors want a gradient."""
    wanted, scale, probability, causal, masked, contiguous, given, kinds = _read(text)
    rest = iter(tensors)
    q, k, v = next(rest), next(rest), next(rest)
    terms = tuple(_term(kind, rule, scaled, rest) for kind, rule, scaled in kinds)
    scale = next(rest) if scale is None else scale
    allowed = next(rest) if masked else None
    ids: dict[str, Any] = {}
    if contiguous:
        positions = Positions.arange(q.shape[2], k.shape[2], device=q.device)
        ids = {"query": positions.query, "key": positions.key}
    else:
        ids = {"query": next(rest), "key": next(rest)}
    ids |= {name: next(rest) for name, there in zip(ID_NAMES, given, strict=True) if there == "1"}
    positions = Positions(**ids, span=0, length=0, contiguous=contiguous)  # bounds are for encodings, which are done
    if causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    return Call(Operands(q, k, v, positions, scale), terms, allowed, causal, probability, False), wanted


def _term(kind: Any, rule: Rule | None, scaled: bool, tensors: Iterator[Tensor]) -> Term:
    held = [next(tensors) for _ in range(2 if kind is LowRankBias else 1)]
    rules = [] if rule is None else [rule]
    more = {"scaled": scaled} if "scaled" in kind.__dataclass_fields__ else {}
    return kind(*held, *rules, **more)  # pyright: ignore[reportArgumentType]


# --- the operator ----------------------------------------------------------------------------------------------------


def refuses() -> str | None:
    """Why no operator can be used at all: an exported program is to run without locant."""
    return "an exported program would need locant's operators" if torch.compiler.is_exporting() else None


def register(name: str, kernel: Kernel) -> Callable[[Call], Tensor]:
    """Register ``locant::name`` with its backward; returns the function that serves a call through it."""
    forward = torch.library.custom_op(
        f"locant::{name}",
        lambda tensors, seed, text: kernel.forward(unpack(tensors, text)[0], int(seed)),
        mutates_args=(),
        schema="(Tensor[] tensors, Tensor seed, str text) -> (Tensor, Tensor)",
    )

    def gradients(dout: Tensor, out: Tensor, lse: Tensor, tensors: list[Tensor], seed: Tensor, text: str) -> Any:
        call, wanted = unpack(tensors, text)
        found = kernel.backward(call, int(seed), out, lse, dout, wanted)
        pairs = [(grad, tensor) for grad, tensor, want in zip(found, tensors, wanted, strict=False) if want]
        return [grad.to(tensor.dtype).contiguous() for grad, tensor in pairs]  # pyright: ignore[reportOptionalMemberAccess]

    backward = torch.library.custom_op(
        f"locant::{name}_backward",
        gradients,
        mutates_args=(),
        schema="(Tensor dout, Tensor out, Tensor lse, Tensor[] tensors, Tensor seed, str text) -> Tensor[]",
    )

    @forward.register_fake
    def _(tensors: list[Tensor], seed: Tensor, text: str) -> tuple[Tensor, Tensor]:
        q, v = tensors[0], tensors[2]
        lse = q.new_empty(q.shape[:3] if kernel.keeps else (0,), dtype=torch.float32)
        return q.new_empty(*q.shape[:3], v.shape[3]), lse

    @backward.register_fake
    def _(dout: Tensor, out: Tensor, lse: Tensor, tensors: list[Tensor], seed: Tensor, text: str) -> list[Tensor]:
        # Contiguous, as `gradients` gives them, whatever the layout of the tensor: heads come as transposed views.
        return [tensor.new_empty(tensor.shape) for tensor, want in zip(tensors, _read(text)[0], strict=False) if want]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, seed, ctx.text = inputs
        out, lse = output
        ctx.save_for_backward(out if kernel.keeps else lse, lse, seed, *tensors)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, None, None]:
        out, kept, seed, *tensors = ctx.saved_tensors
        found = iter(() if dout is None else backward(dout, out, kept, tensors, seed, ctx.text))
        flags = _read(ctx.text)[0] + (False,) * len(tensors)
        return [next(found, None) if want else None for _, want in zip(tensors, flags, strict=False)], None, None

    forward.register_autograd(differentiate, setup_context=keep)

    def run(call: Call) -> Tensor:
        tensors, text = pack(call)
        return forward(tensors, dropout.draw_seed(call.dropout), text)[0]

    return run
