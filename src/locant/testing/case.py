"""A case: one encoding with its options, its equation for one pair, and the small host layer it is tried in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locant.attention import attention
from locant.encoding import Encoding, Layer
from locant.positions import Positions

BATCH, QUERIES, KEYS = 2, 7, 11  # odd and unequal: a transposed axis cannot pass
DOUBLE = torch.float64


@dataclass(frozen=True)
class Case:
    """What the conformance suite must know about an encoding.

    ``logit(p, q, k, i, j, h)`` is the paper's line for one pair, with every factor: float64 numpy vectors q and k
    before any change by the encoding, position ids i and j, head h; p maps parameter names to numpy arrays and holds
    the layer's projections, ``host.query.weight`` [H*D M], ``host.query.bias``, ``host.key.weight``, ``host.key.bias``.
    ``row(p, q, k, i, j, seen)`` takes the place of ``logit`` where a pair is not enough: the lines of one query for all
    heads and keys [H J], from q [H D], k [H J D], ids i and j [J], and which keys each head may see [H J].
    ``value(p, v, i, j, h)`` is what a pair hands to the output (default v); ``embed(p, x, i, length)`` the vector of a
    token (default x), or ``embed_row(p, x, i, length)`` those of all tokens of a row, from x [N M] and ids i [N], where
    a token's depends on the others. None of them may call the package.
    ``parameters`` counts the numbers of one layer; ``shared``: whether all layers of the paper share them (None: the
    encoding's claim is believed); ``stack_parameters`` those of three layers, where it is neither one nor three times.
    ``reach``: the first distance (for absolute rows: id) from which farther ones share a value; needed where the
    encoding claims ``clip`` or ``saturate``. ``spread`` redraws the parameters so that an error shows.
    """

    id: str
    make: Callable[[], Encoding]
    logit: Callable[..., Any] | None = None
    parameters: int | None = None
    value: Callable[..., Any] | None = None
    embed: Callable[..., Any] | None = None
    shared: bool | None = None
    stack_parameters: int | None = None
    reach: int | None = None
    spread: Callable[[Encoding, torch.Generator], None] | None = None
    num_heads: int = 3
    head_dim: int = 8
    model_dim: int = 10
    row: Callable[..., Any] | None = None
    embed_row: Callable[..., Any] | None = None

    def build(self, dtype: torch.dtype = DOUBLE, seed: int = 1) -> Encoding:
        """The encoding in ``dtype`` with parameters far from their start, in evaluation mode."""
        encoding = self.make().eval()
        redraw(encoding, seed, self.spread)
        return encoding.to(dtype)

    def host(self, dtype: torch.dtype = DOUBLE, seed: int = 2) -> Host:
        """The layer around the encoding, with random projections."""
        host = Host(self.num_heads, self.head_dim, self.model_dim)
        redraw(host, seed)
        return host.to(dtype)

    def random(self, *shape: int, seed: int, dtype: torch.dtype = DOUBLE) -> Tensor:
        """Normal draws, the same for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        return placed(torch.randn(*shape, generator=generator, dtype=DOUBLE, device="cpu").to(dtype))

    def operands(
        self, num_queries: int = QUERIES, num_keys: int = KEYS, dtype: torch.dtype = DOUBLE
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a batch."""
        heads, width = self.num_heads, self.head_dim
        shapes = ((num_queries, 3), (num_keys, 4), (num_keys, 5))
        q, k, v = (self.random(BATCH, heads, n, width, seed=seed, dtype=dtype) for n, seed in shapes)
        return q, k, v


def redraw(
    module: nn.Module, seed: int, spread: Callable[[Any, torch.Generator], None] | None = None, std: float = 0.5
) -> None:
    """Draw every parameter anew from a wide distribution."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        if spread is not None:
            spread(module, generator)
            return
        for parameter in module.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator, dtype=DOUBLE, device="cpu"))


def placed(tensor: Tensor) -> Tensor:
    """A tensor drawn on the CPU, on the default device: draws are the same on each."""
    return tensor.to(torch.get_default_device())


