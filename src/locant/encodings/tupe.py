"""Ke, He & Liu 2021 (TUPE), untied positions, arXiv:2006.15595, eq. 7 and 9 (TUPE-A), 8 and 9 (TUPE-R), section 4.3.

    e_ij = q_i . k_j / sqrt(2D) + V_h[i, j],       R_h[r, s] = (LN(P_r) U^Q_h) . (LN(P_s) U^K_h) / sqrt(2D)
    V_h[i, j] = theta_1 = R_h[0, 0]  if i is [CLS];   theta_2 = R_h[1, 1]  if only j is;   R_h[i+1, j+1]  otherwise
    TUPE-R adds b_h[bucket(j - i)], with bucket B/2 where i is [CLS] and bucket B where only j is
    BERT-A^d (section 4.3) keeps the cross terms: e_ij = (q_i + LN(P_i) U^Q) . (k_j + LN(P_j) U^K) / sqrt(4D)

Note: the authors' code is followed: LayerNorm on P, projection biases, theta through the same projections, everything
shared by all layers. [CLS] is the token with position id 0, unless the positions name the special tokens.
theta_1 and bucket B/2 fill whole rows with a constant, which the softmax ignores: their gradients are exactly zero.
BERT-A^d is not in their code: it gets the same LayerNorm and biases, and 1/sqrt(4D), their rule of one D for each term.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import LogBucket, PairBias, RelativeBias, Rule, Term, Untied


class UntiedPositions(Encoding):
    """What the paper's encodings share: a table with a norm and projections of its own, one for all layers."""

    def __init__(
        self, num_heads: int, head_dim: int, model_dim: int, num_rows: int, layer_norm: bool, bias: bool
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.table = draw(nn.Parameter(torch.empty(num_rows, model_dim)))
        self.norm = nn.LayerNorm(model_dim) if layer_norm else nn.Identity()
        self.query_projection = nn.Linear(model_dim, num_heads * head_dim, bias=bias)
        self.key_projection = nn.Linear(model_dim, num_heads * head_dim, bias=bias)
        for linear in (self.query_projection, self.key_projection):
            nn.init.normal_(linear.weight, std=0.02)
            if bias:
                nn.init.zeros_(linear.bias)

    def project(self, rows: Int[Tensor, "... N"], projection: nn.Linear) -> Float[Tensor, "... H N D"]:
        """LN(P) U for the given rows of the table."""
        vectors = projection(self.norm(F.embedding(rows, self.table)))
        return vectors.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)


