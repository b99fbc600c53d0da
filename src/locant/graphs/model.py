"""A small graph transformer: node features in, one vector for each graph out.

The public tree hands the padding mask in inverted and multiplies scores by it: among real nodes the product of query
and key is 0 then, so that attention is purely positional, and padded keys are never masked. ``compat_black2024=True``
reproduces that arithmetic; otherwise padded keys are masked and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxtyping import Bool, Float
from torch import Tensor, nn

from locant.attention import attention
from locant.encoding import Layer
from locant.graphs.pairs import GraphBias, graph_positions
from locant.positions import Positions


@dataclass(frozen=True)
class GraphModelConfig:
    """Sizes of a graph transformer. ``num_encodings`` = 0: no pair encoding."""

    node_dim: int
    out_dim: int
    num_encodings: int = 1
    model_dim: int = 16
    num_layers: int = 3
    num_heads: int = 4
    hidden_dim: int = 32  # of the networks on pairs
    num_kernels: int = 16  # Gaussian kernels for each pair encoding; 0: the numbers themselves
    multiply: bool = False  # also multiply the weights
    compat_black2024: bool = False

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.model_dim % self.num_heads:
            raise ValueError(
                f"graph model: num_heads={self.num_heads} does not divide model_dim={self.model_dim}; choose another"
            )


class GraphAttention(nn.Module):
    """Multi-head attention among the nodes of a graph."""

    def __init__(self, model_dim: int, num_heads: int, compat_black2024: bool = False) -> None:
        super().__init__()
        self.num_heads, self.compat_black2024 = num_heads, compat_black2024
        self.query, self.key, self.value, self.out = (nn.Linear(model_dim, model_dim) for _ in range(4))

    def forward(
        self,
        x: Float[Tensor, "B n M"],
        real: Bool[Tensor, "B n"],
        bias: GraphBias | None = None,
        positions: Positions | None = None,
    ) -> Float[Tensor, "B n M"]:
        """Each node attends to the real nodes of its graph."""
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mask = real[:, None, None, :]
        if self.compat_black2024:  # scores times "is padding"; no key is masked
            q, mask = q * (~real)[:, None, :, None], None
            k = k * (~real)[:, None, :, None]
        if bias is None or positions is None:
            out = attention(q, k, v, mask=mask)
        else:
            out = attention(q, k, v, bias.terms(positions, Layer(q, k, x)), positions, mask=mask)
        assert isinstance(out, Tensor)
        return self.out(out.transpose(1, 2).flatten(2))


class GraphTransformer(nn.Module):
    """Attention and feed-forward layers, one pair bias for all of them; then a network on the mean over real nodes."""

    def __init__(self, config: GraphModelConfig) -> None:
        super().__init__()
        self.config, width = config, config.model_dim
        self.embed = nn.Linear(config.node_dim, width)
        self.bias = (
            GraphBias(
                config.num_heads,
                config.num_encodings,
                config.hidden_dim,
                config.num_kernels,
                config.multiply,
                config.compat_black2024,
            )
            if config.num_encodings
            else None
        )
        self.attention = nn.ModuleList(
            GraphAttention(width, config.num_heads, config.compat_black2024) for _ in range(config.num_layers)
        )
        self.forwards = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(config.num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.num_layers))
        self.out = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, config.out_dim)
        )

    def nodes(
        self, features: Float[Tensor, "B n F"], psi: Float[Tensor, "B n n R"] | None, real: Bool[Tensor, "B n"]
    ) -> Float[Tensor, "B n M"]:
        """A vector for each node."""
        x = self.embed(features)
        graph = () if self.bias is None or psi is None else (self.bias, self.bias.prepare(graph_positions(psi, real)))
        for norm, attend, forward in zip(self.norms, self.attention, self.forwards, strict=True):
            x = x + attend(norm(x), real, *graph)
            x = x + forward(x)
        return x

    def forward(
        self, features: Float[Tensor, "B n F"], psi: Float[Tensor, "..."] | None, real: Bool[Tensor, "..."]
    ) -> Float[Tensor, "B out"]:
        """A vector for each graph, of psi [B n n R] and real [B n].

        Raises: ValueError where a pair encoding is missing or means nothing, or nodes differ in number.
        """
        if (psi is None) != (self.bias is None):
            came = "psi is None; give it" if psi is None else f"psi of shape {tuple(psi.shape)} came; give None"
            raise ValueError(f"graph model: built for num_encodings={self.config.num_encodings} but {came}")
        batch, n, _ = features.shape
        if real.shape != (batch, n) or (psi is not None and psi.shape[:3] != (batch, n, n)):
            raise ValueError(
                f"graph model: features of shape {tuple(features.shape)} came with real nodes {tuple(real.shape)} and "
                f"pairs {None if psi is None else tuple(psi.shape)}; give [B n F], [B n] and [B n n R]"
            )
        x = self.nodes(features, psi, real)
        weight = real[..., None].to(x.dtype)
        return self.out((x * weight).sum(1) / weight.sum(1).clamp(min=1))


def without_positions(config: GraphModelConfig) -> GraphModelConfig:
    """The same model without a pair encoding."""
    return replace(config, num_encodings=0)
