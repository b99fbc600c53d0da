"""Plain tables (parsed TOML or JSON) to frozen dataclasses, strictly: unknown keys and wrong types are errors."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false", dict: "a table"}


def near(word: str, known: Iterable[str]) -> str:
    """Words for an error: the nearest known name, else the whole list."""
    known = sorted(known)
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(known)}"


def build(kind: type[T], table: Any, where: str = "") -> T:
    """Builds the frozen dataclass `kind` from a table; `where` is its dotted place in the recipe.

    Raises: ValueError naming the key, the value that came and what was needed.
    """
    if not isinstance(table, dict):
        raise ValueError(f"recipe: {where} = {table!r} is {kind_of(table)}, needed a table [{where}]")
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in hints:
            place = f" in [{where}]" if where else ""
            raise ValueError(f"recipe: unknown key {key!r}{place}; {_below(key, hints) or near(key, hints)}")
    values = {key: read_value(hints[key], value, f"{where}.{key}" if where else key) for key, value in table.items()}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            place = f"[{where}] " if where else ""
            raise ValueError(f"recipe: {place}lacks {field.name!r}; write {field.name} = ...")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"recipe: {f'[{where}] ' if where else ''}{error}") from error


def _below(key: str, hints: dict[str, Any]) -> str:
    """Where a key stands that was given one table too high: `steps` is `train.steps`."""
    owners = [
        f"{name}.{key}"
        for name, kind in hints.items()
        if dataclasses.is_dataclass(kind) and key in {field.name for field in dataclasses.fields(kind)}
    ]
    return f"did you mean {' or '.join(owners)}?" if owners else ""


def read_value(kind: Any, value: Any, where: str) -> Any:
    """One value of the annotated type `kind`; integers pass as numbers, and nothing else is converted."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read_union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            names = [str(argument) for argument in arguments]
            raise ValueError(f"recipe: {where} = {value!r} is not a choice; {near(str(value), names)}")
        return value
    if origin in (tuple, Sequence):
        if not isinstance(value, list | tuple):
            raise ValueError(f"recipe: {where} = {value!r} is {kind_of(value)}, needed a list; write {where} = [...]")
        return tuple(read_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return build(kind, value, where)  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    kind = dict if origin is dict else kind
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"recipe: {where} = {value!r} is {kind_of(value)}, needed {_WORDS.get(kind, kind.__name__)}")
    return value


def _read_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    choices = [argument for argument in arguments if argument is not type(None)]
    errors = []
    for choice in choices:
        try:
            return read_value(choice, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def kind_of(value: Any) -> str:
    """The kind of a parsed value in a user's words."""
    if isinstance(value, bool):
        return "true/false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    return {int: "an integer", float: "a number", str: "a text"}.get(type(value), type(value).__name__)