class TupeA(UntiedPositions):
    """Position-position correlations with their own projections, added to the content logits of every layer.

    Shapes: table [max_length + 1, M] (row 0 makes theta_1, row 1 theta_2, id p uses row p + 1); query_projection,
    key_projection M -> H D with bias; norm over M.     Acts on: logits, content-free; the scale becomes 1/sqrt(2D).
    Neutral at: query_projection = 0.     Past the table: an error.     Cost: O(n M H D + H I J D), once per forward.
    ``untie_cls=False`` treats [CLS] like any token; ``theta="scalar"`` gives each head two free numbers instead.
    Raises: ValueError past the table, for an unknown theta.
    """

    name = "tupe_a"
    paper = Paper("2006.15595", "eq. 7, 9", "Ke et al. 2021")
    properties = Properties(
        shift_invariant=False, symmetric=False, beyond_range="raise", layers="shared", neutral="query_projection = 0"
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_length: int = 512,
        untie_cls: bool = True,
        theta: str = "vector",
        layer_norm: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__(num_heads, head_dim, model_dim, max_length + 1, layer_norm, bias)
        if theta not in ("vector", "scalar"):
            raise ValueError(f"{self.name}: unknown theta={theta!r}; choose 'vector' (the code) or 'scalar'")
        self.max_length, self.untie_cls = max_length, untie_cls
        self.logit_factor = math.sqrt(1 / 2)
        self.scale = 1 / math.sqrt(2 * head_dim)
        self.theta = nn.Parameter(torch.zeros(2, num_heads)) if theta == "scalar" and untie_cls else None

    def thetas(self) -> tuple[Float[Tensor, "H"], Float[Tensor, "H"]]:
        """theta_1 ([CLS] to others) and theta_2 (others to [CLS])."""
        if self.theta is not None:
            return self.theta[0], self.theta[1]
        rows = torch.arange(2, device=self.table.device)
        query, key = self.project(rows, self.query_projection), self.project(rows, self.key_projection)
        diagonal = (query * key).sum(-1) * self.scale  # [H 2]
        return diagonal[:, 0], diagonal[:, 1]

    def correlation(self, positions: Positions) -> Float[Tensor, "B H I J"]:
        """V of every pair."""
        self.check_length(positions)
        query = self.project(positions.query + 1, self.query_projection) * self.scale
        key = self.project(positions.key + 1, self.key_projection)
        correlation = query @ key.transpose(-1, -2)
        correlation = correlation if correlation.dim() == 4 else correlation[None]
        if not self.untie_cls:
            return correlation
        from_cls, to_cls = self.thetas()
        special_query, special_key = positions.special()
        special_query = (special_query if special_query.dim() == 2 else special_query[None])[:, None, :, None]
        special_key = (special_key if special_key.dim() == 2 else special_key[None])[:, None, None, :]
        correlation = torch.where(special_key, to_cls[:, None, None], correlation)
        return torch.where(special_query, from_cls[:, None, None], correlation)

    def prepare(self, positions: Positions) -> Positions:
        """V of all layers, once."""
        return positions.share(self, self.correlation(positions))

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """V."""
        return (PairBias(positions.recall(self, lambda: self.correlation(positions))),)

    def neutralize(self) -> None:
        """Query projection (and its bias, and free thetas) = 0."""
        for parameter in self.query_projection.parameters():
            nn.init.zeros_(parameter)
        if self.theta is not None:
            nn.init.zeros_(self.theta)


class TupeR(TupeA):
    """TUPE-A with one bias for each head and bucket of offsets, where [CLS] has buckets of its own.

    Shapes: as TUPE-A, and buckets [H, num_buckets + 1] (num_buckets without untie_cls), shared by all layers.
    Acts on: logits, content-free; the bias stands outside the scale.     Neutral at: query_projection = buckets = 0.
    Past the table: an error.     Cost: as TUPE-A, and one gather, once per forward.
    ``untie_buckets=False`` unties [CLS] in the correlation only (the paper's text has one theta, its code resets both).
    Raises: ValueError past the table, for an unknown theta, an odd num_buckets.
    """

    name = "tupe_r"
    paper = Paper("2006.15595", "eq. 8, 9", "Ke et al. 2021")
    properties = replace(TupeA.properties, neutral="query_projection = buckets = 0")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_length: int = 512,
        untie_cls: bool = True,
        untie_buckets: bool | None = None,
        theta: str = "vector",
        layer_norm: bool = True,
        bias: bool = True,
        num_buckets: int = 32,
        max_distance: int = 128,
    ) -> None:
        super().__init__(num_heads, head_dim, model_dim, max_length, untie_cls, theta, layer_norm, bias)
        self.rule: Rule = LogBucket(num_buckets, max_distance)
        if untie_cls if untie_buckets is None else untie_buckets:
            self.rule = Untied(self.rule, from_row=num_buckets // 2, to_row=num_buckets)
        self.buckets = draw(nn.Parameter(torch.empty(num_heads, self.rule.num_rows)))

    def correlation(self, positions: Positions) -> Float[Tensor, "B H I J"]:
        """V + b of every pair."""
        return super().correlation(positions) + RelativeBias(self.buckets, self.rule).pairs(positions)

    def neutralize(self) -> None:
        """Query projection and buckets = 0."""
        super().neutralize()
        nn.init.zeros_(self.buckets)


class BertAd(UntiedPositions):
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
        super().__init__(num_heads, head_dim, model_dim, max_length, layer_norm, bias)
        self.max_length, self.logit_factor = max_length, logit_factor

    def vectors(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """p U^Q of the queries and p U^K of the keys, [H I D] and [H J D] (or with a batch axis)."""
        self.check_length(positions)
        return self.project(positions.query, self.query_projection), self.project(positions.key, self.key_projection)

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
