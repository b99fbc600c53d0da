"""`torch.compile` takes a layer with its encoding as one graph. It runs in a process without the annotation checker."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conformance.cases import CASES
from tests.scripts import ROOT

HANDFUL = ["absolute", "shaw", "huang_m4", "xlnet", "deberta/v2", "t5", "tisa", "tupe_r", "rope"]
REST = [case.id for case in CASES if case.id not in HANDFUL]
SCRIPT = """
import sys
from locant.testing import check_compile
from tests.conformance.cases import BY_ID
for name in sys.argv[1:]:
    check_compile(BY_ID[name])
    print(name)
"""


def compile_all(names: list[str]) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "LOCANT_NO_TYPECHECK": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SCRIPT, *names], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == names, done.stderr[-3000:]


def test_a_handful_compiles_without_a_graph_break():
    compile_all(HANDFUL)


@pytest.mark.slow
def test_every_case_compiles_without_a_graph_break():
    compile_all(REST)
