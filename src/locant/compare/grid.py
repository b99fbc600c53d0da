"""`compare`: the grid of encodings x seeds, trained, measured and gathered; what is finished is never done again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.compare.environment import environment
from locant.compare.executors import Executor, LocalExecutor
from locant.compare.folder import OutputFolder, open_folder
from locant.compare.measure import median_speed
from locant.compare.objective import Data, find_objective
from locant.compare.recipe import Recipe
from locant.compare.results import ResultTable, RunResult, Speed
from locant.compare.run import Task
from locant.compare.tables import encodings_csv, runs_csv
from locant.training.folder import unwritable


@dataclass(frozen=True)
class Stage:
    """What begins: "text", "train" or "measure", with the tasks that wait and how many were finished before."""

    name: str
    tasks: tuple[Task, ...] = ()
    finished: int = 0


Watch = Callable[[Stage | Task, dict[str, Any]], None]


def compare(
    recipe: Recipe,
    out: str | Path,
    *,
    jobs: int | None = None,
    threads: int = 0,
    watch: Watch | None = None,
    command: str = "",
    executor: Callable[..., Executor] = LocalExecutor,
) -> ResultTable:
    """Runs what is missing of a recipe in the folder `out`, writes results.json, table.csv and runs.csv, returns them.

    `watch(stage, {})` is called when a stage begins and `watch(task, event)` at every event of a task. Interrupt it at
    any time: called again it goes on after the last finished run. `executor` says where tasks run: in processes of this
    machine, `jobs` of them side by side (None: as many as the recipe says) with `threads` threads each (0: the cores
    divided among them), or where `on_ray.ray_executor` puts them.
    Raises: ValueError for a folder of another recipe or text too short; OSError where the folder cannot be written.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"compare: jobs = {jobs}, needed at least 1")
    if threads < 0:
        raise ValueError(f"compare: threads = {threads}, needed at least 1, or 0: the cores divided among the runs")
    if len(recipe.parts()) > 1:
        raise ValueError(
            f"compare: the recipe names {len(recipe.parts())} problems or tasks, and each is a comparison of its own; "
            "call locant.compare.series.compare_series"
        )
    objective = find_objective(recipe.task)
    watch = watch or (lambda subject, event: None)
    with open_folder(out, recipe) as folder:
        watch(Stage("text"), {})
        try:
            data = objective.prepare(recipe, folder.text, progress=sys.stderr.isatty())
        except OSError as error:
            if error.filename is not None and str(folder.path) in str(error.filename):
                raise unwritable(folder.path, error) from error
            raise
        failures = _train(folder, executor(folder, jobs=jobs, threads=threads, command=command), watch)
        alone = executor(folder, jobs=1, threads=recipe.measure.threads, command=command)
        speeds = _measure(folder, alone, watch)
        table = _table(folder, failures, speeds, data, command)
        folder.write("results.json", table.to_json())
        folder.write("table.csv", encodings_csv(table))
        folder.write("runs.csv", runs_csv(table))
    return table


def _train(folder: OutputFolder, executor: Executor, watch: Watch) -> dict[tuple[str, int], str]:
    """Does the runs that are missing; returns why runs failed that left no run.json."""
    recipe = folder.recipe
    wanted = [Task("train", label, seed=seed) for seed in recipe.seeds for label in recipe.labels]
    missing = [task for task in wanted if folder.finished(task.label, task.seed or 0) is None]
    watch(Stage("train", tuple(missing), len(wanted) - len(missing)), {})
    failures: dict[tuple[str, int], str] = {}
    for task, message in _execute(executor, missing, watch):
        failures[task.label, task.seed or 0] = message
    return failures


def _measure(folder: OutputFolder, executor: Executor, watch: Watch) -> dict[str, Speed]:
    """Speed and memory, one encoding at a time; rounds alternate their order, so that drift hits all alike."""
    recipe = folder.recipe
    rounds = range(recipe.measure.rounds)
    wanted = [
        Task("measure", label, round=round_)
        for round_ in rounds
        for label in (recipe.labels if round_ % 2 == 0 else reversed(recipe.labels))
    ]
    missing = [task for task in wanted if folder.measured(task.label, task.round or 0) is None]
    if wanted:
        watch(Stage("measure", tuple(missing), len(wanted) - len(missing)), {})
    failures = {task.label: message for task, message in _execute(executor, missing, watch)}
    speeds = {}
    for label in recipe.labels:
        measured = [speed for round_ in rounds if (speed := folder.measured(label, round_)) is not None]
        if measured:
            speeds[label] = median_speed(measured)
        elif label in failures:
            speeds[label] = Speed(None, None, None, None, failures[label])
    return speeds


def _execute(executor: Executor, tasks: Sequence[Task], watch: Watch) -> list[tuple[Task, str]]:
    """Failed tasks with their messages. Raises: OSError when an output cannot be written, which would fail all."""
    failed = []
    events = executor.run(tasks)
    try:
        for task, event in events:
            watch(task, event)
            if event["event"] == "error":
                if event["kind"] == "output":
                    raise OSError(event["message"])
                failed.append((task, event["message"]))
    finally:
        events.close()  # type: ignore[attr-defined]
    return failed


def _table(
    folder: OutputFolder,
    failures: dict[tuple[str, int], str],
    speeds: dict[str, Speed],
    data: Data,
    command: str,
) -> ResultTable:
    recipe = folder.recipe
    runs = []
    for label in recipe.labels:
        for seed in recipe.seeds:
            run = folder.finished(label, seed)
            if run is None:
                reason = failures.get((label, seed), "was not run")
                run = RunResult(label, recipe.choice(label).options, seed, "failed", reason)
            runs.append(run)
    length = find_objective(recipe.task).trained_length(recipe)
    facts = {**environment(command), "text": data.facts}
    return ResultTable(recipe.to_dict(), recipe.baseline_label, length, tuple(runs), speeds, facts)