class Host(nn.Module):
    """One attention layer with the four projections less the last: what a real model does around an encoding."""

    def __init__(self, num_heads: int, head_dim: int, model_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(model_dim, num_heads * head_dim)
        self.key = nn.Linear(model_dim, num_heads * head_dim)
        self.value = nn.Linear(model_dim, num_heads * head_dim)

    def split(self, x: Tensor) -> Tensor:
        """[B N H*D] as [B H N D]."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(
        self, encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor, positions: Positions, **how: Any
    ) -> Any:
        """Attention of given q, k, v with the encoding's hooks; ``how`` goes to `locant.attention`.

        Causal by default where the encoding serves nothing else.
        """
        how.setdefault("causal", not encoding.properties.bidirectional)
        q, k = encoding.query_key(q, k, positions)
        terms = encoding.terms(positions, Layer(q, k, x, self.query, self.key))
        return attention(q, k, v, terms, positions, logit_factor=encoding.logit_factor, **how)

    def layer(self, encoding: Encoding, x: Tensor, memory: Tensor, positions: Positions, **how: Any) -> Any:
        """Attention of embedded tokens x [B I M] to embedded tokens memory [B J M]."""
        q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        return self.attend(encoding, q, k, v, x, positions, **how)

    def forward(
        self, encoding: Encoding, x: Tensor, positions: Positions, memory: Tensor | None = None, **how: Any
    ) -> Any:
        """From token vectors x [B I M] (and those of the keys, where they are others) to the output [B H I D]."""
        positions = encoding.prepare(positions)
        keys = x if memory is None else memory
        return self.layer(
            encoding, encoding.embed(x, positions), encoding.embed(keys, of_keys(positions)), positions, **how
        )


def of_keys(positions: Positions) -> Positions:
    """The positions of the keys, as if they were the queries: what embeds them."""
    return replace(
        positions, query=positions.key, query_special=positions.key_special, query_document=positions.key_document
    )


@dataclass(frozen=True)
class Scene:
    """Positions with a mask and causality: one way in which attention is asked."""

    name: str
    positions: Positions
    mask: Tensor | None = None
    causal: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """The arguments for `locant.attention`."""
        return {"mask": self.mask, "causal": self.causal}


def gaps(encoding: Encoding, seed: int = 6, top: int = 40) -> Positions:
    """Explicit ids with gaps, repeats and disorder, different in each row; id 0 is among queries and keys."""
    top = min(top, encoding.max_length or top)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randint(top, (BATCH, QUERIES), generator=generator, device="cpu")
    key = torch.randint(top, (BATCH, KEYS), generator=generator, device="cpu")
    query[1, 2], key[0, 3], key[1, 5], key[0, 0] = 0, 0, 0, top - 1
    return Positions.from_ids(placed(query), placed(key))


def scenes(case: Case, encoding: Encoding) -> Iterator[Scene]:
    """Counted and explicit positions, with and without a mask, causal or not (or always, where it must be)."""
    always = not encoding.properties.bidirectional
    counted = Positions.arange(QUERIES, KEYS)
    generator = torch.Generator().manual_seed(7)
    mask = placed(torch.rand(BATCH, case.num_heads, QUERIES, KEYS, generator=generator, device="cpu")) < 0.6
    mask[1, 0, 4] = False  # a query that sees nothing
    padding = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    padding[0, ..., -3:] = False
    if not always:
        yield Scene("counted", counted)
    yield Scene("gaps", gaps(encoding), causal=always)
    yield Scene("causal", counted, causal=True)
    yield Scene("mask", counted, mask=mask, causal=always)
    yield Scene("gaps, padding and causal", gaps(encoding), mask=padding, causal=True)


def numbers(encoding: Encoding, host: Host) -> Mapping[str, Any]:
    """What an oracle may read: parameters and buffers by name, and the host's projections, as numpy arrays."""
    state = dict(encoding.state_dict()) | {f"host.{name}": value for name, value in host.state_dict().items()}
    return {name: value.detach().double().numpy() for name, value in state.items()}
