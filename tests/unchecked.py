"""Functions without the annotation checker, which refuses bad arguments before our own errors can (users run none)."""

from __future__ import annotations

import inspect
from typing import Any

from locant.catalog import encoding_class
from locant.encoding import Encoding


def unchecked(function: Any) -> Any:
    """The function that the user's process runs; a classmethod stays bound to its class."""
    if inspect.ismethod(function):
        return inspect.unwrap(function.__func__).__get__(function.__self__)
    return inspect.unwrap(function)


def build(name: str, **options: Any) -> Encoding:
    """An encoding built as in the user's process."""
    cls = encoding_class(name)
    encoding = cls.__new__(cls)
    unchecked(cls.__init__)(encoding, **options)
    return encoding
