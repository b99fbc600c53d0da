"""Kiyono et al. 2021 (SHAPE), shifted absolute positions, EMNLP 2021, arXiv:2109.05644, section 3.

    pos'_t = pos_t + k,     k ~ U{0, .., K}, one for each sequence, in training

Note: the paper draws k from {0, .., K}; its code leaves K out (``inclusive=False``) and evaluates at the ids from K on
(``eval_offset="code"``), where a model trained with a constant K has seen every row. The default evaluates at 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from locant.encoding import Paper, Properties
from locant.positions import Positions
from locant.transform import Transform, documents_of, of_queries, rows_of


class Shape(Transform):
    """All ids of a sequence are shifted by one random number in training: absolute encodings learn offsets.

    Shapes: no parameters; one number for each sequence (each document, where several are packed).     Acts on: ids.
    Offsets stay as they are: relative encodings and 'none' are not changed.     Cost: one addition.
    A table must hold K more rows (``max_length``).
    Raises: ValueError if max_shift < 0, for an unknown eval_offset; as `Transform`.
    """

    name = "shape"
    paper = Paper("2109.05644", "section 3", "Kiyono et al. 2021")
    properties = Properties(
        shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared", neutral="always", draws=True
    )

    def __init__(
        self,
        max_shift: int = 500,
        inclusive: bool = True,
        eval_offset: int | Literal["code"] = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        if max_shift < 0:
            raise ValueError(f"shape: max_shift={max_shift} is no number of positions; give 0 or more")
        if eval_offset != "code" and (not isinstance(eval_offset, int) or eval_offset < 0):
            raise ValueError(f"shape: eval_offset={eval_offset!r} is no offset; give 0, 1, .. or 'code' (max_shift)")
        self.max_shift, self.inclusive = max_shift, inclusive
        self.eval_offset = max_shift if eval_offset == "code" else eval_offset

    def sample(
        self, positions: Positions, generator: torch.Generator, own: torch.Generator
    ) -> Int[Tensor, "B 1"] | Int[Tensor, "B J"]:
        """k, for each sequence [B 1], or for every token of packed documents [B J]."""
        rows, documents = rows_of(positions, self.name), documents_of(positions)
        high = max(self.max_shift + self.inclusive, 1)
        drawn = torch.randint(high, (rows, documents.shape[-1]), generator=generator)
        return drawn.to(documents.device).gather(-1, documents)

    def fixed(self, positions: Positions) -> Int[Tensor, "1 1"] | None:
        """The offset of evaluation."""
        return torch.full((1, 1), self.eval_offset, device=positions.key.device) if self.eval_offset else None

    def apply(self, positions: Positions, draws: Int[Tensor, "B N"]) -> Positions:
        """Ids + k."""
        most = self.max_shift if self.training else self.eval_offset
        query, key = positions.query + of_queries(draws, positions), positions.key + draws
        if positions.query.dim() == positions.key.dim() == 1 and draws.numel() == 1:
            query, key = query[0], key[0]
        return replace(
            positions, query=query, key=key, length=positions.length + max(most, 0), span=positions.span, shared={}
        )
