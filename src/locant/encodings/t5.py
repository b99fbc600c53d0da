"""Raffel et al. 2020 (T5), one bias for each bucket of offsets, arXiv:1910.10683, section 2.1.

    e_ij = q_i . k_j / sqrt(D) + b_h[bucket(j - i)]

The bias stands outside 1/sqrt(D); T5 itself does not divide by sqrt(D), which is the host's affair.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import Clip, LogBucket, RelativeBias, Term


class T5Bias(Encoding):
    """One number for each head and bucket: exact offsets when near, logarithmic buckets when far.

    Shapes: table [H, num_buckets].     Acts on: logits, content-free, unscaled.     Neutral at: table = 0.
    Past ``max_distance``: the last bucket of each side.     Layers share the bias of each offset, computed once per
    forward: O(H max_distance), no [I, J] tensor.     Raises: ValueError if num_buckets is odd or leaves no logarithmic
    part.
    """

    name = "t5"
    paper = Paper("1910.10683", "section 2.1", "Raffel et al. 2020")
    properties = Properties(
        shift_invariant=True, symmetric=False, beyond_range="saturate", layers="shared", neutral="table = 0"
    )

    def __init__(
        self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, causal: bool = False, std: float = 0.02
    ) -> None:
        super().__init__()
        self.rule = LogBucket(num_buckets, max_distance, causal)
        self.table = draw(nn.Parameter(torch.empty(num_heads, num_buckets)), std)

    def by_offset(self) -> Float[Tensor, "H K"]:
        """b[bucket] of every offset up to ``max_distance``, whose buckets serve all farther ones."""
        offset = torch.arange(-self.rule.max_distance, self.rule.max_distance + 1, device=self.table.device)
        return self.table[:, self.rule.row(offset)]

    def prepare(self, positions: Positions) -> Positions:
        """The bias of all layers, once."""
        return positions.share(self, self.by_offset())

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """b[bucket]."""
        return (RelativeBias(positions.recall(self, self.by_offset), Clip(self.rule.max_distance)),)

    def neutralize(self) -> None:
        """Table = 0."""
        nn.init.zeros_(self.table)
