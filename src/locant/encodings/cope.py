"""Golovneva et al. 2024 (CoPE), contextual position encoding, arXiv:2405.18719, eq. 3 to 8.

    g_im = sigmoid(e_im),     p_ij = min( sum_{m=j}^{i} g_im, P - 1 ),     e'_ij = e_ij + q_i . E(p_ij)
    E(p) = (1 - w) E[floor p] + w E[ceil p],  w = p - floor p

e are the logits of all else, with 1/sqrt(D); q . E has no such factor in the authors' code (``scaled=True`` puts it
there). A position counts the tokens that the query's gates let through: positions are contents, ids are not read.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import LogitMap, Term


class Cope(Encoding):
    """Each query counts the keys that matter to it from a key up to itself, and looks the count up in a table.

    Shapes: table [P, D], one for all heads (P = ``max_positions``), started at 0.     Acts on: logits, as a whole row.
    Neutral at: table = 0.     Past P - 1 counted tokens: the last row.     Cost: O(B H I (J + P)) memory.
    Under a causal mask alone; keys that the mask takes are not counted. Served by the reference backend, which has the
    whole row of logits.
    Raises: ValueError for max_positions < 1, or (as it attends) without a causal mask.
    """

    name = "cope"
    paper = Paper("2405.18719", "eq. 3-8", "Golovneva et al. 2024")
    properties = Properties(
        shift_invariant=True,
        symmetric=False,
        beyond_range="defined",
        layers="separate",
        neutral="table = 0",
        content=True,
        bidirectional=False,
    )

    def __init__(self, head_dim: int, max_positions: int = 64, scaled: bool = False) -> None:
        super().__init__()
        if max_positions < 1:
            raise ValueError(f"cope: max_positions={max_positions} leaves no rows; give 1 or more, such as 64")
        self.max_positions = max_positions
        self.factor = head_dim**-0.5 if scaled else 1.0
        self.table = nn.Parameter(torch.zeros(max_positions, head_dim))

    def bias(
        self, q: Float[Tensor, "B H I D"], logits: Float[Tensor, "B H I J"], seen: Bool[Tensor, "..."]
    ) -> Float[Tensor, "B H I J"]:
        """q . E(p) for every pair; ``seen``: the keys that are counted. Counts are summed in float32 or wider."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        gates = logits.to(wide).sigmoid().masked_fill(~seen, 0.0)
        count = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.max_positions - 1)
        low = count.detach().floor()
        rows = q @ self.table.to(q.dtype).T * self.factor  # [B H I P]
        weight = (count - low).to(rows.dtype)
        high = (low + 1).clamp(max=self.max_positions - 1).long()  # ceil p, wherever its weight is not 0
        return (1 - weight) * rows.gather(-1, low.long()) + weight * rows.gather(-1, high)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """e + q . E(p)."""
        return (LogitMap(partial(self._add, layer.q), reach="row"),)

    def _add(self, q: Tensor, content: Tensor, bias: Tensor, positions: Positions, allowed: Tensor | None) -> Tensor:
        logits = content + bias
        queries, keys = logits.shape[-2:]
        past = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril(keys - queries)
        self._check_mask(allowed, past)
        return logits + self.bias(q, logits, past if allowed is None else allowed & past)

    def _check_mask(self, allowed: Tensor | None, past: Tensor) -> None:
        """A mask is looked at where that costs nothing: eager, on the CPU."""
        missing = allowed is None and past.shape[0] > 1
        if allowed is not None and allowed.device.type == "cpu" and not torch.compiler.is_compiling():
            missing = bool((allowed & ~past).any())
        if missing:
            raise ValueError(
                f"cope: {past.shape[0]} queries may attend to later keys, but positions are counted up to the query; "
                "pass causal=True, or a mask that is causal"
            )

    def neutralize(self) -> None:
        """Table = 0."""
        nn.init.zeros_(self.table)
