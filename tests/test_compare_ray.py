from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from locant.cli import app
from locant.compare import cluster as cluster_module
from locant.compare.cluster import Cluster, connect, differing_versions, read_files, scratch_folder, write_files
from locant.compare.environment import versions
from locant.compare.executors import InlineExecutor, LocalExecutor
from locant.compare.folder import open_folder
from locant.compare.grid import compare
from locant.compare.on_ray import RayExecutor, take_home, train_on_node
from locant.compare.recipe import Recipe, read_recipe
from locant.compare.results import ResultTable, read_results
from locant.compare.run import Task
from locant.training.folder import lock_folder
from tests.compare_runs import table, toml, write_text
from tests.finetune_runs import save_model, write_rte
from tests.processes import ROOT, run
from tests.ray_nodes import Nodes


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


# --- without Ray: a stand-in that hands over the events it was given -------------------------------------------------


class Lost(Exception):
    pass


class Raised(Lost):
    def __init__(self, cause: Exception | None) -> None:
        self.cause = cause


class StandIn:
    """What `Cluster` uses of Ray. ``nodes_``: CPUs of each node. An event that is an exception is raised."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.nodes_ = [{"Alive": True, "Resources": dict(node)} for node in nodes or ({"CPU": 3.0},)]
        self.started: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}
        self.cancelled = self.most = self.at_once = 0
        self.exceptions = type("exceptions", (), {"RayError": Lost, "RayTaskError": Raised})

    def nodes(self) -> list[dict[str, Any]]:
        return self.nodes_

    def put(self, files: Any) -> Any:
        return files

    def remote(self, **options: Any) -> Any:
        self.options = options

        def decorate(work: Any) -> Any:
            def start(*arguments: Any) -> Any:
                self.started.append(arguments)
                self.at_once += 1
                self.most = max(self.most, self.at_once)
                return iter(work(*arguments))

            return type("remote", (), {"remote": staticmethod(start)})

        return decorate

    def wait(self, streams: list[Any], **options: Any) -> tuple[list[Any], list[Any]]:
        return streams[-1:], streams[:-1]

    def get(self, event: Any) -> Any:
        if isinstance(event, Exception) or event["event"] in ("done", "failed", "error"):
            self.at_once -= 1
        if isinstance(event, Exception):
            raise event
        return event

    def cancel(self, stream: Any, force: bool) -> None:
        self.cancelled += force


def done(*before: Any) -> list[Any]:
    return [{"event": "start"}, *before, {"event": "done"}]


def test_a_lost_call_is_started_again_and_a_finished_one_never() -> None:
    plans = {"a": iter([done()]), "b": iter([[{"event": "start"}, Lost("The node died. More")], done()])}
    ray = StandIn()
    seen = list(Cluster(ray, "here:1").run(lambda key: next(plans[key]), {"a": ("a",), "b": ("b",)}, limit=2))
    assert Counter(ray.started) == {("a",): 1, ("b",): 2}
    assert [event for key, event in seen if key == "b"] == [
        {"event": "start"},
        {"event": "lost", "message": "Lost: The node died"},
        {"event": "start"},
        {"event": "done"},
    ]
    assert [event["event"] for key, event in seen if key == "a"] == ["start", "done"]
    assert ray.options["max_retries"] == 0
    assert ray.cancelled == 0


def test_a_node_lost_after_the_last_event_loses_nothing() -> None:
    ray = StandIn()
    seen = list(Cluster(ray, "here:1").run(lambda: [*done(), Lost("too late")], {"a": ()}))
    assert [event["event"] for _, event in seen] == ["start", "done"]
    assert len(ray.started) == 1


def test_a_call_that_takes_its_node_along_every_time_is_given_up() -> None:
    ray = StandIn()
    seen = list(Cluster(ray, "here:1").run(lambda: [Lost("out of memory")], {"a": ()}))
    assert len(ray.started) == 5
    assert seen[-1][1] == {
        "event": "error",
        "kind": "run",
        "message": "its node was lost 5 times, last: Lost: out of memory",
    }
    assert [event["event"] for _, event in seen] == ["lost"] * 4 + ["error"]


def test_what_a_call_raises_fails_it_alone() -> None:
    plans = {"a": [Raised(KeyError("eggs"))], "b": done(), "c": []}
    seen = dict(Cluster(StandIn(), "here:1").run(lambda key: plans[key], {key: (key,) for key in plans}))
    assert seen["a"] == {"event": "error", "kind": "run", "message": "KeyError: 'eggs'"}
    assert seen["b"]["event"] == "done"
    assert seen["c"] == {"event": "error", "kind": "run", "message": "it ended without a result"}


def test_no_more_calls_run_at_a_time_than_asked_for() -> None:
    ray = StandIn()
    assert len(dict(Cluster(ray, "here:1").run(lambda key: done(), {key: (key,) for key in "abcde"}, limit=2))) == 5
    assert ray.most == 2
    whole = StandIn()
    assert len(dict(Cluster(whole, "here:1").run(lambda key: done(), {key: (key,) for key in "abcde"}))) == 5
    assert whole.most == 5


def test_closing_stops_what_runs() -> None:
    ray = StandIn()
    events = Cluster(ray, "here:1").run(lambda key: done(), {key: (key,) for key in "abc"}, limit=2)
    assert next(events)[1] == {"event": "start"}
    events.close()
    assert ray.cancelled == 2


def test_without_a_node_that_could_take_a_run_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = StandIn({"CPU": 1.0}, {"GPU": 1.0})
    monkeypatch.setattr(ray, "wait", lambda streams, **options: ([], streams))
    with pytest.raises(OSError, match=r"the cluster at here:1 has 2 CPUs, needed for each of 3 runs; start nodes"):
        list(Cluster(ray, "here:1").run(lambda key: done(), {key: (key,) for key in "abc"}, cpus=2, limit=1))
    ray.nodes_[0]["Alive"] = False
    with pytest.raises(OSError, match=r"has 1 CPUs, needed for each of 1 runs"):
        list(Cluster(ray, "here:1").run(lambda: done(), {"a": ()}))


@pytest.mark.parametrize(
    ("jobs", "threads", "nodes", "cpus", "gpus", "limit"),
    [
        (None, 0, [{"CPU": 3.0}, {"CPU": 4.0}], 1, 0, None),
        (2, 0, [{"CPU": 3.0}, {"CPU": 4.0}], 3, 0, 2),
        (1, 0, [{"CPU": 3.0}, {"CPU": 4.0}], 4, 0, 1),  # no run spans two nodes
        (9, 0, [{"CPU": 3.0}, {"CPU": 4.0}], 1, 0, 9),
        (2, 1, [{"CPU": 3.0}, {"CPU": 4.0}], 1, 0, 2),
        (None, 2, [{"CPU": 3.0}, {"CPU": 4.0}], 2, 0, None),
        (None, 0, [{"CPU": 3.0, "GPU": 2.0}], 1, 1, None),
    ],
)
def test_cores_are_divided_among_the_jobs(
    text: Path,
    tmp_path: Path,
    jobs: int | None,
    threads: int,
    nodes: list[dict[str, float]],
    cpus: int,
    gpus: int,
    limit: int | None,
) -> None:
    recipe = read_recipe(table(text, train={"device": "auto"}))
    asked: dict[str, Any] = {}

    class Asked(Cluster):
        def run(self, work: Any, calls: Any, **options: Any) -> Any:
            asked.update(options, threads=next(iter(calls.values()))[2])
            yield from ()

    with open_folder(tmp_path / "out", recipe) as folder:
        executor = RayExecutor(Asked(StandIn(*nodes), "here:1"), folder, jobs=jobs, threads=threads)
        assert list(executor.run([Task("train", "none", seed=1)])) == []
    assert asked == {"cpus": cpus, "gpus": gpus, "limit": limit, "threads": cpus}


def test_a_comparison_on_nodes_without_its_files_gives_the_numbers_of_this_machine(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.compare.on_ray.LocalExecutor", InlineExecutor)  # the slow tier takes the real one
    body = table(text, encodings=["none"], measure={"rounds": 1, "seconds": 0.01, "threads": 1})
    body["train"]["checkpoints"] = 2
    ray = StandIn()
    events: list[str] = []

    def make(folder: Any, **options: Any) -> RayExecutor:
        return RayExecutor(Cluster(ray, "here:1"), folder, **options)

    def watch(subject: Any, event: dict[str, Any]) -> None:
        events.append(f"{getattr(subject, 'kind', '')} {event.get('event')}")
        assert "files" not in event

    there = compare(read_recipe(body), tmp_path / "there", executor=make, watch=watch, command="locant compare x.toml")
    here = compare(read_recipe(body), tmp_path / "here", executor=InlineExecutor)
    assert_same(there, here)
    assert events.count("train start") == events.count("train done") == 1
    assert len(ray.started) == 1, "rounds of measurement are done here"
    assert events.count("measure done") == 1 and there.speeds["none"].reason is None
    files = {name for name in read_files(tmp_path / "there" / "runs") if ".lock" not in name}
    assert files == set(read_files(tmp_path / "here" / "runs"))
    kept = json.loads((tmp_path / "there" / "runs" / "none-seed1" / "run.json").read_text())
    assert kept["environment"]["command"] == "locant compare x.toml"


def test_a_node_with_other_packages_takes_no_run(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = {**versions(), "torch": "1.2.3"}
    assert differing_versions(driver).startswith("torch ") and differing_versions(driver).endswith("(not 1.2.3)")
    assert differing_versions({**versions(), "torch": f"{versions()['torch'].split('+')[0]}+cu130"}) == ""
    (event,) = train_on_node({}, Task("train", "none", seed=1), 1, "", driver)
    assert event["event"] == "error" and "(not 1.2.3); install the same there" in event["message"]


def test_a_full_disk_here_stops_the_comparison(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read_recipe(table(text))

    class Finished(Cluster):
        def run(self, work: Any, calls: Any, **options: Any) -> Any:
            for task in calls:
                yield task, {"event": "done", "files": {"run.json": b"{}"}}

    def full(root: Path, files: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("locant.compare.on_ray.write_files", full)
    with pytest.raises(OSError, match=r"cannot write '.*out': No space left on device; free space .* are kept"):
        compare(
            recipe, tmp_path / "out", executor=lambda folder, **_: RayExecutor(Finished(StandIn(), "here:1"), folder)
        )
    assert not list((tmp_path / "out" / "runs").rglob("run.json"))


def test_the_files_of_a_run_come_home_whole(tmp_path: Path) -> None:
    home = tmp_path / "runs" / "a"
    take_home({"log.txt": b"old", "checkpoints/1/x": b"1", "run.json": b"1"}, home)
    take_home({"run.json": b"2", "log.txt": b"new", "checkpoints/2/x": b"2"}, home)
    assert read_files(home) == {"run.json": b"2", "log.txt": b"new", "checkpoints/2/x": b"2"}
    take_home({}, home)
    assert (home / "run.json").read_bytes() == b"2"
    assert [path.name for path in home.parent.iterdir()] == ["a"]


def test_what_a_killed_run_left_on_a_node_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cluster_module.tempfile, "tempdir", str(tmp_path))
    left, used = tmp_path / "locant-ray-left", tmp_path / "locant-ray-used"
    for folder in (left, used):
        write_files(folder, {"text/tokens": b"12"})
    with lock_folder(used):
        with scratch_folder() as mine:
            assert mine.parent == tmp_path and mine.is_dir()
            assert not left.exists() and used.exists()
        assert not mine.exists()


# --- addresses -------------------------------------------------------------------------------------------------------


@pytest.fixture
def recipe_file(text: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(toml(table(text)), encoding="utf-8")
    return path


def test_without_ray_the_extra_is_named(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["compare", str(recipe_file), "--ray", "auto"])
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --ray auto: a cluster needs the package ray, which is not installed; pip install 'locant[ray]'\n"
    )


def with_ray(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
    def init(**options: Any) -> None:
        if error is not None:
            raise error

    fake = type(sys)("ray")
    fake.init, fake.shutdown, fake.exceptions = init, lambda: None, type(sys)("ray.exceptions")
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", fake.exceptions)


@pytest.mark.parametrize("address", ["ray://host:10001", "host", "host:port", "host:"])
def test_an_address_that_is_none_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    with (
        pytest.raises(ValueError, match=f"--ray {address}: not an address, needed auto or HOST:PORT"),
        connect(address),
    ):
        pass


def test_an_address_without_a_cluster_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch)
    for address in ("127.0.0.1:1", "127.0.0.1:99999"):
        with pytest.raises(ValueError, match=f"--ray {address}: no Ray cluster answers"), connect(address):
            pass
    with_ray(monkeypatch, ConnectionError("Could not find any running Ray instance. Please"))
    with (
        pytest.raises(
            ValueError, match=r"--ray auto: no Ray cluster answers \(Could not find any running Ray instance\)"
        ),
        connect("auto"),
    ):
        pass


# --- on a real cluster -----------------------------------------------------------------------------------------------


def assert_same(one: ResultTable, other: ResultTable) -> None:
    """Equal but for clocks."""
    for left, right in zip(one.runs, other.runs, strict=True):
        assert (left.encoding, left.seed, left.status) == (right.encoding, right.seed, "done")
        assert (left.lengths, left.shifts) == (right.lengths, right.shifts)
        losses = [[(point.step, point.train_loss) for point in run.curve] for run in (left, right)]
        assert losses[0] == losses[1]


def longer(text: Path, **changes: Any) -> dict[str, Any]:
    return table(text, seeds=[1, 2, 3], train={"steps": 400}, **changes)


def read_events(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [(title, event["event"]) for title, event in map(json.loads, lines)]


def wait_for(what: Any, process: subprocess.Popen[Any], seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.stderr.read() if process.stderr else "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def local(recipe: Recipe, out: Path) -> ResultTable:
    return compare(recipe, out, executor=lambda folder, **options: LocalExecutor(folder, jobs=2, threads=1))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_killed_in_the_middle_loses_nothing_and_nothing_is_done_twice(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    recipe_file, out, events = tmp_path / "tiny.toml", tmp_path / "out", tmp_path / "events.jsonl"
    recipe_file.write_text(toml(longer(text)), encoding="utf-8")
    expected = local(read_recipe(longer(text)), tmp_path / "local")

    def both_busy_and_one_done() -> bool:
        seen = read_events(events)
        ended = {title for title, event in seen if event == "done"}
        return bool(ended) and len({title for title, event in seen if event == "step"} - ended) == 2

    with Nodes(2) as nodes:
        process = run("tests.compare_ray", str(recipe_file), str(out), nodes.address, str(events))
        try:
            wait_for(both_busy_and_one_done, process)
            finished_before = {title for title, event in read_events(events) if event == "done"}
            nodes.kill(1)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    counts = {
        event: Counter(title for title, kind in read_events(events) if kind == event)
        for event in ("start", "done", "lost")
    }
    assert sum(counts["lost"].values()) == 1, counts
    assert set(counts["done"].values()) == {1} and len(counts["done"]) == 6
    assert all(counts["start"][title] == 1 + counts["lost"][title] for title in counts["done"])
    assert finished_before.isdisjoint(counts["lost"])
    assert_same(read_results(out / "results.json"), expected)
    assert list((out / "runs").glob(".*")) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_stopped_on_a_cluster_it_keeps_what_is_finished_and_goes_on(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    recipe_file, out = tmp_path / "tiny.toml", tmp_path / "out"
    recipe_file.write_text(toml(longer(text)), encoding="utf-8")
    with Nodes(1) as nodes:
        command = [sys.executable, "-m", "locant.cli", "compare", str(recipe_file), "--out", str(out)]
        command += ["--ray", nodes.address, "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        first = subprocess.Popen(command, **pipes)
        try:
            wait_for(lambda: list(out.glob("runs/*/run.json")), first)
            first.send_signal(signal.SIGINT)
            stdout, stderr = first.communicate(timeout=60)
        finally:
            first.kill()
        finished = len(list(out.glob("runs/*/run.json")))
        assert first.returncode == 130, stderr
        assert f"stopped: {finished} finished runs are kept" in stderr and stdout == ""
        deadline = time.monotonic() + 30
        while any("locant.compare.worker" in " ".join(one.cmdline()) for one in nodes.processes(0)):
            assert time.monotonic() < deadline, "the run goes on unseen"
            time.sleep(0.2)
        second = subprocess.run(command, timeout=300, **pipes)
    assert second.returncode == 0, second.stderr
    assert f"training ({finished} of 6 were finished before)" in second.stderr
    body = json.loads(second.stdout)
    assert [one["status"] for one in body["runs"]] == ["done"] * 6
    assert_same(read_results(out / "results.json"), local(read_recipe(longer(text)), tmp_path / "local"))


@pytest.mark.slow
def test_no_cluster_on_this_machine_is_said(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    command = [sys.executable, "-m", "locant.cli", "compare", str(recipe_file), "--ray"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    port = "127.0.0.1:9"
    found = subprocess.run([*command, port], capture_output=True, text=True, env=environment, timeout=120)
    assert (found.returncode, found.stdout) == (2, "")
    assert f"error: --ray {port}: no Ray cluster answers" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fine_tuning_on_two_nodes_gives_the_numbers_of_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    save_model(tmp_path / "model")
    write_rte(tmp_path / "glue" / "RTE")
    settings = {"epochs": 2.0, "batch_size": 5, "learning_rate": 3e-3, "length": 40, "device": "cpu"}
    files = {"tasks": ["glue/rte"], "model": str(tmp_path / "model"), "data": [str(tmp_path / "glue")]}
    beside = {"name": "huang_m4", "label": "beside", "init": "neutral", "keep_absolute": True}
    body = {
        "task": "finetune",
        "encodings": [{"name": "as_saved", "label": "absolute"}, beside],
        "seeds": [1, 2],
        "finetune": {**files, "settings": settings},
        "measure": {"rounds": 0},
    }
    recipe_file, out, events = tmp_path / "tiny.toml", tmp_path / "out", tmp_path / "events.jsonl"
    recipe_file.write_text(toml(body), encoding="utf-8")
    expected = local(read_recipe(body), tmp_path / "local")
    with Nodes(2) as nodes:
        process = run("tests.compare_ray", str(recipe_file), str(out), nodes.address, str(events))
        try:
            _, errors = process.communicate(timeout=400)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    done = [title for title, event in read_events(events) if event == "done"]
    assert sorted(done) == ["absolute seed 1", "absolute seed 2", "beside seed 1", "beside seed 2"]
    found = read_results(out / "results.json")
    assert_same(found, expected)
    assert {point.train_loss for one in found.runs for point in one.curve[-1:]} != {found.runs[0].curve[-1].train_loss}
