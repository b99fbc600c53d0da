"""What `locant compare` measured: frozen dataclasses, and their way to JSON and back.

Nothing here trains, averages or plots. A number that is undefined is `None` (JSON `null`) and carries a
reason where a reader would ask for one; NaN and infinity never enter a table, so nothing later can average them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "locant.compare.results"
SCHEMA_VERSION = 1
STATUSES = ("done", "failed", "missing")
LATER = {"later": True}  # of fields that files of this version may lack: they came after it


def _keep_finite(record: Any, names: Sequence[str]) -> list[str]:
    """Turns NaN and infinity in these fields into None; returns what was turned, in words."""
    turned = []
    for name in names:
        value = getattr(record, name)
        if value is not None and not math.isfinite(value):
            object.__setattr__(record, name, None)
            turned.append(f"{name.replace('_', ' ')} was {value}")
    return turned


def _explain_undefined(record: Any, names: Sequence[str], owner: str) -> None:
    """Drops what is not finite and makes sure that an undefined main value says why."""
    turned = _keep_finite(record, names)
    if record.reason is None and (turned or getattr(record, names[0]) is None):
        object.__setattr__(record, "reason", "; ".join(turned) or f"{owner} was not measured")


@dataclass(frozen=True)
class CurvePoint:
    """One point of a training curve; losses in nats per predicted token. A loss that is not finite becomes None."""

    step: int
    tokens: int  # tokens seen in training so far
    seconds: float  # wall-clock since the start of training
    train_loss: float | None = None
    validation_loss: float | None = None

    def __post_init__(self) -> None:
        _keep_finite(self, ("train_loss", "validation_loss"))


@dataclass(frozen=True)
class LengthScore:
    """Validation at one window length; `reason` says why it cannot be had (a table with too few rows, a NaN loss)."""

    length: int  # tokens in a window
    factor: float | int  # length / trained length
    loss: float | None  # nats per predicted token
    accuracy: float | None  # share of predicted tokens that are right, 0 to 1
    reason: str | None = None
    edit_distance: float | None = field(default=None, metadata=LATER)  # mean, in symbols; None where none is counted

    def __post_init__(self) -> None:
        _explain_undefined(self, ("loss", "accuracy"), f"length {self.length}")


@dataclass(frozen=True)
class ShiftScore:
    """Validation loss at the trained length with `shift` added to all position ids."""

    shift: int
    loss: float | None
    reason: str | None = None

    def __post_init__(self) -> None:
        _explain_undefined(self, ("loss",), f"shift {self.shift}")


@dataclass(frozen=True)
class Speed:
    """Speed and memory of one encoding, measured beside no other run; `reason` explains fields that are None."""

    train_tokens_per_second: float | None
    inference_tokens_per_second: float | None
    train_peak_mb: float | None
    inference_peak_mb: float | None
    reason: str | None = None
    train_rounds: tuple[float, ...] = ()  # tokens per second in each round, of which the number above is the median
    inference_rounds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        names = ("train_tokens_per_second", "inference_tokens_per_second", "train_peak_mb", "inference_peak_mb")
        turned = _keep_finite(self, names)
        undefined = [name for name in names if getattr(self, name) is None]
        if undefined and self.reason is None:
            object.__setattr__(self, "reason", "; ".join(turned) or f"not measured: {', '.join(undefined)}")


@dataclass(frozen=True)
class RunResult:
    """One encoding trained from one seed."""

    encoding: str  # the label in the recipe; several labels may use one encoding with different options
    options: dict[str, Any]
    seed: int
    status: str  # "done" | "failed" | "missing"
    reason: str | None = None  # why it is not done
    curve: tuple[CurvePoint, ...] = ()
    lengths: tuple[LengthScore, ...] = ()
    shifts: tuple[ShiftScore, ...] = ()
    extra_parameters: int | None = None  # those the encoding added
    total_parameters: int | None = None
    seconds: float | None = None  # whole run
    scores: dict[str, float | None] = field(default_factory=dict, metadata=LATER)  # besides accuracy, of 1

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"RunResult: status={self.status!r} of {self.encoding!r} is not one of {STATUSES}")
        if self.status == "failed" and not self.reason:
            raise ValueError(
                f"RunResult: {self.encoding!r} seed {self.seed} failed without a reason; say why it failed"
            )
        _keep_finite(self, ("seconds",))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able dict, for a run.json that holds more than the result."""
        return _plain(dataclasses.asdict(self))

    @staticmethod
    def from_dict(body: Any, source: str = "run") -> RunResult:
        """Reads what `to_dict` gave. Raises: ValueError naming `source` and the field."""
        try:
            return _decode(RunResult, body, "result")
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source}: {error}") from error


