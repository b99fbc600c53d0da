"""From the name of a task and its files to a problem."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from locant.compare.fields import near
from locant.finetune.classification import Classification
from locant.finetune.glue import TASKS, GlueData, read_glue
from locant.finetune.problem import Problem
from locant.finetune.reading import Reading
from locant.finetune.settings import FinetuneSettings, GlueSettings, SquadSettings
from locant.finetune.squad import Question, read_squad

SQUAD, GLUE = "squad", "glue/"


@dataclass(frozen=True)
class DataChoice:
    """``train``: one folder (GLUE), or SQuAD-style files read as one; ``dev``: SQuAD-style files, each scored."""

    train: tuple[Path, ...]
    dev: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ReadTask:
    """A task with its files read and checked; `problem` tokenizes them."""

    name: str
    files: tuple[Path, ...]
    glue: GlueData | None = None
    squad_train: tuple[Question, ...] = ()
    squad_dev: dict[str, tuple[Question, ...]] | None = None

    def problem(
        self, tokenizer: PreTrainedTokenizerFast, settings: FinetuneSettings, length: int, with_types: bool
    ) -> Problem:
        """Features of all examples."""
        if self.glue is not None:
            assert isinstance(settings, GlueSettings)
            task = TASKS[self.name.removeprefix(GLUE)]
            return Classification(task, self.glue, tokenizer, settings, length, with_types)
        assert isinstance(settings, SquadSettings)
        return Reading(self.squad_train, dict(self.squad_dev or {}), tokenizer, settings, length, with_types)


def task_names() -> list[str]:
    """All tasks."""
    return [SQUAD, *(GLUE + name for name in TASKS)]


def settings_kind(task: str) -> type[FinetuneSettings]:
    """What can be set for a task. Raises: ValueError for an unknown one."""
    if task not in task_names():
        raise ValueError(f"finetune: unknown task {task!r}; {near(task, task_names())}")
    return SquadSettings if task == SQUAD else GlueSettings


def read_task(task: str, data: DataChoice) -> ReadTask:
    """Reads and checks the files of a task. Raises: FileNotFoundError; ValueError with file, record and field."""
    settings_kind(task)
    if task != SQUAD:
        if len(data.train) != 1 or data.dev:
            given = ", ".join(str(path) for path in (*data.train, *data.dev)) or "nothing"
            raise ValueError(
                f"{task}: {given} came, needed one folder with its training and dev files; give it as --data, without "
                "--dev"
            )
        glue = read_glue(TASKS[task.removeprefix(GLUE)], data.train[0])
        return ReadTask(task, glue.files, glue=glue)
    if not data.train or not data.dev:
        raise ValueError(
            f"squad: {len(data.train)} training and {len(data.dev)} dev files came, needed at least one of each; give "
            "--data FILE.json and --dev FILE.json"
        )
    train = tuple(question for path in data.train for question in read_squad(path))
    if twice := [id_ for id_, count in Counter(question.id for question in train).items() if count > 1]:
        names = ", ".join(str(path) for path in data.train)
        raise ValueError(
            f"squad: {len(twice)} questions are in several of the training files {names} ({', '.join(twice[:3])}); "
            "give every question once"
        )
    dev = {path.name.partition(".")[0]: read_squad(path) for path in data.dev}
    if len(dev) < len(data.dev):
        names = ", ".join(path.name for path in data.dev)
        raise ValueError(f"squad: dev files of one name came ({names}); give every file its own name")
    trained = {question.id for question in train}
    for name, questions in dev.items():
        both = [question.id for question in questions if question.id in trained]
        if both:
            raise ValueError(
                f"squad: {len(both)} questions of {name} are in the training files, too ({', '.join(both[:3])}), so "
                "its scores would say nothing; give other files"
            )
    return ReadTask(task, (*data.train, *data.dev), squad_train=train, squad_dev=dev)
