"""Pair encodings in attention: a learned function of psi, added to the logits or multiplied onto the weights.

    out = (softmax(q k / sqrt(d) + f_add(psi)) * f_mult(psi)) v      Black et al. 2024; no renormalization after f_mult

f is an MLP with GELU, optionally on Gaussian kernels with learned mean and width |s| + 0.01.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Properties
from locant.graphs.distances import PUBLIC_UNREACHABLE
from locant.positions import Positions
from locant.terms import PairBias, Term, WeightScale

MIN_WIDTH = 0.01
PAIRS_KEY = "graph"  # under which a graph's pair encoding travels in Positions.pair


class GaussianKernels(nn.Module):
    """exp(-((x - mean) / width)^2 / 2) / (width sqrt(2 pi)), K for each of R encodings. [... R] -> [... R K]."""

    def __init__(self, num_encodings: int, num_kernels: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.rand(num_encodings, num_kernels) * 3)
        self.width = nn.Parameter(torch.rand(num_encodings, num_kernels) * 3)

    def forward(self, x: Float[Tensor, "... R"]) -> Float[Tensor, "... R K"]:
        """The kernels' values."""
        width = self.width.abs() + MIN_WIDTH
        scaled = (x[..., None] - self.mean) / width
        return torch.exp(-0.5 * scaled**2) / (width * (2 * torch.pi) ** 0.5)

    def spread(self, low: Float[Tensor, " R"], high: Float[Tensor, " R"]) -> None:
        """Evenly from low to high, each as wide as its distance from the next."""
        steps = self.mean.shape[1]
        grid = torch.linspace(0, 1, steps, dtype=low.dtype, device=low.device)
        with torch.no_grad():
            self.mean.copy_(low[:, None] + (high - low)[:, None] * grid)
            self.width.copy_(((high - low)[:, None] / max(steps - 1, 1) - MIN_WIDTH).clamp(min=0).expand_as(self.width))


class PairEncoder(nn.Module):
    """f(psi): one number for each head and pair. Pairs that no path joins have a learned number of their own.

    Shapes: psi [B n n R] (infinite where unreachable) -> [B H n n].     Parameters: hidden (R or R K) + hidden + hidden
    H + H, 2 R K of kernels, H for unreachable pairs.     ``compat_black2024``: unreachable pairs are fed in as 512.
    Raises: ValueError for fewer than 1 encoding, or psi of another number.
    """

    def __init__(
        self,
        num_encodings: int,
        num_heads: int,
        hidden_dim: int = 32,
        num_kernels: int = 0,
        compat_black2024: bool = False,
    ) -> None:
        super().__init__()
        if num_encodings < 1:
            raise ValueError(f"pair encoder: num_encodings={num_encodings}; a graph has at least 1 number for a pair")
        self.num_encodings, self.compat_black2024 = num_encodings, compat_black2024
        self.kernels = GaussianKernels(num_encodings, num_kernels) if num_kernels else None
        width = num_encodings * max(num_kernels, 1)
        self.inner = nn.Sequential(nn.Linear(width, hidden_dim), nn.GELU(), nn.Linear(hidden_dim, num_heads))
        self.unreachable = None if compat_black2024 else nn.Parameter(torch.zeros(num_heads))

    def fit(self, psi: Float[Tensor, "B n n R"], real: Bool[Tensor, "B n"]) -> None:
        """Start in the units of an encoding, before training; give training graphs alone.

        Kernels are spread over its range, and the first layer sees them with a peak of 1; without kernels it sees the
        numbers with mean 0 and deviation 1.

        Raises: ValueError for psi of another number, or without a finite pair.
        """
        self._check(psi)
        pairs = psi[real[:, :, None] & real[:, None, :]]
        pairs = pairs[pairs.isfinite().all(-1)]
        if not len(pairs):
            raise ValueError(f"pair encoder: none of {int(real.sum())} nodes has a finite pair; give other graphs")
        first = self.inner[0]
        assert isinstance(first, nn.Linear)
        with torch.no_grad():
            if self.kernels is not None:
                low, high = pairs.amin(0), pairs.amax(0)
                self.kernels.spread(low, torch.where(high > low, high, low + 1))
                first.weight *= ((self.kernels.width + MIN_WIDTH) * (2 * torch.pi) ** 0.5).flatten()
            else:
                deviation = pairs.std(0, correction=0)
                first.weight /= torch.where(deviation > 0, deviation, 1.0)
                first.bias.sub_(first.weight @ pairs.mean(0))

    def _check(self, psi: Tensor) -> None:
        if psi.shape[-1] != self.num_encodings:
            raise ValueError(
                f"pair encoder: psi has {psi.shape[-1]} numbers for a pair but it was built for {self.num_encodings}; "
                f"build PairEncoder(num_encodings={psi.shape[-1]})"
            )

    def forward(self, psi: Float[Tensor, "B n n R"]) -> Float[Tensor, "B H n n"]:
        """The bias, or factor, of every pair."""
        self._check(psi)
        apart = torch.isinf(psi).any(-1)
        x = torch.where(torch.isinf(psi), PUBLIC_UNREACHABLE if self.compat_black2024 else 0.0, psi)
        if self.kernels is not None:
            x = self.kernels(x).flatten(-2)
        out = self.inner(x)
        if self.unreachable is not None:
            out = torch.where(apart[..., None], self.unreachable, out)
        return out.movedim(-1, 1)


