"""He, Liu, Gao & Chen 2021 (DeBERTa), disentangled attention, arXiv:2006.03654, eq. 4.

    e_ij = (q_i . k_j + q_i . KR[t] + k_j . QR[t']) / sqrt(3D),     KR = R W_KR,  QR = R W_QR,  t = clamp(delta(i - j)
    + S)

Note: the paper reads t' from delta(j - i), the authors' code from delta(i - j); the code is followed
(``p2c_index="paper"`` is the other reading). Version 1: delta linear, own projections. Version 2: logarithmic buckets,
the layer's own query and key projections serve R too, and R passes a LayerNorm.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties, draw
from locant.positions import Positions
from locant.terms import RelativeKey, RelativeQuery, SignedLogBucket, Term


class Deberta(Encoding):
    """Content-to-position and position-to-content terms from one table R that all layers share.

    Shapes: table R [2S, M] (shared by all layers); version 1: key_projection [H D, M], query_projection [H D, M] with
    bias. Acts on: logits, content-dependent, inside the scale, which becomes 1/sqrt(3D).     Neutral at: version 1:
    table and query_projection.bias = 0; version 2: nowhere (the layer's projection biases remain).
    Past S: clamped (version 1), logarithmic up to ``max_length`` and then clamped (version 2).
    Cost: O(B H (I+J) S D).     Version 2 needs ``layer.project_query`` and ``layer.project_key``.
    Raises: ValueError for an unknown version or index, span < 2, a host without projections (version 2).
    """

    name = "deberta"
    paper = Paper("2006.03654", "eq. 4", "He et al. 2021")
    properties = Properties(
        shift_invariant=True,
        symmetric=False,
        beyond_range="clip",
        layers="separate",
        neutral="table = query_projection.bias = 0 (v1)",
        content=True,
    )

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_length: int = 512,
        version: Literal["v1", "v2"] = "v1",
        clip: int | None = None,
        p2c_index: Literal["code", "paper"] = "code",
        c2p: bool = True,
        p2c: bool = True,
        share_projections: bool | None = None,
        layer_norm: bool | None = None,
        log_buckets: bool | None = None,
        layer_norm_eps: float = 1e-7,
    ) -> None:
        super().__init__()
        if version not in ("v1", "v2"):
            raise ValueError(f"deberta: unknown version={version!r}; choose 'v1' or 'v2'")
        if p2c_index not in ("code", "paper"):
            raise ValueError(f"deberta: unknown p2c_index={p2c_index!r}; choose 'code' or 'paper'")
        if not (c2p or p2c):
            raise ValueError("deberta: c2p=False and p2c=False leave no position term; switch one on")
        second = version == "v2"
        share_projections = second if share_projections is None else share_projections
        size = (max(max_length // 2, 2) if second else max_length) if clip is None else clip
        if size < 2:
            raise ValueError(f"deberta: clip={size} tells no offsets apart; give clip >= 2 (or max_length >= 2)")
        far = max(max_length, size + 2) if (second if log_buckets is None else log_buckets) else None
        self.c2p, self.p2c, self.num_heads = c2p, p2c, num_heads
        self.logit_factor = math.sqrt(1 / (1 + c2p + p2c))
        self.key_rule = SignedLogBucket(size, far)
        self.query_rule = SignedLogBucket(size, far, flip=p2c_index == "paper")
        self.table = draw(nn.Parameter(torch.empty(2 * size, model_dim)))
        with_norm = second if layer_norm is None else layer_norm
        self.norm = nn.LayerNorm(model_dim, eps=layer_norm_eps) if with_norm else None
        own_key, own_query = c2p and not share_projections, p2c and not share_projections
        self.key_projection = nn.Linear(model_dim, num_heads * head_dim, bias=False) if own_key else None
        self.query_projection = nn.Linear(model_dim, num_heads * head_dim) if own_query else None
        for linear in (self.key_projection, self.query_projection):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02)
        if self.query_projection is not None:
            nn.init.zeros_(self.query_projection.bias)
        if share_projections:
            self.properties = Properties(True, False, "clip", "separate", neutral=None, content=True)

    def tie(self, first: Encoding) -> None:
        """All layers read one table R (and one norm)."""
        assert isinstance(first, Deberta)
        self.table, self.norm = first.table, first.norm

    def _projected(self, project: nn.Module | None, host: object, which: str) -> Float[Tensor, "H R D"]:
        table = self.table if self.norm is None else self.norm(self.table)
        if project is None:
            if not callable(host):
                raise ValueError(
                    f"deberta: the layer gives no project_{which}, which share_projections=True needs; "
                    "use version='v1' or share_projections=False"
                )
            project = host  # pyright: ignore[reportAssignmentType]
        return project(table).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # pyright: ignore[reportOptionalCall]

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """q.KR[t] + k.QR[t']."""
        terms: tuple[Term, ...] = ()
        if self.c2p:
            terms += (RelativeQuery(self._projected(self.key_projection, layer.project_key, "key"), self.key_rule),)
        if self.p2c:
            table = self._projected(self.query_projection, layer.project_query, "query")
            terms += (RelativeKey(table, self.query_rule),)
        return terms

    def neutralize(self) -> None:
        """Table and query_projection.bias = 0 (own projections, no LayerNorm)."""
        if self.properties.neutral is None or self.norm is not None:
            return super().neutralize()
        nn.init.zeros_(self.table)
        if self.query_projection is not None:
            nn.init.zeros_(self.query_projection.bias)