@dataclass(frozen=True)
class ResultTable:
    """Everything one comparison found: what was asked, what ran where, and each run's numbers."""

    recipe: dict[str, Any]
    baseline: str  # label which the others are compared with
    trained_length: int
    runs: tuple[RunResult, ...]
    speeds: dict[str, Speed] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)  # hardware, versions, commit, command, date

    def __post_init__(self) -> None:
        seen = set()
        for run in self.runs:
            if (run.encoding, run.seed) in seen:
                raise ValueError(f"ResultTable: two runs of {run.encoding!r} with seed {run.seed}; keep one")
            seen.add((run.encoding, run.seed))
        labels = self.encodings
        if labels and self.baseline not in labels:
            raise ValueError(f"ResultTable: the baseline {self.baseline!r} has no run; there are {', '.join(labels)}")
        if strangers := sorted(set(self.speeds) - set(labels)):
            raise ValueError(
                f"ResultTable: speeds of {', '.join(strangers)} but no such run; drop them or add the runs"
            )

    @property
    def encodings(self) -> tuple[str, ...]:
        """Labels in the order of their first run."""
        return tuple(dict.fromkeys(run.encoding for run in self.runs))

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds, in order."""
        return tuple(sorted({run.seed for run in self.runs}))

    def of(self, encoding: str) -> tuple[RunResult, ...]:
        """The runs of one encoding, by seed."""
        return tuple(sorted((run for run in self.runs if run.encoding == encoding), key=lambda run: run.seed))

    def to_json(self) -> str:
        """JSON text with full floats; undefined numbers are null."""
        body = {"format": FORMAT, "schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        return json.dumps(_plain(body), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str, source: str = "result table") -> ResultTable:
        """Reads what `to_json` wrote.

        Raises: ValueError naming `source` and the field, when the text is truncated, foreign or of another version.
        """
        return _read_table(text, source)


def read_results(path: str | Path) -> ResultTable:
    """Reads a result file. Raises: FileNotFoundError; ValueError when it is not a whole locant result file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a locant result file: not UTF-8 text ({error})") from error
    return _read_table(text, str(path))


# --- JSON ------------------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Tuples to lists, non-finite floats of free-form parts to None, anything else that JSON lacks to its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _read_table(text: str, source: str) -> ResultTable:
    try:
        body = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{source}: not a whole JSON file ({error}); it may be cut off, write it again") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        came = body.get("format", "no format") if isinstance(body, dict) else type(body).__name__
        raise ValueError(f"{source}: not a locant result file: format is {came!r}, needed {FORMAT!r}")
    if body.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{source}: schema version {body.get('schema_version')!r}, but this locant reads {SCHEMA_VERSION}; "
            "read it with the version that wrote it"
        )
    content = {key: value for key, value in body.items() if key not in ("format", "schema_version")}
    try:
        return _decode(ResultTable, content, "table")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}: {error}") from error


def _decode(kind: Any, value: Any, where: str) -> Any:
    """Builds a value of the annotated type `kind` from JSON, naming the field on any mismatch."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        return None if value is None else _decode(arguments[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is tuple:
        _expect(value, list, where)
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        _expect(value, dict, where)
        return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    _expect(value, (int, float) if kind is float else kind, where)
    return kind(value)


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    _expect(value, dict, where)
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        raise ValueError(f"{where} has unknown fields {unknown}; {kind.__name__} has {sorted(hints)}")
    needed = {one.name for one in dataclasses.fields(kind) if not one.metadata.get("later")}
    if absent := sorted(needed - set(value)):
        raise ValueError(f"{where} lacks {absent}; the file is cut off or was edited")
    return kind(**{name: _decode(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _expect(value: Any, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = "/".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{where} is {value!r:.60}, needed {names}")
