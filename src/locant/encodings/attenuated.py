"""Chen et al. 2023, hand-made encodings that vary locality and symmetry, Findings of EMNLP 2023.

    e_ij = q_i . k_j / sqrt(D) + E[i, j],     E[i, j] = exp(-w (j - i)^2) / sum_m exp(-w (m - i)^2)

Note: E is a probability that is added to the logits, so its effect is mild. The public code sums over the n tokens of
the input (``edges="row"``), which ties a row to what follows it; by default the sum is over all offsets, which differs
near both ends only, and serves caches. Its window form does not sum anew at the ends, and neither does ours by default.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import Clip, Distance, PairBias, RelativeBias, Term

FORMS = ("gaussian", "window", "table")


class Attenuated(Encoding):
    """Attention that is pulled to near tokens by a fixed bell or window, or by a table that starts as the bell.

    ``gaussian``: exp(-w k^2), ``w_right`` for k > 0 where it differs. ``window``: equal weights for offsets up to
    (window - 1) / 2. ``table``: one learned number for each distance below ``max_length``, starting at softmax(-w k^2)
    over one side; ``share_heads``: one row for all heads.
    Shapes: table [1 or H, max_length] (``table`` alone).     Acts on: logits, content-free, unscaled.
    Neutral at: table = 0.     Past the table: farther distances share the last number.     Cost: O(H (I+J)).
    Raises: ValueError for an unknown form or edges, w < 0, an even window, options that the form has no use for.
    """

    name = "attenuated"
    paper = Paper("Findings of EMNLP 2023", "section 4", "Chen et al. 2023")
    properties = Properties(shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared")

    def __init__(
        self,
        num_heads: int,
        form: Literal["gaussian", "window", "table"] = "gaussian",
        w: float = 0.5,
        w_right: float | None = None,
        window: int | None = None,
        max_length: int = 512,
        share_heads: bool = False,
        edges: Literal["open", "row"] = "open",
    ) -> None:
        super().__init__()
        _check(form, w, w_right, window, max_length, share_heads, edges)
        self.form, self.window, self.edges = form, window, edges
        self.w, self.w_right = w, w if w_right is None else w_right
        self.table = None
        if form == "table":
            first = _one_side(max_length, w)
            self.table = nn.Parameter(first.expand(1 if share_heads else num_heads, -1).clone())
            self.properties = Properties(True, True, "clip", "separate", neutral="table = 0")
        elif self.w != self.w_right:
            self.properties = Properties(True, False, "defined", "shared")

    def weights(self, offset: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The bell or window before it is divided by its sum, in float64."""
        k = offset.double()
        if self.window is not None:
            return (k.abs() <= (self.window - 1) / 2).double()
        slope = torch.where(k > 0, k.new_tensor(self.w_right), k.new_tensor(self.w))  # of numbers, it would be float32
        return torch.exp(-slope * k**2)

    def total(self) -> float:
        """The sum of `weights` over all offsets."""
        return float(self.window) if self.window is not None else 1 + _half(self.w) + _half(self.w_right)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """E."""
        if self.table is not None:
            return (RelativeBias(self.table, Distance(self.table.shape[1] - 1)),)
        if self.edges == "row":
            return (PairBias(self._rows),)
        span = max(positions.span, 1)
        offset = torch.arange(-span, span + 1, device=positions.key.device)
        return (RelativeBias((self.weights(offset) / self.total())[None], Clip(span)),)

    def _rows(self, positions: Positions) -> Float[Tensor, "B 1 I J"]:
        """Every row sums to 1 over the ids of its document (each id once, whatever is masked)."""
        query, key = (ids if ids.dim() == 2 else ids[None] for ids in (positions.query, positions.key))
        same = positions.same_document()
        same = torch.ones(1, 1, key.shape[-1], dtype=torch.bool, device=key.device) if same is None else same
        reach = positions.length + 1
        far = key[:, None].expand(-1, same.shape[-2], -1)
        low = far.masked_fill(~same, reach).amin(-1)
        high = far.masked_fill(~same, -1).amax(-1)
        line = torch.arange(-reach, reach + 1, device=key.device)
        up_to = self.weights(line).cumsum(0)
        total = (
            up_to[(high - query).clamp(-reach, reach) + reach] - up_to[(low - query - 1).clamp(-reach, reach) + reach]
        )
        return (self.weights(key[:, None] - query[:, :, None]) / total[..., None].clamp(min=1e-300))[:, None]

    def neutralize(self) -> None:
        """Table = 0 (``form="table"`` alone)."""
        if self.table is None:
            return super().neutralize()
        nn.init.zeros_(self.table)


def _check(
    form: str, w: float, w_right: float | None, window: int | None, max_length: int, share_heads: bool, edges: str
) -> None:
    if form not in FORMS:
        raise ValueError(f"attenuated: unknown form={form!r}; choose one of {', '.join(map(repr, FORMS))}")
    if edges not in ("open", "row"):
        raise ValueError(f"attenuated: unknown edges={edges!r}; choose 'open' or 'row'")
    if not (math.isfinite(w) and w >= 0 and (w_right is None or (math.isfinite(w_right) and w_right >= 0))):
        raise ValueError(f"attenuated: w={w} and w_right={w_right} must be finite and >= 0")
    if (form == "window") != (window is not None):
        raise ValueError(
            f"attenuated: form={form!r} came with window={window}; a window belongs to form='window' alone"
        )
    if window is not None and (window < 1 or window % 2 == 0):
        raise ValueError(f"attenuated: window={window} has no middle; give an odd number >= 1")
    if form != "gaussian" and w_right is not None:
        raise ValueError(f"attenuated: w_right={w_right} has no effect with form={form!r}; leave it out")
    if form != "table" and share_heads:
        raise ValueError(
            f"attenuated: share_heads=True has no effect with form={form!r}, which has no table; leave it out"
        )
    if form == "table" and (edges != "open" or max_length < 2):
        raise ValueError(
            f"attenuated: form='table' came with edges={edges!r} and max_length={max_length}; a table knows no edges "
            "and needs 2 distances or more"
        )


def _one_side(length: int, w: float) -> Float[Tensor, "1 R"]:
    """exp(-w k^2) for k = 0 .. length - 1, divided by its sum."""
    bell = torch.exp(-w * torch.arange(length, dtype=torch.float64) ** 2)
    return (bell / bell.sum()).to(torch.get_default_dtype())[None]


def _half(w: float) -> float:
    """Sum of exp(-w k^2) over k = 1, 2, ...; infinite at w = 0."""
    if w < 1e-3:  # exact to rounding there: all further terms of Euler and Maclaurin vanish
        return math.inf if w == 0 else (math.sqrt(math.pi / w) - 1) / 2
    return sum(math.exp(-w * k * k) for k in range(1, math.ceil(math.sqrt(745 / w)) + 1))
