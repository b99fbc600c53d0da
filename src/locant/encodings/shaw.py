"""Shaw, Uszkoreit & Vaswani 2018, relative position representations, arXiv:1803.02155, eq. 3 (values) and 4 (keys).

    e_ij = q_i . (k_j + a^K_r) / sqrt(D),     z_i = sum_j alpha_ij (v_j + a^V_r),     r = clip(j - i, -K, K)

Note: ``tie_kv`` uses one table for both, as OpenNMT does; ``outside="zero"`` gives farther offsets nothing, as VITS
does; ``scaled=False`` leaves q.a outside 1/sqrt(D), as ALBERT did in transformers v4.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import Clip, RelativeQuery, RelativeValue, Rule, Term, Untied


class Shaw(Encoding):
    """One learned vector for each clipped offset, added to the key (and, if asked for, one to the value).

    Shapes: table, value_table [1 or H, 2K+1, D] (K = ``clip``, default max_length - 1; two more rows with
    ``untie_cls``). Acts on: logits, content-dependent, inside 1/sqrt(D); values.     Neutral at: tables = 0.
    Past the clip: all farther offsets share the last row.     Cost: O(B H I R D) time, O(B H I R) memory, R = 2K+1.
    Raises: ValueError if clip < 1, neither keys nor values, an unknown ``outside``.
    """

    name = "shaw"
    paper = Paper("1803.02155", "eq. 3, 4", "Shaw et al. 2018")
    properties = Properties(
        shift_invariant=True,
        symmetric=False,
        beyond_range="clip",
        layers="separate",
        neutral="tables = 0",
        content=True,
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int = 512,
        clip: int | None = None,
        share_heads: bool = True,
        keys: bool = True,
        values: bool = False,
        tie_kv: bool = False,
        outside: Literal["clip", "zero"] = "clip",
        untie_cls: bool = False,
        scaled: bool = True,
    ) -> None:
        super().__init__()
        clip = max_length - 1 if clip is None else clip
        if clip < 1:
            raise ValueError(f"shaw: clip={clip} tells no offsets apart; give clip >= 1 (or max_length >= 2)")
        if outside not in ("clip", "zero"):
            raise ValueError(f"shaw: unknown outside={outside!r}; choose 'clip' or 'zero'")
        if not (keys or values):
            raise ValueError("shaw: keys=False and values=False leave nothing to add; switch one on")
        if tie_kv and not (keys and values):
            raise ValueError(f"shaw: tie_kv=True needs keys and values, got keys={keys} and values={values}")
        self.keys, self.values, self.outside, self.scaled = keys, values, outside, scaled
        self.rule: Rule = Clip(clip, outside)
        shape = (1 if share_heads else num_heads, 2 * clip + 1 + 2 * untie_cls, head_dim)
        if untie_cls:
            if outside == "zero":
                raise ValueError("shaw: outside='zero' and untie_cls=True both claim extra rows; choose one")
            self.rule = Untied(self.rule, from_row=2 * clip + 1, to_row=2 * clip + 2)
        if untie_cls or not keys:
            self.properties = Properties(not untie_cls, not keys, "clip", "separate", "tables = 0", content=keys)
        self.table = draw(nn.Parameter(torch.empty(shape))) if keys or tie_kv else None
        self.value_table = draw(nn.Parameter(torch.empty(shape))) if values and not tie_kv else None

    def _rows(self, table: Tensor) -> Tensor:
        return torch.cat((table, torch.zeros_like(table[:, :1])), 1) if self.outside == "zero" else table

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """q.a^K, and alpha a^V."""
        terms: list[Term] = []
        if self.keys:
            assert self.table is not None
            terms.append(RelativeQuery(self._rows(self.table), self.rule, self.scaled))
        if self.values:
            table = self.table if self.value_table is None else self.value_table
            assert table is not None
            terms.append(RelativeValue(self._rows(table), self.rule))
        return tuple(terms)

    def neutralize(self) -> None:
        """Tables = 0."""
        for table in self.parameters():
            nn.init.zeros_(table)
