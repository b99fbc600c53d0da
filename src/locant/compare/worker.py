"""The process that trains and measures: `python -m locant.compare.worker OUT THREADS`, one task a line on stdin.

A task is {"kind": "train", "label", "seed"} or {"kind": "measure", "label", "round"}; events come back as JSON lines on
stdout, the last of each task being "end". Every task gets a process of its own: on Linux without CUDA a fork of this
one, which has only imported things so far, so that a task starts at once; elsewhere this process, which then ends. When
stdin closes, because the parent was stopped or killed, everything here ends too: no run goes on unseen.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.05


def main(out: str, threads: int, fresh: bool = False) -> int:
    """Serves tasks until stdin closes, each in a forked process; where forking is unsafe (or `fresh`) only one task."""
    warnings.simplefilter("ignore")
    events = os.fdopen(os.dup(1), "w", buffering=1)
    import torch

    import locant.compare.run
    import locant.training.trainer  # noqa: F401  imported before any fork

    forks = sys.platform == "linux" and not torch.backends.cuda.is_built() and not fresh
    _emit(events, {"event": "ready"})
    while (line := sys.stdin.readline()).strip():
        task = json.loads(line)
        if not forks:
            threading.Thread(target=_end_with_stdin, daemon=True).start()
            code = _perform(task, Path(out), threads, events)
            _emit(events, {"event": "end", "leaves": True})
            return code
        child = os.fork()
        if not child:
            threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
            os._exit(_perform(task, Path(out), threads, events))
        if not _wait(child, events):
            return 1
        _emit(events, {"event": "end"})
    return 0


def _perform(task: dict[str, Any], out: Path, threads: int, events: Any) -> int:
    """Does one task in this process; what it prints goes to the log of its run."""
    import torch

    from locant.compare.folder import OutputFolder
    from locant.compare.recipe import read_recipe
    from locant.compare.run import Task, error_event, perform, work_dir_of

    try:
        command = task["command"]
        recipe = read_recipe(json.loads((out / "recipe.json").read_text(encoding="utf-8"))["recipe"], check=False)
        folder = OutputFolder(out, recipe)
        asked = Task(task["kind"], task["label"], task["seed"], task["round"])
        work_dir = work_dir_of(folder, asked)
        with open(work_dir / "log.txt", "a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        torch.set_num_threads(threads)
        perform(asked, folder, work_dir, lambda event: _emit(events, event), command)
        return 0
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _emit(events, error_event(error))
        return 1


def _emit(events: Any, event: dict[str, Any]) -> None:
    try:
        events.write(json.dumps(event) + "\n")
        events.flush()
    except OSError:  # nobody listens any more
        os._exit(3)


def _wait(child: int, events: Any) -> bool:
    """Waits for a forked task; False when stdin closed meanwhile, which ends the task."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if os.WIFSIGNALED(status):
                message = f"its process was killed by signal {os.WTERMSIG(status)} (9 is often a lack of memory)"
                _emit(events, {"event": "error", "kind": "run", "message": message})
            return True
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:  # the parent sends nothing while a task runs
            os.kill(child, 9)
            os.waitpid(child, 0)
            return False


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(3)


def _end_with_stdin() -> None:
    sys.stdin.readline()
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), fresh=sys.argv[3:] == ["fresh"]))
