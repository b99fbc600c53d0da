"""Published figures that stand beside the results of a recipe: shown, computed from nothing, tested against nothing."""

from __future__ import annotations

from dataclasses import dataclass

from locant.compare.results import ResultTable

CAUTION = "of other models, data and budgets; nothing is tested against them"


@dataclass(frozen=True)
class Published:
    """One row `[[published]]` of a recipe, in its author's words."""

    claim: str  # what was measured: "Method 4, SQuAD 1.1 dev F1, BERT-base"
    value: str  # as printed, with its unit where it has one
    source: str  # paper, section or file

    def __post_init__(self) -> None:
        for name in ("claim", "value", "source"):
            if not getattr(self, name).strip():
                raise ValueError(f"{name} = {getattr(self, name)!r} of a published figure is empty; say it, or drop it")


def published(table: ResultTable) -> tuple[Published, ...]:
    """The published figures of the recipe that filled a table."""
    return tuple(Published(**row) for row in table.recipe.get("published", ()))
