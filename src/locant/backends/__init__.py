"""Backends: one call, several ways to compute it. A backend names no encoding; it says which terms it can serve."""

from __future__ import annotations

from locant.backends import blocked, flex, native, reference, sdpa, speeds, triton
from locant.backends.call import Backend, Call

BACKENDS: dict[str, Backend] = {
    "reference": reference.BACKEND,
    "sdpa": sdpa.BACKEND,
    "blocked": blocked.BACKEND,
    "native": native.BACKEND,
    "flex": flex.BACKEND,
    "triton": triton.BACKEND,
}

__all__ = ["BACKENDS", "Backend", "Call", "speeds"]
