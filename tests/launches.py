"""The command line under the launchers that people use, by two processes on a CPU (gloo); and killed there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.processes import ROOT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = [str(Path(sys.executable).parent / "accelerate"), "launch"]
FSDP = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {layer}
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def launcher(how: str, folder: Path, layer: str = "BertLayer") -> list[str]:
    """torchrun, accelerate, or fsdp with a configuration in ``folder``."""
    if how == "torchrun":
        return TORCHRUN
    if how == "accelerate":
        return [*ACCELERATE, "--multi_gpu", "--num_processes", "2"]
    folder.mkdir(exist_ok=True)
    file = folder / "fsdp.yaml"
    file.write_text(FSDP.format(layer=layer), encoding="utf-8")
    return [*ACCELERATE, "--config_file", str(file)]


def finish(launch: list[str]) -> subprocess.CompletedProcess[str]:
    """Run to the end, which must be a good one."""
    done = subprocess.run(launch, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def kill_behind(launch: list[str], log: Path, lines: int) -> None:
    """Start, and send SIGKILL to all processes once the log has so many lines."""
    process = subprocess.Popen(launch, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not log.is_file() or log.read_bytes().count(b"\n") < lines:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    all_of_them = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in all_of_them:
        one.kill()
    process.wait()
    psutil.wait_procs(all_of_them)
    assert not (log.parent / "run.json").exists()
