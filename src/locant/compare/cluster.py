"""Calls done on the nodes of a Ray cluster; what a lost node was at is started again elsewhere.

A call is a generator function that yields events (dicts) and runs in a process on some node. An event of `ENDS` is its
last. Ray itself repeats nothing here: a call counts as done when its last event has arrived, and is never sent again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from locant.compare.environment import versions
from locant.training.folder import lock_folder

ENDS = ("done", "failed", "error")
TRIES = 5  # a call that took its node with it this often is given up
PATIENCE = 30.0  # seconds without any event, after which the nodes are counted
SCRATCH = "locant-ray-"


class Cluster:
    """A Ray cluster that this process is connected to; made by `connect`."""

    def __init__(self, ray: Any, address: str) -> None:
        self.ray, self.address = ray, address

    def nodes(self, resource: str = "CPU") -> list[int]:
        """How much of a resource each living node has."""
        return [int(node["Resources"].get(resource, 0)) for node in self.ray.nodes() if node["Alive"]]

    def share(self, files: dict[str, bytes]) -> Any:
        """Puts files where every node can read them; hand the result to calls."""
        return self.ray.put(files)

    def run(
        self,
        work: Callable[..., Iterator[dict[str, Any]]],
        calls: Mapping[Any, tuple[Any, ...]],
        *,
        cpus: int = 1,
        gpus: int = 0,
        limit: int | None = None,
    ) -> Generator[tuple[Any, dict[str, Any]]]:
        """Does ``work(*arguments)`` for each entry of ``calls``; yields (key, event) as events arrive.

        An event of its own is "lost" (message): the node went away, and the call waits to be started elsewhere. At most
        ``limit`` calls run at a time (None: as many as there is room for). Closing the iterator stops those that run.
        Raises: OSError where no node is left that could take a call.
        """
        options = {"num_cpus": cpus, "num_gpus": gpus, "num_returns": "streaming", "max_retries": 0}
        remote = self.ray.remote(**options, scheduling_strategy="SPREAD")(work)
        waiting, running, losses = deque(calls), {}, Counter()
        try:
            while waiting or running:
                while waiting and (limit is None or len(running) < limit):
                    key = waiting.popleft()
                    running[remote.remote(*calls[key])] = key
                ready, _ = self.ray.wait(list(running), num_returns=1, timeout=PATIENCE, fetch_local=False)
                if not ready and max(self.nodes(), default=0) < cpus:
                    raise OSError(
                        f"ray: no living node of the cluster at {self.address} has {cpus} CPUs, needed for each of "
                        f"{len(waiting) + len(running)} runs; start nodes, then call again: finished runs are kept"
                    )
                for stream in ready:
                    key = running[stream]
                    event = self._next(stream)
                    if event["event"] == "lost":
                        losses[key] += 1
                        waiting.append(key)
                        if losses[key] == TRIES:
                            waiting.pop()
                            words = f"its node was lost {TRIES} times, last: {event['message']}"
                            event = {"event": "error", "kind": "run", "message": words}
                    if event["event"] in (*ENDS, "lost"):
                        del running[stream]
                    yield key, event
        finally:
            for stream in running:
                with contextlib.suppress(Exception):  # the cluster may be gone
                    self.ray.cancel(stream, force=True)

    def _next(self, stream: Any) -> dict[str, Any]:
        """The next event of a call; what became of it where there is none."""
        try:
            return self.ray.get(next(stream))
        except StopIteration:
            return {"event": "error", "kind": "run", "message": "it ended without a result"}
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            return {"event": "error", "kind": "run", "message": f"{type(cause).__name__}: {cause}"}
        except self.ray.exceptions.RayError as error:
            return {"event": "lost", "message": f"{type(error).__name__}: {_first_sentence(error)}"}


@contextlib.contextmanager
def connect(address: str) -> Iterator[Cluster]:
    """A connection to the cluster at ``address`` ("auto": the one that this machine is part of) until the block ends.

    Raises: ModuleNotFoundError without Ray; ValueError where no cluster answers.
    """
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ModuleNotFoundError(
            f"--ray {address}: a cluster needs the package ray, which is not installed; pip install 'locant[ray]'"
        ) from error
    _knock(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="locant")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(_nobody(address, _first_sentence(error))) from error
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray says on stdout that a node is lost; results go there
            yield Cluster(ray, address)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises ValueError where nobody listens at HOST:PORT, which Ray would find out in minutes."""
    if address == "auto":
        return
    found = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})", address)
    if found is None:
        raise ValueError(
            f"--ray {address}: not an address, needed auto or HOST:PORT as `ray start --head` prints it; run this on a "
            "machine of the cluster"
        )
    try:
        socket.create_connection((found[1].strip("[]"), int(found[2])), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ValueError(_nobody(address, str(error))) from error


def _nobody(address: str, words: str) -> str:
    return (
        f"--ray {address}: no Ray cluster answers ({words}); start one with `ray start --head`, and on each other "
        "machine `ray start --address HOST:PORT`"
    )


def _first_sentence(error: BaseException) -> str:
    return re.split(r"[.:]?\s*\n|\. ", str(error).strip(), maxsplit=1)[0]


def differing_versions(driver: dict[str, str]) -> str:
    """What is installed here in another version than at the driver, in words; empty where numbers may be mixed."""
    here = versions()
    names = [name for name in driver if here.get(name, "").split("+")[0] != driver[name].split("+")[0]]
    return ", ".join(f"{name} {here.get(name, 'missing')} (not {driver[name]})" for name in names)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder on this node until the block ends; those that killed processes left are taken away."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError, ValueError):  # in use, or somebody else's
            lock_folder(left).close()
            shutil.rmtree(left, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}"))
    with lock_folder(fresh):
        folder = fresh.rename(root / fresh.name[1:])  # locked before a sweep can see it
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def read_files(root: Path, *parts: str) -> dict[str, bytes]:
    """The files of a folder by their path within it; of some of its parts where those are named."""
    places = [root / part for part in parts] or [root]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    return {file.relative_to(root).as_posix(): file.read_bytes() for file in files if file.is_file()}


def write_files(root: Path, files: Mapping[str, bytes]) -> None:
    """Writes what `read_files` read. Raises: OSError."""
    for name, content in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
