"""A Ray cluster on this machine: a node is a `ray start` with all its processes, and is killed as a machine is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from tests.processes import ROOT


class Nodes:
    """Nodes of one CPU each; the first is the head. Use it as a context manager."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Nodes:
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets must be short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        head = ["--head", "--port", str(port), "--include-dashboard=false", f"--temp-dir={self.folder}/ray"]
        self.nodes: list[subprocess.Popen[bytes]] = []
        try:
            for where in [head] + [["--address", self.address]] * (self.count - 1):
                self._start(where, port)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, where: list[str], port: int) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "RAY_worker_niceness": "0"}
        environment.update(RAY_USAGE_STATS_ENABLED="0", TMPDIR=str(self.folder), PYTHONWARNINGS="ignore")
        command = [str(Path(sys.executable).with_name("ray")), "start", *where, "--block", "--num-cpus=1"]
        log = self.folder / f"node{len(self.nodes)}.log"
        with open(log, "wb") as out:
            command += ["--object-store-memory=100000000", "--disable-usage-stats"]
            self.nodes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
        deadline = time.monotonic() + 120
        while b"--block" not in log.read_bytes():  # "This will now block"
            assert self.nodes[-1].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def processes(self, node: int) -> list[Any]:
        """The node's own process and all below it."""
        parent = psutil.Process(self.nodes[node].pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self, node: int) -> None:
        """SIGKILL to every process of a node, at once."""
        for process in self.processes(node):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.nodes[node].wait()

    def __exit__(self, *error: object) -> None:
        for index, node in enumerate(self.nodes):
            if node.poll() is None:
                self.kill(index)
        shutil.rmtree(self.folder, ignore_errors=True)
