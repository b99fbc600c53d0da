"""Huang, Liang, Xu & Xiang 2020, better relative position embeddings, arXiv:2009.13658, section 3.5, Methods 1 to 4.

    M1: e_ij = (q_i . k_j) a_|r| / sqrt(D)                                     a scalar, left and right alike
    M2: e_ij = (q_i . k_j) a_r / sqrt(D)                                       a scalar
    M3: e_ij = sum_c q_ic k_jc a_rc / sqrt(D)                                  a vector
    M4: e_ij = ((q_i + a_r).(k_j + a_r) - a_r.a_r) / sqrt(D)
             = (q_i.k_j + q_i.a_r + k_j.a_r) / sqrt(D)                         a vector;     r = clip(j - i, -K, K)

Note: the paper does not say how M1 to M3 start; here they start at 1, which is no position at all (a drop-in), and
``std`` spreads them. The paper counts one table for each head; ``share_heads`` is the form of the published
checkpoints.
"""

from __future__ import annotations

import torch
from torch import nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import Clip, Distance, RelativeGate, RelativeKey, RelativeQuery, RelativeScale, Rule, Term, Untied


def _clip(name: str, clip: int | None, max_length: int) -> int:
    clip = max_length - 1 if clip is None else clip
    if clip < 1:
        raise ValueError(f"{name}: clip={clip} tells no offsets apart; give clip >= 1 (or max_length >= 2)")
    return clip


class HuangM1(Encoding):
    """Method 1: the dot product times one number for each distance.

    Shapes: table [H, K+1] (1 with ``share_heads``).     Acts on: logits, multiplying q.k.     Neutral at: table = 1.
    Past the clip: all farther distances share the last entry.     Cost: one product for each logit.
    Raises: ValueError if clip < 1.
    """

    name = "huang_m1"
    paper = Paper("2009.13658", "section 3.5, Method 1", "Huang et al. 2020")
    properties = Properties(
        shift_invariant=True, symmetric=True, beyond_range="clip", layers="separate", neutral="table = 1", content=True
    )

    def __init__(
        self,
        num_heads: int,
        max_length: int = 512,
        clip: int | None = None,
        share_heads: bool = False,
        std: float = 0.0,
    ) -> None:
        super().__init__()
        self.rule: Rule = self._rule(_clip(self.name, clip, max_length))
        self.table = draw(nn.Parameter(torch.empty(1 if share_heads else num_heads, self.rule.num_rows)), std, mean=1.0)

    def _rule(self, clip: int) -> Rule:
        return Distance(clip)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """(q.k) a."""
        return (RelativeScale(self.table, self.rule),)

    def neutralize(self) -> None:
        """Table = 1."""
        nn.init.ones_(self.table)


class HuangM2(HuangM1):
    """Method 2: the dot product times one number for each signed offset.

    Shapes: table [H, 2K+1] (1 with ``share_heads``).     Acts on: logits, multiplying q.k.     Neutral at: table = 1.
    Past the clip: all farther offsets share the last entry.     Cost: one product for each logit.
    Raises: ValueError if clip < 1.
    """

    name = "huang_m2"
    paper = Paper("2009.13658", "section 3.5, Method 2", "Huang et al. 2020")
    properties = Properties(
        shift_invariant=True, symmetric=False, beyond_range="clip", layers="separate", neutral="table = 1", content=True
    )

    def _rule(self, clip: int) -> Rule:
        return Clip(clip)


class HuangM3(Encoding):
    """Method 3: every channel of the dot product times its own number for each offset.

    Shapes: table [1 or H, 2K+1, D].     Acts on: logits, gating q.k.     Neutral at: table = 1.
    Past the clip: all farther offsets share the last row.     Cost: O(B H I J D) time; never forms [I, J, D].
    Raises: ValueError if clip < 1.
    """

    name = "huang_m3"
    paper = Paper("2009.13658", "section 3.5, Method 3", "Huang et al. 2020")
    properties = Properties(
        shift_invariant=True, symmetric=False, beyond_range="clip", layers="separate", neutral="table = 1", content=True
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int = 512,
        clip: int | None = None,
        share_heads: bool = True,
        std: float = 0.0,
    ) -> None:
        super().__init__()
        self.rule = Clip(_clip(self.name, clip, max_length))
        table = torch.empty(1 if share_heads else num_heads, self.rule.num_rows, head_dim)
        self.table = draw(nn.Parameter(table), std, mean=1.0)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """sum_c q_c k_c a_c."""
        return (RelativeGate(self.table, self.rule),)

    def neutralize(self) -> None:
        """Table = 1."""
        nn.init.ones_(self.table)


class HuangM4(Encoding):
    """Method 4: one vector for each offset, met by the query and by the key.

    Shapes: table [1 or H, 2K+1, D] (K = ``clip``, default max_length - 1; two more rows with ``untie_cls``).
    Acts on: logits, content-dependent, inside 1/sqrt(D).     Neutral at: table = 0.
    Past the clip: all farther offsets share the last row.     Cost: O(B H (I+J) R D) time, R = 2K+1.
    ``scaled=False`` leaves both products outside 1/sqrt(D), as ALBERT did in transformers v4.
    Raises: ValueError if clip < 1.
    """

    name = "huang_m4"
    paper = Paper("2009.13658", "section 3.5, Method 4", "Huang et al. 2020")
    properties = Properties(
        shift_invariant=True, symmetric=False, beyond_range="clip", layers="separate", neutral="table = 0", content=True
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int = 512,
        clip: int | None = None,
        share_heads: bool = True,
        untie_cls: bool = False,
        scaled: bool = True,
    ) -> None:
        super().__init__()
        clip = _clip(self.name, clip, max_length)
        self.rule: Rule = Clip(clip)
        self.scaled = scaled
        if untie_cls:
            self.rule = Untied(self.rule, from_row=2 * clip + 1, to_row=2 * clip + 2)
            self.properties = Properties(False, False, "clip", "separate", "table = 0", True)
        self.table = draw(nn.Parameter(torch.empty(1 if share_heads else num_heads, self.rule.num_rows, head_dim)))

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """q.a + k.a."""
        return RelativeQuery(self.table, self.rule, self.scaled), RelativeKey(self.table, self.rule, self.scaled)

    def neutralize(self) -> None:
        """Table = 0."""
        nn.init.zeros_(self.table)
