"""Dataclass in, matplotlib Figure out. The only folder that imports matplotlib; nothing here touches pyplot."""

from locant.plots.analysis import (
    analysis_figures,
    attention_by_offset,
    drift_by_shift,
    invariance_over_training,
    locality_by_layer,
    patterns_of_heads,
    probe_by_layer,
    scoring_functions,
    similarity_of_positions,
    spectrum_of_table,
    tuned_and_tested,
    word_position_maps,
)
from locant.plots.bench import cost_of_attention
from locant.plots.compare import figures, loss_by_length, loss_by_shift, loss_by_step, speed_against_quality
from locant.plots.curves import loss_curves
from locant.plots.style import ONE_COLUMN, TWO_COLUMN, save, to_svg

__all__ = [
    "ONE_COLUMN",
    "TWO_COLUMN",
    "analysis_figures",
    "attention_by_offset",
    "cost_of_attention",
    "drift_by_shift",
    "figures",
    "invariance_over_training",
    "locality_by_layer",
    "loss_by_length",
    "loss_by_shift",
    "loss_by_step",
    "loss_curves",
    "patterns_of_heads",
    "probe_by_layer",
    "save",
    "scoring_functions",
    "similarity_of_positions",
    "spectrum_of_table",
    "speed_against_quality",
    "to_svg",
    "tuned_and_tested",
    "word_position_maps",
]
