"""What a recipe says of ELECTRA: how large the generator is, and how much the discriminator's loss weighs.

The two models and their losses are those of `locant.pretrain`; the row of the task is `locant.pretrain.comparison`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ElectraSettings:
    """The table `[electra]` (Clark et al. 2020)."""

    generator_fraction: float = 0.25  # of the discriminator's width, in whole heads; Clark et al. 2020: 1/4 to 1/3
    discriminator_weight: float = 50.0  # of the discriminator's loss beside the generator's

    def __post_init__(self) -> None:
        if not 0 < self.generator_fraction <= 1:
            raise ValueError(f"generator_fraction = {self.generator_fraction}, needed a share above 0 and up to 1")
        if not 0 < self.discriminator_weight < math.inf:
            raise ValueError(
                f"discriminator_weight = {self.discriminator_weight}, needed a number above 0, not infinity"
            )
