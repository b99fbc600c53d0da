"""How much arithmetic a step takes, and how much of what the machine can do that is (MFU).

A matrix that multiplies a token costs 6 operations a weight (2 forward, 4 backward), attention 12 n M a token and layer
in windows of n tokens (Chowdhery et al. 2022, appendix B). Shared layers count as often as they run; the vocabulary
head counts for the predicted tokens, to which alone it is applied. Positions, norms and embeddings are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from locant.pretrain.objectives import ObjectiveChoice
from locant.training.hosts import FAMILIES, GENERATOR, Family, Shape

MEASURED_FOR = 0.3  # seconds
SIDES = {"cpu": 1024}  # of the square matrices that are multiplied; elsewhere:
SIDE = 8192


@dataclass(frozen=True)
class Cost:
    """Weights that multiply each token, those that multiply each predicted one, and layers times width."""

    body: int
    head: int
    attention: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.body + other.body, self.head + other.head, self.attention + other.attention)

    def flops(self, tokens: float, predicted: float, length: int) -> float:
        """Of a training step over so many tokens, in windows of ``length``."""
        return 6.0 * (self.body * tokens + self.head * predicted) + 12.0 * self.attention * length * tokens


def cost_of(objective: ObjectiveChoice, family: Family, shape: Shape) -> Cost:
    """Of an objective's models."""
    if objective.name != "electra":
        return _cost(family, shape)
    discriminator = _cost(FAMILIES["electra"], shape)
    told = shape.model_dim * shape.model_dim + shape.model_dim  # its head reads every token
    return Cost(discriminator.body + told, 0, discriminator.attention) + _cost(
        GENERATOR, shape.fraction(objective.generator_fraction)
    )


def _cost(family: Family, shape: Shape) -> Cost:
    width, outer = shape.model_dim, shape.embedding_dim
    body = shape.num_layers * (4 * width * width + 2 * width * shape.hidden_dim)
    if outer != width or family is FAMILIES["albert"]:
        body += outer * width
    head = outer * shape.vocab_size + (width * outer if family.transform else 0)
    return Cost(body, head, shape.num_layers * width)


def measure_peak(device: torch.device, bfloat16: bool) -> float:
    """Operations a second of a product of two large square matrices: the best of several."""
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    side = SIDES.get(device.type, SIDE)
    a = torch.ones(side, side, device=device, dtype=dtype)
    best, until = float("inf"), time.perf_counter() + MEASURED_FOR
    while time.perf_counter() < until or best == float("inf"):
        start = time.perf_counter()
        torch.matmul(a, a)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2.0 * side**3 / best
