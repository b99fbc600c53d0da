"""Devlin et al. 2019 (BERT), learned absolute positions added to the input, arXiv:1810.04805, section 3.

x_i = w_i + P[pos_i]
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Paper, Properties, draw
from locant.positions import Positions


class Absolute(Encoding):
    """One learned vector P[p] for each position id, added to the token embedding.

    Shapes: table [max_length, M].     Acts on: input embedding.     Neutral at: table = 0.
    Past the table: an error by default; ``extend="clip"`` repeats the last row, ``extend="interpolate"`` stretches the
    table linearly over the longer input.     Cost: O(n M), once.
    Raises: ValueError for ids past the table (with ``extend="raise"``), max_length < 1, an unknown ``extend``.
    """

    name = "absolute"
    paper = Paper("1810.04805", "section 3", "Devlin et al. 2019")
    properties = Properties(
        shift_invariant=False, symmetric=True, beyond_range="raise", layers="shared", neutral="table = 0"
    )

    def __init__(
        self, model_dim: int, max_length: int = 512, extend: Literal["raise", "clip", "interpolate"] = "raise"
    ) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"absolute: max_length={max_length} leaves no rows; give max_length >= 1")
        if extend not in ("raise", "clip", "interpolate"):
            raise ValueError(f"absolute: unknown extend={extend!r}; choose 'raise', 'clip' or 'interpolate'")
        self.extend = extend
        self.max_length = max_length if extend == "raise" else None
        if extend != "raise":
            beyond = "clip" if extend == "clip" else "defined"
            self.properties = Properties(False, True, beyond, "shared", neutral="table = 0")
        self.table = draw(nn.Parameter(torch.empty(max_length, model_dim)))

    def rows(self, positions: Positions) -> Float[Tensor, "... I M"]:
        """The table's vector for each query id."""
        self.check_length(positions)
        rows, ids = len(self.table), positions.query
        if self.extend == "interpolate" and positions.length > rows:
            ids = ids.double() * ((rows - 1) / (positions.length - 1))
        if not ids.is_floating_point():
            return F.embedding(ids.clamp(max=rows - 1), self.table)
        low = ids.floor().clamp(0, rows - 1)
        weight = (ids - low).clamp(0, 1)[..., None].to(self.table.dtype)
        high = (low + 1).clamp(max=rows - 1)
        return (1 - weight) * F.embedding(low.long(), self.table) + weight * F.embedding(high.long(), self.table)

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """x + P[pos]."""
        return x + self.rows(positions).to(x.dtype)

    def neutralize(self) -> None:
        """Table = 0."""
        nn.init.zeros_(self.table)
