"""Dataclass in, matplotlib Figure out. The only folder that imports matplotlib; nothing here touches pyplot."""

from locant.plots.bench import cost_of_attention
from locant.plots.compare import loss_by_length, loss_by_shift, loss_by_step, speed_against_quality
from locant.plots.style import ONE_COLUMN, TWO_COLUMN, save, to_svg

__all__ = [
    "ONE_COLUMN",
    "TWO_COLUMN",
    "cost_of_attention",
    "loss_by_length",
    "loss_by_shift",
    "loss_by_step",
    "save",
    "speed_against_quality",
    "to_svg",
]
