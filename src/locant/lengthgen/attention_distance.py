"""How far the attention of one model is from that of another: section 5.2 of the study.

    D(l) = min over pairs of heads of the mean over rows t of d(P_t, Q_t),      rows over keys 0 .. t

Two readings of the Jensen-Shannon divergence and of the pairs are kept apart. The usual divergence is
``(KL(p||m) + KL(q||m)) / 2`` with m the mean of p and q, at most ln 2. The public analyzer computes
``(KL(m||p) + KL(m||q)) / 2`` instead, which has no bound and is infinite where p or q is 0. And it compares the pairs
h1 < h2 alone: 66 of 144 for 12 heads, never the same head of both models.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def kl(p: Float[Tensor, "... J"], q: Float[Tensor, "... J"]) -> Float[Tensor, "..."]:
    """KL(p || q) in nats along the last axis; 0 log 0 is 0, and mass where q has none makes it infinite."""
    return (torch.special.xlogy(p, p) - torch.special.xlogy(p, q)).sum(-1)


def jensen_shannon(
    p: Float[Tensor, "... J"], q: Float[Tensor, "... J"], *, public: bool = False
) -> Float[Tensor, "..."]:
    """Jensen-Shannon divergence in nats; ``public=True`` is what the study's analyzer computes (see the module)."""
    middle = (p + q) / 2
    pairs = ((middle, p), (middle, q)) if public else ((p, middle), (q, middle))
    return sum(kl(first, second) for first, second in pairs) / 2  # pyright: ignore[reportReturnType]


def symmetric_kl(p: Float[Tensor, "... J"], q: Float[Tensor, "... J"]) -> Float[Tensor, "..."]:
    """(KL(p||q) + KL(q||p)) / 2 in nats, the divergence that the study reports."""
    return (kl(p, q) + kl(q, p)) / 2


DIVERGENCES = {
    "jensen_shannon": jensen_shannon,
    "jensen_shannon_public": lambda p, q: jensen_shannon(p, q, public=True),
    "symmetric_kl": symmetric_kl,
}


def head_distances(
    p: Float[Tensor, "B H I J"], q: Float[Tensor, "C G K L"], divergence: str = "jensen_shannon"
) -> Float[Tensor, "H G"]:
    """Mean over samples and rows of the divergence between every head of one model and every head of the other.

    Raises: ValueError for an unknown divergence, or weights of different shapes.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"attention distance: divergence={divergence!r}; choose one of {', '.join(DIVERGENCES)}")
    if p.shape[0] != q.shape[0] or p.shape[2:] != q.shape[2:]:
        raise ValueError(
            f"attention distance: weights of shapes {tuple(p.shape)} and {tuple(q.shape)}; give both models the same "
            "samples"
        )
    distance = DIVERGENCES[divergence]
    return torch.stack(
        [torch.stack([distance(p[:, h], q[:, g]).mean() for g in range(q.shape[1])]) for h in range(p.shape[1])]
    )


def layer_distance(
    p: Float[Tensor, "B H I J"],
    q: Float[Tensor, "C G K L"],
    divergence: str = "jensen_shannon",
    *,
    public_pairs: bool = False,
) -> float:
    """The least distance between a head of one model and a head of the other in one layer.

    All pairs are compared; ``public_pairs=True`` compares those with h1 < h2 alone, as the study's analyzer does.
    Raises: ValueError as `head_distances`, and with ``public_pairs`` where there is but one head.
    """
    found = head_distances(p, q, divergence)
    if public_pairs:
        upper = torch.ones_like(found, dtype=torch.bool).triu(1)
        if not upper.any():
            raise ValueError(f"attention distance: {tuple(found.shape)} heads have no pair h1 < h2; compare all pairs")
        found = found[upper]
    return float(found.min())


def model_distance(
    p: list[Float[Tensor, "B H I J"]],
    q: list[Float[Tensor, "B G I J"]],
    divergence: str = "jensen_shannon",
    *,
    public_pairs: bool = False,
) -> tuple[float, ...]:
    """`layer_distance` of each layer (what `output_attentions=True` returns of two models on the same samples).

    Raises: ValueError where the models have different numbers of layers.
    """
    if len(p) != len(q):
        raise ValueError(f"attention distance: {len(p)} layers beside {len(q)}; compare models of one depth")
    return tuple(layer_distance(a, b, divergence, public_pairs=public_pairs) for a, b in zip(p, q, strict=True))
