"""The page of a fine-tuning call: scores of all seeds, the majority line, differences, curves, settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from locant.compare.curves import read_curves
from locant.compare.tables import spread_text
from locant.finetune.results import Outcome, differences_text, scale_of, value_text
from locant.report.run_page import RunPage, write_run_page


def write_finetune_page(outcome: Outcome, folder: Path, others: Sequence[Outcome] = ()) -> Path:
    """Writes report.html into the output folder that ``outcome`` came from. Raises: OSError."""
    return write_run_page(finetune_page(outcome, folder, others), folder / "report.html")


def finetune_page(outcome: Outcome, folder: Path, others: Sequence[Outcome] = ()) -> RunPage:
    """What the page shows; ``others`` are outcomes that it is held against."""
    scale = scale_of(outcome.task)
    done = [run for run in outcome.runs if run.reason is None]
    rows = []
    for (dev, score), found in outcome.spreads().items():
        level = value_text(outcome.baseline.get(dev, {}).get(score), scale)
        each = [value_text(run.scores[dev][score], scale) for run in done]
        rows.append((f"{dev} {score}", spread_text(found, 2, scale), level, *each))
    examples = ", ".join(f"{name} {count:,}" for name, count in outcome.examples.items())
    parameters = ", ".join(f"{count:,} in the {name}" for name, count in outcome.parameters.items())
    failed = [f"Seed {run.seed} has no scores: {run.reason}" for run in outcome.runs if run.reason]
    try:
        curves = read_curves(folder).curves
    except FileNotFoundError:  # every log was deleted
        curves = ()
    return RunPage(
        command="locant finetune",
        title=f"{outcome.task}: {outcome.label}",
        overview=f"{len(done)} of {len(outcome.runs)} seeds; examples: {examples}; parameters: {parameters}",
        head=("Score", "Mean ± deviation", "Majority class", *(f"Seed {run.seed}" for run in done)),
        rows=tuple(rows),
        sentences=(*differences_text(outcome, others), *failed, *(f"Note: {words}" for words in outcome.notices)),
        curves=curves,
        setting=outcome.recipe,
        environment=outcome.environment,
    )
