"""Ke, He & Liu 2021 (TUPE), ablation BERT-A^d: separate projections, cross terms kept, arXiv:2006.15595, section 4.3.

    e_ij = (q_i + p_i U^Q) . (k_j + p_j U^K) / sqrt(4D)

Note: the scale 1/sqrt(4D) follows the paper's rule of one D for each term; ``logit_factor`` sets another. p passes a
LayerNorm and the projections have biases, as in the authors' code of TUPE-A (this ablation is not in it).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Paper, Properties, draw
from locant.positions import Positions


class BertAd(Encoding):
    """Positions with projections of their own, added to queries and keys of every layer.

    Shapes: table [max_length, M]; query_projection, key_projection M -> H D with bias; norm over M (all shared by
    layers). Acts on: q and k, with the scale 1/sqrt(4D).     Neutral at: projections = 0.     Past the table: an error.
    Cost: two products (n x M)(M x M) once per forward; no [I, J] tensor.     Raises: ValueError past the table.
    """

    name = "bert_ad"
    paper = Paper("2006.15595", "section 4.3", "Ke et al. 2021")
    properties = Properties(
        shift_invariant=False,
        symmetric=False,
        beyond_range="raise",
        layers="shared",
        neutral="projections = 0",
        content=True,
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_length: int = 512,
        layer_norm: bool = True,
        bias: bool = True,
        logit_factor: float = 0.5,
    ) -> None:
        super().__init__()
        self.num_heads, self.max_length, self.logit_factor = num_heads, max_length, logit_factor
        self.table = draw(nn.Parameter(torch.empty(max_length, model_dim)))
        self.norm = nn.LayerNorm(model_dim) if layer_norm else nn.Identity()
        self.query_projection = nn.Linear(model_dim, num_heads * head_dim, bias=bias)
        self.key_projection = nn.Linear(model_dim, num_heads * head_dim, bias=bias)
        for linear in (self.query_projection, self.key_projection):
            nn.init.normal_(linear.weight, std=0.02)
            if bias:
                nn.init.zeros_(linear.bias)

    def _project(self, ids: Shaped[Tensor, "... N"], projection: nn.Linear) -> Float[Tensor, "... H N D"]:
        rows = self.norm(F.embedding(ids, self.table))
        return projection(rows).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def vectors(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """p U^Q of the queries and p U^K of the keys, [H I D] and [H J D] (or with a batch axis)."""
        self.check_length(positions)
        return self._project(positions.query, self.query_projection), self._project(positions.key, self.key_projection)

    def prepare(self, positions: Positions) -> Positions:
        """The position vectors of all layers, once."""
        return positions.share(self, self.vectors(positions))

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H J D"]]:
        """q + p U^Q, k + p U^K."""
        query, key = positions.recall(self, lambda: self.vectors(positions))
        return q + query.to(q.dtype), k + key.to(k.dtype)

    def neutralize(self) -> None:
        """Projections (and their biases) = 0."""
        for linear in (self.query_projection, self.key_projection):
            for parameter in linear.parameters():
                nn.init.zeros_(parameter)
