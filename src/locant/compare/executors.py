"""Where tasks run: local worker processes, several side by side."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from locant.compare.environment import available_cores
from locant.compare.folder import OutputFolder
from locant.compare.run import Task, error_event, perform, work_dir_of


@runtime_checkable
class Executor(Protocol):
    """Does tasks somewhere and tells what happens. Closing its iterator stops every task that still runs.

    Events: start; step (step, loss, tokens_per_second); evaluate; lost (its node went away and it starts again;
    message); then one of done, failed (a result: the loss diverged; message) and error (no result; kind "run" or
    "output", message).
    """

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yields (task, event) as they happen."""
        ...


class InlineExecutor:
    """Does tasks one after the other in this very process: for debuggers and tests."""

    def __init__(self, folder: OutputFolder, jobs: int | None = None, threads: int = 0, command: str = "") -> None:
        self.folder, self.command = folder, command

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yields the events of a task when it has ended."""
        for task in tasks:
            events: list[dict[str, Any]] = [{"event": "start"}]
            try:
                perform(task, self.folder, work_dir_of(self.folder, task), events.append, self.command)
            except Exception as error:
                traceback.print_exc()
                events.append(error_event(error))
            yield from ((task, event) for event in events)


class LocalExecutor:
    """Runs tasks in `jobs` worker processes (None: as the recipe says) of `threads` threads each (0: the cores
    divided among the jobs).

    A worker forks for every task where that is safe; `fresh` starts a new process for each task everywhere.
    """

    def __init__(
        self, folder: OutputFolder, jobs: int | None = None, threads: int = 0, command: str = "", fresh: bool = False
    ) -> None:
        self.out, self.jobs, self.command, self.fresh = folder.path, jobs or folder.recipe.jobs, command, fresh
        self.threads = threads or max(1, available_cores() // self.jobs)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yields (task, event) as they happen; closing the iterator stops every task that still runs."""
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        events: queue.SimpleQueue[tuple[Task, dict[str, Any]] | None] = queue.SimpleQueue()
        slots = [_Slot(self, waiting, events) for _ in range(min(self.jobs, len(tasks)))]
        try:
            for slot in slots:
                slot.start()
            for _ in slots:
                while (item := events.get()) is not None:
                    yield item
        finally:
            for slot in slots:
                slot.stop()


class _Slot(threading.Thread):
    """Takes tasks one after the other and has them done by a worker process."""

    def __init__(
        self, executor: LocalExecutor, waiting: queue.SimpleQueue[Task], events: queue.SimpleQueue[Any]
    ) -> None:
        super().__init__(daemon=True)
        self.executor, self.waiting, self.events = executor, waiting, events
        self.worker: subprocess.Popen[str] | None = None
        self.stopped = False

    def run(self) -> None:
        """Until nothing waits, or it is stopped."""
        try:
            while not self.stopped:
                try:
                    task = self.waiting.get_nowait()
                except queue.Empty:
                    break
                self._do(task)
        finally:
            self.stop()
            self.events.put(None)

    def _do(self, task: Task) -> None:
        self.events.put((task, {"event": "start"}))
        try:
            worker = self._ready_worker()
            body = {**vars(task), "command": self.executor.command}
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps(body) + "\n")
            worker.stdin.flush()
            for line in worker.stdout:
                event = json.loads(line)
                if event["event"] == "end":
                    if event.get("leaves"):  # it serves no second task
                        self._close_pipes()
                        worker.wait()
                        self.worker = None
                    return
                self.events.put((task, event))
            message = f"its process ended with code {worker.wait()}"
        except OSError as error:
            message = f"its process could not be reached: {error}"
        if not self.stopped:
            self.events.put((task, {"event": "error", "kind": "run", "message": message}))
        self._close_pipes()
        self.worker = None

    def _ready_worker(self) -> subprocess.Popen[str]:
        if self.worker is None or self.worker.poll() is not None:
            threads = str(self.executor.threads)
            environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
            environment.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
            self.worker = subprocess.Popen(
                [sys.executable, "-m", "locant.compare.worker", str(self.executor.out), threads]
                + ["fresh"] * self.executor.fresh,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops the workers in order
            )
            assert self.worker.stdout is not None
            if not self.worker.stdout.readline():
                raise OSError(f"worker ended with code {self.worker.wait()} before its first task")
        return self.worker

    def stop(self) -> None:
        """Ends the worker and the task it is at."""
        self.stopped = True
        worker = self.worker
        if worker is None:
            return
        with contextlib.suppress(OSError):
            if worker.stdin is not None:
                worker.stdin.close()
        try:
            worker.wait(timeout=5)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
        if threading.current_thread() is self:  # which may be reading from it
            self._close_pipes()

    def _close_pipes(self) -> None:
        if self.worker is not None:
            for pipe in (self.worker.stdin, self.worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
