"""Backends: one call, several ways to compute it. A backend names no encoding; it says which terms it can serve."""

from __future__ import annotations

from locant.backends import blocked, reference, sdpa
from locant.backends.call import Backend, Call

BACKENDS: dict[str, Backend] = {"reference": reference.BACKEND, "sdpa": sdpa.BACKEND, "blocked": blocked.BACKEND}
PREFERENCE = ("sdpa", "reference")  # what `auto` tries, fastest first; the last one can serve everything

__all__ = ["BACKENDS", "PREFERENCE", "Backend", "Call"]
