"""Progress on stderr: bars in a terminal, one line for each event of note elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from locant.compare.grid import Stage
    from locant.compare.run import Task

_TITLES = {"text": "reading text", "train": "training", "measure": "measuring speed and memory"}


class Watcher:
    """Shows stages and tasks as they happen; use it as a context manager and give it to `compare` as `watch`."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),  # labels and messages may hold brackets
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.bars: dict[Task, TaskID] = {}
        self.total: TaskID | None = None
        self.ended = self.wanted = 0
        self.losses: dict[Task, float] = {}
        self.started: dict[Task, float] = {}

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def __call__(self, subject: Stage | Task, event: dict[str, Any]) -> None:
        """One stage that begins (no event), or one event of a task."""
        if not event:
            self._begin(subject)  # type: ignore[arg-type]
        else:
            getattr(self, f"_{event['event']}")(subject, event)

    def _begin(self, stage: Stage) -> None:
        if self.total is not None:
            self.progress.remove_task(self.total)
            self.total = None
        self.ended, self.wanted = stage.finished, stage.finished + len(stage.tasks)
        done = f" ({stage.finished} of {self.wanted} were finished before)" if stage.finished else ""
        self._say(f"{_TITLES[stage.name]}{done}")
        if stage.name != "text":  # which has bars of its own
            self.progress.start()
            title = _TITLES[stage.name]
            self.total = self.progress.add_task(title, total=self.wanted, completed=stage.finished, note="")

    def _start(self, task: Task, event: dict[str, Any]) -> None:
        self.started[task] = time.monotonic()
        self.bars[task] = self.progress.add_task(f"  {task.title}", total=None, note="starting")

    def _step(self, task: Task, event: dict[str, Any]) -> None:
        self.losses[task] = event["loss"]
        if task.kind == "train":
            note = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.bars[task], completed=event["step"], total=event["steps"], note=note)

    def _evaluate(self, task: Task, event: dict[str, Any]) -> None:
        self.progress.update(self.bars[task], note="evaluating")

    def _lost(self, task: Task, event: dict[str, Any]) -> None:
        if task in self.bars:
            self.progress.remove_task(self.bars.pop(task))
        self._say(f"  {task.title}: starts again elsewhere ({event['message']})")

    def _done(self, task: Task, event: dict[str, Any]) -> None:
        loss = f", last training loss {self.losses[task]:.3f}" if task in self.losses else ""
        self._end(task, f"{time.monotonic() - self.started[task]:.0f} s{loss}", show=task.kind == "train")

    def _failed(self, task: Task, event: dict[str, Any]) -> None:
        self._end(task, f": {event['message']}", alarm="stopped")

    def _error(self, task: Task, event: dict[str, Any]) -> None:
        self._end(task, f": {event['message']}", alarm="failed")

    def _end(self, task: Task, words: str, *, alarm: str = "", show: bool = True) -> None:
        self.ended += 1
        if task in self.bars:  # one that no node took has none
            self.progress.remove_task(self.bars.pop(task))
        if self.total is not None:
            self.progress.advance(self.total)
        if show:
            self._say(Text.assemble(f"  {self.ended:>2}/{self.wanted} {task.title}: ", (alarm, "red"), words))

    def _say(self, words: str | Text) -> None:
        self.console.print(words, highlight=False, soft_wrap=True, markup=False)


class Bars:
    """One bar for each named part of a job: call it with (part, done, total); use it as a context manager."""

    def __init__(self, title: str) -> None:
        self.console = Console(stderr=True)
        self.title = title
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.bars: dict[str, TaskID] = {}
        self.started: dict[str, float] = {}

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._finish()
        self.progress.stop()

    def __call__(self, part: str, done: int, total: int) -> None:
        """Shows how far a part is; the parts before it are finished."""
        if part not in self.bars:
            self._finish()
            self.bars[part] = self.progress.add_task(f"{self.title}: {part}", total=total)
            self.started[part] = time.monotonic()
        self.progress.update(self.bars[part], completed=done, total=total)

    def _finish(self) -> None:
        for part, bar in self.bars.items():
            self.progress.remove_task(bar)
            seconds = time.monotonic() - self.started[part]
            self.console.print(f"{self.title}: {part}, {seconds:.1f} s", highlight=False, soft_wrap=True, markup=False)
        self.bars.clear()


class RunWatcher:
    """One bar for the run that is trained, and a line for each event of note; give it to a run as `watch`."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.bar: TaskID | None = None
        self.title = ""

    def __enter__(self) -> RunWatcher:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """One event of a run."""
        getattr(self, f"_{event['event']}")(event)

    def _read(self, event: dict[str, Any]) -> None:
        self._say("reading and checking data and model")

    def _notice(self, event: dict[str, Any]) -> None:
        self._say(f"note: {event['words']}")

    def _begin(self, title: str) -> None:
        self.title = title
        self.bar = self.progress.add_task(title, total=None, note="starting")

    def _resume(self, event: dict[str, Any]) -> None:
        self._say(f"{self.title}: goes on from {event['checkpoint']}")

    def _step(self, event: dict[str, Any]) -> None:
        if self.bar is not None:
            note = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,.0f} tokens/s"
            self.progress.update(self.bar, completed=event["step"], total=event["steps"], note=note)

    def _finish(self, reason: str | None, found: Iterable[tuple[str, float | None]]) -> None:
        if self.bar is not None:
            self.progress.remove_task(self.bar)
            self.bar = None
        shown = ", ".join(f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in found)
        self._say(f"{self.title}: {reason or shown}")

    def _say(self, words: str) -> None:
        self.console.print(words, highlight=False, soft_wrap=True, markup=False)


class SeedWatcher(RunWatcher):
    """Shows the events of `locant.finetune.run.finetune`."""

    def _kept(self, event: dict[str, Any]) -> None:
        self._say(f"seed {event['seed']}: finished before")

    def _start(self, event: dict[str, Any]) -> None:
        self._begin(f"seed {event['seed']} ({event['number'] + 1} of {event['count']})")

    def _evaluate(self, event: dict[str, Any]) -> None:
        if self.bar is not None:
            self.progress.update(self.bar, note="evaluating")

    def _end(self, event: dict[str, Any]) -> None:
        named = ((f"{dev} {name}", value) for dev, values in event["scores"].items() for name, value in values.items())
        self._finish(event["reason"], named)


class PretrainWatcher(RunWatcher):
    """Shows the events of `locant.pretrain.run.pretrain`."""

    def _kept(self, event: dict[str, Any]) -> None:
        self._say("finished before")

    def _start(self, event: dict[str, Any]) -> None:
        self._begin(event["title"])

    def _validation(self, event: dict[str, Any]) -> None:
        self._say(f"{self.title}: validation loss {event['loss']:.4f} after step {event['step']}")

    def _end(self, event: dict[str, Any]) -> None:
        self._finish(event["reason"], ((f"validation {name}", value) for name, value in event["losses"].items()))