class GraphBias(Encoding):
    """A graph's pair encoding as a bias of the logits, and, where asked for, as a factor of the weights.

    Shapes: reads ``positions.pair["graph"]`` [B n n R].     Acts on: logits, content-free, unscaled; weights.
    Neutral at: last layer of both networks = 0, with 1 as bias of the factor.     Past any size: defined.
    Cost: O(B n^2 hidden).     Raises: ValueError where the positions bring no graph.
    """

    name = "graph_bias"
    paper = Paper("2402.14202", "section 3", "Black et al. 2024")
    properties = Properties(
        shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared", neutral="f_add = 0, f_mult = 1"
    )

    def __init__(
        self,
        num_heads: int,
        num_encodings: int = 1,
        hidden_dim: int = 32,
        num_kernels: int = 0,
        multiply: bool = False,
        compat_black2024: bool = False,
    ) -> None:
        super().__init__()
        sizes = (num_encodings, num_heads, hidden_dim, num_kernels, compat_black2024)
        self.add, self.multiply = PairEncoder(*sizes), PairEncoder(*sizes) if multiply else None

    def fit(self, psi: Float[Tensor, "B n n R"], real: Bool[Tensor, "B n"]) -> None:
        """`PairEncoder.fit` of both networks."""
        self.add.fit(psi, real)
        if self.multiply is not None:
            self.multiply.fit(psi, real)

    def _pairs(self, positions: Positions) -> tuple[Tensor, Tensor | None]:
        if PAIRS_KEY not in positions.pair:
            raise ValueError(
                f"graph_bias: positions bring {sorted(positions.pair) or 'no pairs'}, needed {PAIRS_KEY!r}; build them "
                "with locant.graphs.graph_positions"
            )
        psi = positions.pair[PAIRS_KEY]
        return self.add(psi), None if self.multiply is None else self.multiply(psi)

    def prepare(self, positions: Positions) -> Positions:
        """The bias and factor of all layers, once."""
        return positions.share(self, self._pairs(positions))

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """f_add(psi), and f_mult(psi) after the softmax."""
        bias, factor = positions.recall(self, lambda: self._pairs(positions))
        return (PairBias(bias),) if factor is None else (PairBias(bias), WeightScale(factor))

    def neutralize(self) -> None:
        """Nothing is added, and weights are multiplied by 1."""
        for encoder, value in ((self.add, 0.0), (self.multiply, 1.0)):
            if encoder is not None:
                last = encoder.inner[-1]
                assert isinstance(last, nn.Linear)
                nn.init.zeros_(last.weight)
                nn.init.constant_(last.bias, value)
                if encoder.unreachable is not None:
                    nn.init.constant_(encoder.unreachable, value)


def stack_pairs(
    pairs: list[Float[Tensor, "..."]], dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "B n n R"], Bool[Tensor, "B n"]]:
    """Pair encodings, [n n R] or [n n], of several graphs as one batch, padded with 0, and which nodes are real.

    Raises: ValueError without graphs, for pairs that are not square, and for different R.
    """
    if not pairs:
        raise ValueError(f"stack_pairs: {len(pairs)} graphs came, needed at least 1")
    pairs = [p[..., None] if p.dim() == 2 else p for p in pairs]
    for p in pairs:
        if p.dim() != 3 or not len(p) or p.shape != (len(p), len(p), pairs[0].shape[-1]):
            raise ValueError(
                f"stack_pairs: an encoding of shape {tuple(p.shape)} came beside one of {tuple(pairs[0].shape)}; give "
                "[n n R] with n of 1 or more and the same R for all"
            )
    n = max(len(p) for p in pairs)
    batch = torch.zeros(len(pairs), n, n, pairs[0].shape[-1], dtype=dtype)
    real = torch.zeros(len(pairs), n, dtype=torch.bool)
    for b, p in enumerate(pairs):
        batch[b, : len(p), : len(p)] = p.to(dtype)
        real[b, : len(p)] = True
    return batch, real


def graph_positions(psi: Float[Tensor, "B n n R"], real: Bool[Tensor, "B n"]) -> Positions:
    """Positions that bring pair encodings along; node ids have no meaning of their own and are all counted from 0."""
    positions = Positions.from_mask(real)
    return Positions(
        positions.query,
        positions.key,
        span=positions.span,
        length=positions.length,
        key_real=real,
        pair={PAIRS_KEY: psi},
    )
