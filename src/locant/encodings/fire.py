"""Li et al. 2024 (FIRE), functional interpolation of relative positions, ICLR 2024, arXiv:2310.04418, section 3.

    e_ij = q_i . k_j / sqrt(D) + MLP_h( psi(i - j) / (psi(max(|m L|, i)) + 1e-6) ),     psi(x) = log(|c| x + 1)
    MLP: 1 -> width -> H, ReLU;  L the trained length (``max_length``);  c, m and the MLP are learned

Note: the paper is causal (``causal=True``: keys past the query have distance 0, and the mask takes them away). Its form
for encoders is ours: |i - j| over psi(max(|m L|, i, N - 1 - i)), with N the number of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.positions import Positions
from locant.terms import PairBias, Term

EPS = 1e-6
ACTIVATIONS = {"relu": F.relu, "leaky_relu": F.leaky_relu}


class Fire(Encoding):
    """A small network of the distance, which past the trained length is measured against the query's position.

    Shapes: mlp 1 -> width -> H, c and multiplier [1].     Acts on: logits, content-free, unscaled.
    Neutral at: mlp.2 = 0.     Past the trained length: distances are squeezed into the trained range.
    Cost: the network on I J numbers, for each layer (once in all with share_layers=True, FIRE-S); no batch axis.
    Raises: ValueError for num_heads < 1, max_length < 1, width < 1, an unknown activation.
    """

    name = "fire"
    paper = Paper("2310.04418", "section 3", "Li et al. 2024")
    properties = Properties(
        shift_invariant=False, symmetric=False, beyond_range="defined", layers="separate", neutral="mlp.2 = 0"
    )

    def __init__(
        self,
        num_heads: int,
        max_length: int = 512,
        causal: bool = False,
        width: int = 32,
        activation: Literal["relu", "leaky_relu"] = "relu",
    ) -> None:
        super().__init__()
        if num_heads < 1 or max_length < 1 or width < 1:
            raise ValueError(
                f"fire: num_heads={num_heads}, max_length={max_length} and width={width} leave nothing to learn; "
                "give >= 1"
            )
        if activation not in ACTIVATIONS:
            raise ValueError(f"fire: unknown activation={activation!r}; choose {' or '.join(map(repr, ACTIVATIONS))}")
        self.trained_length, self.causal, self.activation = max_length, causal, activation
        if not causal:  # the last token moves while decoding, and with it the distances of all
            self.properties = replace(self.properties, cache_safe=False)
        self.mlp = nn.Sequential(nn.Linear(1, width), nn.Identity(), nn.Linear(width, num_heads))
        self.c = nn.Parameter(torch.full((1,), 0.1))
        self.multiplier = nn.Parameter(torch.ones(1))

    def bias(self, positions: Positions) -> Float[Tensor, "... H I J"]:
        """The network's number for every pair, in float32 or wider."""
        wide = torch.promote_types(self.c.dtype, torch.float32)
        i, j = positions.query[..., :, None].to(wide), positions.key[..., None, :].to(wide)
        reach, distance = i, (i - j).clamp(min=0)
        if not self.causal:
            reach, distance = torch.maximum(i, positions.last().to(wide) - i), (i - j).abs()
        rate, threshold = self.c.to(wide).abs(), (self.multiplier.to(wide) * self.trained_length).abs()
        share = torch.log1p(rate * distance) / (torch.log1p(rate * torch.maximum(threshold, reach)) + EPS)
        first, last = self.mlp[0], self.mlp[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        hidden = ACTIVATIONS[self.activation](F.linear(share[..., None], first.weight.to(wide), first.bias.to(wide)))
        return F.linear(hidden, last.weight.to(wide), last.bias.to(wide)).movedim(-1, -3)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """MLP(psi(i - j) / psi(max(L, i)))."""
        return (PairBias(self.bias(positions)),)

    def neutralize(self) -> None:
        """Last layer = 0."""
        for parameter in self.mlp[2].parameters():
            nn.init.zeros_(parameter)
