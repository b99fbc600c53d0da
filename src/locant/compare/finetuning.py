"""What a recipe says of the task `finetune`: the pretrained model, the files, and the settings of its runs.

The runs themselves are those of `locant.finetune`; the row of the task is `locant.finetune.comparison`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FinetuneTable:
    """The table `[finetune]`. Each task is a comparison of its own; paths may hold $NAME and ~."""

    tasks: tuple[str, ...] = ()  # squad, glue/cola, ... of locant.finetune
    model: str = ""  # the pretrained model that every run begins with: a folder
    tokenizer: str = ""  # "": the model's own
    data: tuple[str, ...] = ()  # GLUE: one folder; SQuAD: training files, read as one
    dev: tuple[str, ...] = ()  # SQuAD: files, each scored
    settings: dict[str, Any] = field(default_factory=dict)  # fields of locant.finetune.settings
    per_task: dict[str, Any] = field(default_factory=dict)  # by task: settings that differ there

    def __post_init__(self) -> None:
        if repeated := sorted({task for task in self.tasks if self.tasks.count(task) > 1}):
            raise ValueError(f"tasks has {repeated[0]!r} twice; drop one")
        for task, settings in self.per_task.items():
            if not isinstance(settings, dict):
                raise ValueError(
                    f'per_task has {task!r} = {settings!r}, needed a table; write [finetune.per_task."{task}"]'
                )

    def settings_of(self, task: str) -> dict[str, Any]:
        """What is set for one task."""
        return {**self.settings, **self.per_task.get(task, {})}
