"""What holds in every test: no network, fixed seeds, checked annotations, NaN where memory is uninitialized."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from jaxtyping import install_import_hook

from tests.fill import fill_uninitialized_memory

ROOT = Path(__file__).resolve().parents[1]
pytest_plugins = ["tests.skips", "pytester"]

for _name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "agg")

# torch.compile cannot trace through the checker: its tests run in a process that does not load this file, or sets this.
if os.environ.get("LOCANT_NO_TYPECHECK") != "1":
    install_import_hook("locant", "beartype.beartype")
fill_uninitialized_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register --golden; tests/golden reads it through the fixture below or through config.getoption."""
    parser.addoption(
        "--golden",
        type=Path,
        default=ROOT / "tests" / "golden" / "data",
        metavar="DIR",
        help="folder with golden numbers (default: tests/golden/data)",
    )


@pytest.fixture(scope="session")
def golden_dir(request: pytest.FixtureRequest) -> Path:
    """Return the folder given by --golden."""
    return request.config.option.golden


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Start every test from the same state of all generators, and leave that of torch as it was."""
    random.seed(0)
    numpy.random.seed(0)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield
