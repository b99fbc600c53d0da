"""Progress on stderr: bars in a terminal; elsewhere a line for each event of note, and a line a minute between them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from locant.compare.grid import Stage
    from locant.compare.run import Task

Shown = TypeVar("Shown", bound="Display")
MINUTE = 60.0  # seconds between two lines about one bar, where there is no terminal to draw it in
_TITLES = {"text": "reading text", "train": "training", "measure": "measuring speed and memory"}


class Display:
    """Bars and lines on stderr; use it as a context manager. What is shown, and when, is said by who inherits."""

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
        self.spoken: dict[TaskID, float] = {}

    def __enter__(self: Shown) -> Shown:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def _add(self, title: str, total: int | None = None, completed: int = 0, note: str = "") -> TaskID:
        bar = self.progress.add_task(title, total=total, completed=completed, note=note)
        self.spoken[bar] = time.monotonic()
        return bar

    def _update(self, bar: TaskID, **shown: Any) -> None:
        """Moves a bar; without a terminal, a line says the same if the bar has been silent for a minute."""
        self.progress.update(bar, **shown)
        if not self.console.is_terminal and time.monotonic() - self.spoken[bar] >= MINUTE:
            self.spoken[bar] = time.monotonic()
            task = next(task for task in self.progress.tasks if task.id == bar)
            total = "?" if task.total is None else f"{task.total:.0f}"
            self._say(f"{task.description}: {task.completed:.0f}/{total}  {task.fields['note']}".rstrip())

    def _remove(self, bar: TaskID) -> None:
        self.progress.remove_task(bar)
        del self.spoken[bar]

    def _say(self, words: str | Text) -> None:
        self.console.print(words, highlight=False, soft_wrap=True, markup=False)


class Watcher(Display):
    """Shows stages and tasks as they happen; give it to `compare` as `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: dict[Task, TaskID] = {}
        self.total: TaskID | None = None
        self.ended = self.wanted = 0
        self.losses: dict[Task, float] = {}
        self.started: dict[Task, float] = {}

    def __enter__(self) -> Watcher:  # bars wait until the text is read, which has bars of its own
        return self

    def __call__(self, subject: Stage | Task, event: dict[str, Any]) -> None:
        """One stage that begins (no event), or one event of a task."""
        if not event:
            self._begin(subject)  # type: ignore[arg-type]
        else:
            getattr(self, f"_{event['event']}")(subject, event)

    def _begin(self, stage: Stage) -> None:
        if self.total is not None:
            self._remove(self.total)
            self.total = None
        self.ended, self.wanted = stage.finished, stage.finished + len(stage.tasks)
        done = f" ({stage.finished} of {self.wanted} were finished before)" if stage.finished else ""
        self._say(f"{_TITLES[stage.name]}{done}")
        if stage.name != "text":  # which has bars of its own
            self.progress.start()
            title = _TITLES[stage.name]
            self.total = self._add(title, total=self.wanted, completed=stage.finished, note="")

    def _start(self, task: Task, event: dict[str, Any]) -> None:
        self.started[task] = time.monotonic()
        self.bars[task] = self._add(f"  {task.title}", total=None, note="starting")

    def _step(self, task: Task, event: dict[str, Any]) -> None:
        self.losses[task] = event["loss"]
        if task.kind == "train":
            note = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,.0f} tokens/s"
            self._update(self.bars[task], completed=event["step"], total=event["steps"], note=note)

    def _evaluate(self, task: Task, event: dict[str, Any]) -> None:
        self._update(self.bars[task], note="evaluating")

    def _lost(self, task: Task, event: dict[str, Any]) -> None:
        if task in self.bars:
            self._remove(self.bars.pop(task))
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
            self._remove(self.bars.pop(task))
        if self.total is not None:
            self.progress.advance(self.total)
        if show:
            self._say(Text.assemble(f"  {self.ended:>2}/{self.wanted} {task.title}: ", (alarm, "red"), words))


class Bars(Display):
    """One bar for each named part of a job: call it with (part, done, total)."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title
        self.bars: dict[str, TaskID] = {}
        self.started: dict[str, float] = {}

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._finish()
        super().__exit__(kind, *error)

    def __call__(self, part: str, done: int, total: int) -> None:
        """Shows how far a part is; the parts before it are finished."""
        if part not in self.bars:
            self._finish()
            self.bars[part] = self._add(f"{self.title}: {part}", total=total)
            self.started[part] = time.monotonic()
        self._update(self.bars[part], completed=done, total=total)

    def _finish(self) -> None:
        for part, bar in self.bars.items():
            self._remove(bar)
            seconds = time.monotonic() - self.started[part]
            self._say(f"{self.title}: {part}, {seconds:.1f} s")
        self.bars.clear()


class RunWatcher(Display):
    """One bar for the run that is trained, and a line for each event of note; give it to a run as `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.bar: TaskID | None = None
        self.title = ""

    def __call__(self, event: dict[str, Any]) -> None:
        """One event of a run."""
        getattr(self, f"_{event['event']}")(event)

    def _read(self, event: dict[str, Any]) -> None:
        self._say("reading and checking data and model")

    def _notice(self, event: dict[str, Any]) -> None:
        self._say(f"note: {event['words']}")

    def _begin(self, title: str) -> None:
        self.title = title
        self.bar = self._add(title, total=None, note="starting")

    def _resume(self, event: dict[str, Any]) -> None:
        self._say(f"{self.title}: goes on from {event['checkpoint']}")

    def _step(self, event: dict[str, Any]) -> None:
        if self.bar is not None:
            note = f"loss {event['loss']:.3f}  {event['tokens_per_second']:,.0f} tokens/s"
            self._update(self.bar, completed=event["step"], total=event["steps"], note=note)

    def _finish(self, reason: str | None, found: Iterable[tuple[str, float | None]]) -> None:
        if self.bar is not None:
            self._remove(self.bar)
            self.bar = None
        shown = ", ".join(f"{name} {'-' if value is None else f'{value:.4g}'}" for name, value in found)
        self._say(f"{self.title}: {reason or shown}")


class SeedWatcher(RunWatcher):
    """Shows the events of `locant.finetune.run.finetune`."""

    def _kept(self, event: dict[str, Any]) -> None:
        self._say(f"seed {event['seed']}: finished before")

    def _start(self, event: dict[str, Any]) -> None:
        self._begin(f"seed {event['seed']} ({event['number'] + 1} of {event['count']})")

    def _evaluate(self, event: dict[str, Any]) -> None:
        if self.bar is not None:
            self._update(self.bar, note="evaluating")

    def _end(self, event: dict[str, Any]) -> None:
        from locant.finetune.results import scale_of

        scale = scale_of(event["task"])  # as in the table
        scores = ((dev, name, value) for dev, values in event["scores"].items() for name, value in values.items())
        named = ((f"{dev} {name}", None if value is None else scale * value) for dev, name, value in scores)
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
