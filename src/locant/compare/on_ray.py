"""Where tasks run: the nodes of a Ray cluster, one training run at a time and node share; results come home.

Recipe and prepared text travel to the nodes through Ray's object store, and a finished run's files travel back with
its last event, so nodes need no common file system and no data: only this version of locant and its packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from locant.compare.cluster import (
    ENDS,
    Cluster,
    connect,
    differing_versions,
    read_files,
    scratch_folder,
    write_files,
)
from locant.compare.environment import versions
from locant.compare.executors import Executor, LocalExecutor
from locant.compare.folder import OutputFolder
from locant.compare.recipe import read_recipe
from locant.compare.run import Task, error_event
from locant.training.folder import unwritable

RESULT = "run.json"  # by which a run counts as finished, so it is written last


class RayExecutor:
    """Trains on the nodes of a cluster, and measures speed on this machine.

    Without ``jobs`` every core of the cluster gets a run of its own (every GPU, where there are some and the recipe
    may use them); ``jobs`` is how many run side by side, and the cores are divided among them, unless ``threads`` says
    how many each takes. A round of measurement is done here, by `LocalExecutor`: a table of speeds is of one machine,
    the one that it names.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: OutputFolder,
        jobs: int | None = None,
        threads: int = 0,
        command: str = "",
    ) -> None:
        self.cluster, self.folder, self.jobs, self.command = cluster, folder, jobs, command
        self.threads = threads
        self.here = LocalExecutor(folder, jobs=1, threads=threads, command=command)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Yields (task, event) as they happen; closing the iterator stops every task that still runs."""
        yield from self.here.run([task for task in tasks if task.seed is None])
        training = [task for task in tasks if task.seed is not None]
        if training:
            yield from self._train(training)

    def _train(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        cpus = self.cluster.nodes()
        gpus = int(self.folder.recipe.train.device == "auto" and sum(self.cluster.nodes("GPU")) > 0)
        threads = self.threads or (max(1, min(max(cpus), sum(cpus) // self.jobs)) if self.jobs else 1)
        shared = self.cluster.share(read_files(self.folder.path, "recipe.json", "text"))
        calls = {task: (shared, task, threads, self.command, versions()) for task in tasks}
        events = self.cluster.run(train_on_node, calls, cpus=threads, gpus=gpus, limit=self.jobs)
        with contextlib.closing(events):
            for task, event in events:
                files = event.pop("files", {})
                try:
                    take_home(files, self.folder.run_dir(task.label, task.seed or 0))
                except OSError as error:
                    event = error_event(unwritable(self.folder.path, error))
                yield task, event


def train_on_node(
    shared: dict[str, bytes], task: Task, threads: int, command: str, driver: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Does one training run on this node, in a worker process; its last event brings the files of the run."""
    last: dict[str, Any] = {}
    if wrong := differing_versions(driver):
        message = f"node {platform.node()} has {wrong}; install the same there"
        yield {"event": "error", "kind": "run", "message": message}
        return
    with scratch_folder() as path:
        write_files(path, shared)
        body = json.loads((path / "recipe.json").read_text(encoding="utf-8"))
        folder = OutputFolder(path, read_recipe(body["recipe"], check=False))
        for _, event in LocalExecutor(folder, jobs=1, threads=threads, command=command).run([task]):
            if event["event"] in ENDS:
                last = {**event, "files": read_files(folder.run_dir(task.label, task.seed or 0))}
                if event["event"] == "error":  # of this node's disk, perhaps: no reason for the others to stop
                    last.update(kind="run", message=f"on node {platform.node()}: {event['message']}")
            else:
                yield event
    yield last


def take_home(files: dict[str, bytes], run: Path) -> None:
    """Writes the files of a run into its folder, run.json last; what lay there before goes. Raises: OSError."""
    if not files:
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=run.parent, prefix=f".{run.name}-"))
    try:
        write_files(part, files)
        run.mkdir(exist_ok=True)
        for entry in sorted(part.iterdir(), key=lambda entry: entry.name == RESULT):
            if (run / entry.name).is_dir():
                shutil.rmtree(run / entry.name)
            os.replace(entry, run / entry.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def ray_executor(address: str) -> Iterator[Any]:
    """What `compare` takes as ``executor``, for the cluster at ``address``.

    Raises: ModuleNotFoundError without Ray; ValueError where no cluster answers.
    """

    with connect(address) as cluster:

        def make(folder: OutputFolder, jobs: int | None = None, threads: int = 0, command: str = "") -> Executor:
            return RayExecutor(cluster, folder, jobs, threads, command)

        yield make
