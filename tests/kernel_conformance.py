"""`python -m tests.kernel_conformance BACKEND DEVICE CASE..`: the conformance suite's checks of a backend of kernels.

The suite compares every backend that serves a call; kernels for GPUs serve none in the suite's own process on a CPU.
Here they do (`triton` interpreted, `flex` unfused), and nothing else is asked. A case that was never served fails.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import replace

import torch

from locant.backends import BACKENDS
from locant.testing import check_cache, check_empty_rows, check_low_precision, exactness
from tests.conformance.cases import BY_ID
from tests.kernel_runs import prepare

CHECKS = (check_low_precision, check_cache, check_empty_rows)


def main(backend: str, device: str, *names: str) -> int:
    """Every check on every named case, on the device; prints one line for each case."""
    prepare(backend, device)
    torch.set_default_device(device)
    served = 0
    run = BACKENDS[backend].run

    def counted(call):
        nonlocal served
        served += 1
        return run(call)

    BACKENDS[backend] = replace(BACKENDS[backend], run=counted)
    exactness.BACKENDS = {name: BACKENDS[name] for name in ("reference", backend)}
    bad = 0
    for name in names:
        served, failures = 0, []
        for check in CHECKS:
            try:
                check(BY_ID[name])
            except Exception:
                failures.append(traceback.format_exc(limit=-4))
        bad += bool(failures) or not served
        print(f"{'DIFFERS' if failures else 'ok' if served else 'NEVER SERVED'} {name}: {served} calls", *failures)
    print(f"{len(names)} cases, {bad} differ", flush=True)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
