"""attention(q, k, v, terms, positions, mask, ...): the one door to every backend, and what `auto` chose and why."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locant.backends import BACKENDS, Call, speeds
from locant.positions import Positions
from locant.terms import Operands, Term


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, and why not each other one."""

    backend: str
    refused: dict[str, str]

    def __str__(self) -> str:
        """One line for each backend."""
        lines = [f"{self.backend}: chosen"]
        return "\n".join(lines + [f"{name}: cannot, {why}" for name, why in self.refused.items()])


def attention(
    q: Float[Tensor, "B H I D"],
    k: Float[Tensor, "B H2 J D2"],
    v: Float[Tensor, "B H2 J E"],
    terms: tuple[Term, ...] = (),
    positions: Positions | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    logit_factor: float | Tensor = 1.0,
    dropout: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with position terms: softmax(s q.k + terms) v, in the order that `locant.terms` states.

    Shapes: q [B H I D]; k [B H J D], v [B H J E] (or fewer heads that divide H: grouped queries); ``mask`` boolean,
    True = may attend, broadcastable to [B H I J]; ``scale`` defaults to 1/sqrt(D); ``logit_factor`` a number, or [I]
    or [B 1 I]. ``causal`` lets query t (key J - I + t) see keys up to itself. Documents in ``positions`` are kept
    apart. A query that may attend to nothing gives zeros. ``positions`` default to the last I of J keys.
    Returns the output [B H I E], with ``return_weights`` also the weights after softmax [B H I J].
    Raises: ValueError or TypeError for shapes and masks that do not fit, a backend that cannot, unknown backends.
    """
    call = _call(q, k, v, terms, positions, mask, causal, scale, logit_factor, dropout, return_weights)
    return BACKENDS[_choose(call, backend)].run(call)


def explain(
    q: Float[Tensor, "B H I D"],
    k: Float[Tensor, "B H2 J D2"],
    v: Float[Tensor, "B H2 J E"],
    terms: tuple[Term, ...] = (),
    positions: Positions | None = None,
    *,
    backend: str = "auto",
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Explanation:
    """Which backend `attention` takes for these arguments, and why each other one cannot."""
    call = _call(q, k, v, terms, positions, None, False, None, 1.0, dropout, return_weights)
    refused = {name: why for name in BACKENDS if (why := BACKENDS[name].refuses(call)) is not None}
    return Explanation(_choose(call, backend), refused)


def _choose(call: Call, backend: str) -> str:
    """The name of the backend that serves a call; only those that may be taken are asked (asking may compile one)."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose 'auto' or one of {', '.join(map(repr, BACKENDS))}")
    if not (call.operands.q.shape[2] and call.operands.k.shape[2]):
        return "reference"  # no pair: zeros, which no kernel need be asked for
    if backend == "auto":
        return next(name for name in speeds.order(call) if BACKENDS[name].refuses(call) is None)
    why = BACKENDS[backend].refuses(call)
    if why is not None:
        raise ValueError(f"backend {backend!r} cannot: {why}; use backend='auto' or 'reference'")
    return backend


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: tuple[Term, ...],
    positions: Positions | None,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    logit_factor: float | Tensor,
    dropout: float,
    return_weights: bool,
) -> Call:
    _check_operands(q, k, v, logit_factor, dropout)
    k, v = _grouped(q, k, v)
    num_queries, num_keys = q.shape[2], k.shape[2]
    if positions is None:
        positions = Positions.arange(num_queries, num_keys, device=q.device)
    _check_positions(positions, q.shape[0], num_queries, num_keys)
    allowed = _allowed(mask, causal, positions, (q.shape[0], q.shape[1], num_queries, num_keys), q.device)
    operands = Operands(q, k, v, positions, (1 / math.sqrt(q.shape[-1]) if scale is None else scale) * logit_factor)
    for term in terms:
        term.check(operands)
    plain_causal = causal and num_queries == num_keys and mask is None and positions.query_document is None
    return Call(operands, tuple(terms), allowed, plain_causal, dropout, return_weights)


def _check_operands(q: Tensor, k: Tensor, v: Tensor, logit_factor: float | Tensor, dropout: float) -> None:
    """Shapes that kernels would broadcast, read in part, or refuse in words of their own."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(
                f"attention: {name} has shape {tuple(tensor.shape)}; give four axes, [batch, heads, tokens, head_dim]"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"attention: q has head_dim={q.shape[-1]} but k has head_dim={k.shape[-1]}; they must be equal"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not belong together; batches "
            "must be equal, and k and v have the same heads and tokens"
        )
    if isinstance(logit_factor, Tensor) and logit_factor.shape not in (
        (q.shape[2],),
        (1, 1, q.shape[2]),
        (q.shape[0], 1, q.shape[2]),
    ):
        raise ValueError(
            f"attention: logit_factor has shape {tuple(logit_factor.shape)}; give a number, [{q.shape[2]}] or "
            f"[{q.shape[0]}, 1, {q.shape[2]}]"
        )
    if not 0 <= dropout <= 1:
        raise ValueError(f"attention: dropout={dropout} is no probability; give 0 to 1")


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if k.shape[1] == q.shape[1]:
        return k, v
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {q.shape[1]} query heads cannot share {k.shape[1]} key heads; it must divide them"
        )
    groups = q.shape[1] // k.shape[1]
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)


def _check_positions(positions: Positions, batch: int, num_queries: int, num_keys: int) -> None:
    for name, ids, want in (("query", positions.query, num_queries), ("key", positions.key, num_keys)):
        if ids.shape[-1] != want or ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] not in (1, batch)):
            raise ValueError(
                f"positions: {name} ids have shape {tuple(ids.shape)} but attention has {want} {name} tokens in a "
                "batch of "
                f"{batch}; give [{want}] or [{batch} {want}]"
            )


def _allowed(
    mask: Tensor | None, causal: bool, positions: Positions, shape: tuple[int, int, int, int], device: torch.device
) -> Bool[Tensor, "..."] | None:
    """All that forbids a pair, as one boolean mask with four axes; None where nothing does."""
    allowed = None
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(
                f"mask: dtype is {mask.dtype} but True/False is needed (True = may attend); use mask.bool() for a "
                "0/1 mask, "
                "mask == 0 for an additive one"
            )
        padded = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or any(have not in (1, want) for have, want in zip(padded, shape, strict=True)):
            raise ValueError(
                f"mask: shape {tuple(mask.shape)} cannot be broadcast to (batch, heads, queries, keys) = {shape}; "
                "a padding mask [batch, keys] goes in as mask[:, None, None, :]"
            )
        allowed = mask.view(padded)
    same = positions.same_document()
    if same is not None:
        same = same[None, None] if same.dim() == 2 else same[:, None]
        allowed = same if allowed is None else allowed & same
    if causal:
        past = torch.ones(shape[2], shape[3], dtype=torch.bool, device=device).tril(shape[3] - shape[2])[None, None]
        allowed = past if allowed is None else allowed & past
    return allowed
