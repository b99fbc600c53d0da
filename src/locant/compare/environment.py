"""Where and with what a result was made: hardware, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("locant", "torch", "transformers", "accelerate", "tokenizers", "numpy", "triton")


def environment(command: str = "") -> dict[str, Any]:
    """JSON-able facts of this machine and installation; takes a fraction of a second."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "command": command or command_line(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_line() -> str:
    """The command that runs here, quoted so that a shell reads it again as it is."""
    return shlex.join(["locant", *sys.argv[1:]])


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Processor, cores, memory, GPU and system."""
    import torch

    facts: dict[str, Any] = {"processor": _processor(), "cores": available_cores(), "system": platform.platform()}
    try:
        facts["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        facts["memory_gb"] = None
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Commit of the working tree that locant is imported from, with `+` where files differ from it."""
    folder = Path(__file__).resolve().parent
    try:
        arguments = {"cwd": folder, "capture_output": True, "text": True, "timeout": 10}
        head = subprocess.run(["git", "rev-parse", "HEAD"], **arguments)
        tracked = subprocess.run(["git", "ls-files", "--error-unmatch", __file__], **arguments)
        if head.returncode or tracked.returncode:  # installed into some other project's tree
            return None
        changed = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no", "."], **arguments)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.SubprocessError):
        return None
