"""Zheng et al. 2024 (DAPE), data-adaptive positional encoding, arXiv:2405.14722, eq. 4; its V2, arXiv:2410.04798.

    e' = A + B + f([A, B]),     A_ij = q_i . k_j / sqrt(D),  B the bias of another encoding,  both of all heads
    f(z) = W2 leaky(W1 z + b1) + b2     for each pair (V1);     V2 (``kernel=3``): both maps are convolutions over keys

Without a bias (``over="none"``) e' = A + f(A), for decoders or above rotary positions (``"rope+dape"``).
Note: the public V2 sets the logits of later keys to 0 by their place in the given tensor, which is wrong with cached
keys, and cuts a row at the last key given. Here a row holds the keys that its query may see, in order, and goes on in
zeros, so that decoding equals the full pass; ``edges="row"`` cuts it as the public code does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.catalog import load
from locant.encoding import Encoding, Layer, Paper, Properties, Sum
from locant.positions import Positions
from locant.terms import LogitMap, Term

PAPER = Paper("2405.14722", "eq. 4", "Zheng et al. 2024")


class Adaptive(Encoding):
    """f: what the logits of all heads, and the biases of all heads, add to the logits.

    Shapes: first [W, 2H or H, kernel], second [H, W, kernel], with biases.     Neutral at: second = 0.
    """

    name: str
    paper = PAPER
    properties = Properties(
        shift_invariant=True,
        symmetric=True,
        beyond_range="defined",
        layers="separate",
        neutral="second = 0",
        content=True,
    )

    def __init__(self, num_heads: int, with_bias: bool, width: int, kernel: int | None, edges: str) -> None:
        super().__init__()
        self.name = "dape"
        self.num_heads, self.with_bias, self.kernel, self.edges = num_heads, with_bias, kernel, edges
        if kernel is not None:
            cut = edges == "row" and kernel > 1
            self.properties = replace(self.properties, symmetric=kernel == 1, cache_safe=not cut)
        size = 1 if kernel is None else kernel
        self.first = nn.Conv1d(num_heads * (1 + with_bias), width, size)
        self.second = nn.Conv1d(width, num_heads, size)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """A + B + f([A, B])."""
        if self.kernel is None:
            return (LogitMap(self._pairs),)
        return (LogitMap(self._rows, reach="row"),)

    def _pairs(self, content: Tensor, bias: Tensor, positions: Positions, allowed: Tensor | None) -> Tensor:
        logits = content + bias
        return logits + self._second(F.leaky_relu(self._first(content, bias)), 0)

    def _rows(self, content: Tensor, bias: Tensor, positions: Positions, allowed: Tensor | None) -> Tensor:
        assert self.kernel is not None
        logits, side = content + bias, self.kernel // 2
        if not logits.numel():  # which a convolution refuses
            return logits
        more = side if self.edges == "open" else 0
        bias = bias.expand(content.shape) if self.with_bias else bias
        order = (
            None if allowed is None else _seen_first(allowed.any(1, keepdim=True).expand(-1, -1, *content.shape[2:]))
        )
        content, bias = (self._row(t, order, more) for t in (content, bias))
        hidden = F.leaky_relu(self._first(content, bias, side))
        added = self._second(hidden, side)[..., : logits.shape[-1]]
        if order is not None:
            back = order[0].argsort(-1)
            added = added.gather(-1, back.expand(added.shape))
        return logits + added

    def _row(self, tensor: Tensor, order: tuple[Tensor, Tensor] | None, more: int) -> Tensor:
        """The keys that a query sees, in order, then zeros."""
        if not tensor.dim():
            return tensor
        if order is not None:
            index, seen = order
            batch = max(len(tensor), len(index))
            tensor = tensor.expand(batch, -1, -1, -1)
            tensor = tensor.gather(-1, index.expand(tensor.shape)).masked_fill(~seen, 0.0)
        return F.pad(tensor, (0, more))

    def _first(self, content: Tensor, bias: Tensor, padding: int = 0) -> Float[Tensor, "B W I J"]:
        """W1 [A, B] + b1; the bias's share has no batch axis where the bias has none."""
        heads, weight = self.num_heads, self.first.weight.to(content.dtype)
        constant = self.first.bias
        assert constant is not None
        hidden = _over_keys(content, weight[:, :heads], constant.to(content.dtype), padding)
        if not self.with_bias:
            return hidden
        if not bias.dim():
            raise ValueError(
                "dape: was built over a bias, but no term gives one; compose it with one, or build it with over='none'"
            )
        return hidden + _over_keys(bias.expand(-1, heads, -1, -1), weight[:, heads:], None, padding)

    def _second(self, hidden: Tensor, padding: int) -> Float[Tensor, "B H I J"]:
        constant = self.second.bias
        assert constant is not None
        return _over_keys(hidden, self.second.weight.to(hidden.dtype), constant.to(hidden.dtype), padding)

    def neutralize(self) -> None:
        """Second map = 0."""
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)


def _over_keys(
    x: Tensor, weight: Float[Tensor, "O C K"], bias: Tensor | None, padding: int
) -> Float[Tensor, "B O I J"]:
    """A convolution along the last axis of [B C I J]; with one tap a product, which is several times faster."""
    if weight.shape[-1] > 1:
        return F.conv2d(x, weight[:, :, None], bias, padding=(0, padding))
    product = (weight[..., 0] @ x.flatten(2)).unflatten(-1, x.shape[2:])
    return product if bias is None else product + bias[:, None, None]


def _seen_first(seen: Bool[Tensor, "B 1 I J"]) -> tuple[Tensor, Tensor]:
    """Index that brings the keys a query sees to the front, in order, and which places they then fill."""
    index = (~seen).to(torch.uint8).argsort(dim=-1, stable=True)
    return index, seen.gather(-1, index)


class Dape(Sum):
    """A small network, shared by all pairs, adapts the logits of all heads to each other and to a bias.

    Parts: the encoding named by ``over`` (any that adds a content-free bias, or 'none') with ``over_options``, and f.
    Shapes: as the part; first [W, 2H, kernel] (H without a bias), second [H, W, kernel], W = ``width``, with biases.
    Acts on: logits, mixing heads.     Neutral at: second = 0, where the part is neutral.     Past any length: as the
    part.     Cost: O(B I J W H), memory O(B W I J). Served by the reference backend: f reads the logits of all heads,
    and in V2 of whole rows.
    Raises: ValueError for an even kernel, an unknown edges, a part that is no content-free bias, as its part.
    """

    name = "dape"
    paper = PAPER

    def __init__(
        self,
        num_heads: int,
        max_length: int = 512,
        causal: bool = False,
        over: str = "kerple",
        width: int = 32,
        kernel: int | None = None,
        edges: Literal["open", "row"] = "open",
        over_options: dict[str, Any] | None = None,
    ) -> None:
        if kernel is not None and (kernel < 1 or kernel % 2 == 0):
            raise ValueError(f"dape: kernel={kernel} has no middle; give an odd number of keys, or None for V1")
        if edges not in ("open", "row") or (kernel is None and edges != "open"):
            raise ValueError(
                f"dape: edges={edges!r} with kernel={kernel}; choose 'open' or 'row', which has a meaning with a kernel"
            )
        if width < 1:
            raise ValueError(f"dape: width={width} leaves no network; give 1 or more, such as 32")
        try:
            part = load(over, num_heads=num_heads, max_length=max_length, causal=causal, **(over_options or {}))
        except (ValueError, TypeError) as error:  # of what a bias of the logits does not need, as rope's head_dim
            raise ValueError(
                f"dape: over={over!r} with over_options={over_options} cannot be built ({error}); choose a bias of the "
                "logits such as 'kerple', 'alibi', 'fire' or 't5', or 'none', and compose others: 'rope+dape'"
            ) from error
        with_bias = bool(part.sites)
        if part.properties.content or not set(part.sites) <= {"prepare", "terms"} or part.moves_ids:
            raise ValueError(
                f"dape: over={over!r} is no content-free bias of the logits; choose one such as 'kerple', 'alibi', "
                "'fire' or 't5', or 'none', and compose others: 'rope+dape'"
            )
        adaptive = Adaptive(num_heads, with_bias, width, kernel, edges)
        super().__init__(*((part, adaptive) if with_bias else (adaptive,)))
