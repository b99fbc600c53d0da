"""How a model's encodings were attached, as JSON: locant.json, and ``locant`` in the config.json of a saved model.

Weights that belong to a record carry its `fingerprint` in their metadata, so that files of different saves are told
apart where names and shapes agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from torch import nn

import locant
from locant.catalog import SIZES
from locant.hf.attachment import Attachment, attachments
from locant.hf.interface import NAME

RECORD, TENSORS, FORMAT = "locant.json", "locant.safetensors", 1
CHOICES = (  # arguments of attach, beside the encoding and its options
    "share_layers",
    "keep_absolute",
    "backend",
    "keep_scale",
)
FITTING = ("num_heads", "head_dim", "model_dim")  # sizes that a base model must share


def record_of(model: nn.Module) -> dict[str, Any]:
    """How a model's encodings were attached, as JSON: what locant.json holds, and ``config.locant`` of a saved model.

    Raises: ValueError where an object was attached instead of a name, or where options are not JSON.
    """
    found = attachments(model)
    record = {
        "format": FORMAT,
        "locant": locant.__version__,
        "host": class_name(model),
        "stacks": [_of_stack(*item) for item in found],
    }
    try:
        return json.loads(json.dumps(record))
    except TypeError as error:
        raise ValueError(f"save: the options {found[0][2].spec.options} cannot be written as JSON: {error}") from error


def class_name(module: nn.Module) -> str:
    """The name of a module's class, also where FSDP 2 has put one of its own above it."""
    return type(module).__name__.removeprefix("FSDP")


def _of_stack(path: str, module: nn.Module, attachment: Attachment) -> dict[str, Any]:
    spec = attachment.spec
    if spec.encoding is None:
        raise ValueError(
            f"save: {attachment.stack.name!r} was attached as an object, which cannot be rebuilt from a name; "
            f"{spec.remedy}, or keep attachment.state_dict() yourself"
        )
    return {
        "path": path,
        "class": class_name(module),
        "family": attachment.family.name,
        "encoding": spec.encoding,
        "options": spec.options,
        **{choice: getattr(spec, choice) for choice in CHOICES},
        "num_layers": len(attachment.layer_of),
        "sizes": spec.sizes,
        "trained_length": attachment.longest_trained,
    }


def is_record(value: Any) -> bool:
    """Whether a value in a config is a record of ours, perhaps a broken one; others may use the name, too."""
    return isinstance(value, dict) and len({"format", NAME, "stacks", "refused"} & value.keys()) > 1


def fingerprint(record: Any) -> str:
    """What the weights that belong to a record carry: a hash of its JSON."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def check_mark(who: str, mark: str | None, record: Any) -> None:
    """Raise a ValueError where weights do not carry the fingerprint of a record. ``who``: the weights."""
    if mark is None:
        raise ValueError(
            f"{who} does not say which save it belongs to, needed the mark {fingerprint(record)[:8]}... of the record "
            "beside it (another program rewrote it, or left it there); save it again from the attached model"
        )
    if mark != fingerprint(record):
        raise ValueError(
            f"{who} was written by another save (mark {mark[:8]}...) than the record beside it "
            f"({fingerprint(record)[:8]}...): an interrupted save, a copy of a part, or a record changed by hand; copy "
            "or save it again"
        )


# --- reading ----------------------------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_names(value: Any) -> bool:
    many = value if isinstance(value, list) else [value]
    return bool(many) and all(isinstance(name, str) for name in many)


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, dict) or not set(FITTING) <= value.keys() <= set(SIZES):
        return False
    return all(isinstance(v, bool) if name == "causal" else _is_count(v) and v > 0 for name, v in value.items())


def _are_options(value: Any) -> bool:
    sizes = {name: v for name, v in value.items() if name in SIZES} if isinstance(value, dict) else {}
    return isinstance(value, dict) and _are_sizes({**dict.fromkeys(FITTING, 1), **sizes})


Row = tuple[str, Callable[[Any], bool]]
WHOLE: dict[str, Row] = {  # key of a record: what it holds, and whether a value is that
    "format": ("the number of a format", _is_count),
    NAME: ("a version", lambda v: isinstance(v, str) and v.split(".")[0].isdigit()),
    "stacks": ("a list with one entry for each stack of layers", lambda v: isinstance(v, list) and bool(v)),
}
STACK: dict[str, Row] = {  # the same for a stack of layers
    "path": ("a path in the model", lambda v: isinstance(v, str)),
    "class": ("the name of a class", lambda v: isinstance(v, str)),
    "encoding": ("a name, or one for each layer", _are_names),
    "options": ("options by name", _are_options),
    "share_layers": ("true, false or null", lambda v: v is None or isinstance(v, bool)),
    "keep_absolute": ("true or false", lambda v: isinstance(v, bool)),
    "backend": ("the name of a backend", lambda v: isinstance(v, str)),
    "keep_scale": ("true or false", lambda v: isinstance(v, bool)),
    "num_layers": ("a count of layers", lambda v: _is_count(v) and v > 0),
    "sizes": (f"{', '.join(FITTING)} as numbers above 0", _are_sizes),
    "trained_length": ("a number of tokens", _is_count),
}


def recorded_stacks(record: Any, who: str) -> list[dict[str, Any]]:
    """The stacks of a record. ``who`` begins the errors: the caller, and where the record came from.

    Raises: ValueError for one that is cut off or foreign, of another format, or written by another major version.
    """
    if isinstance(record, dict) and "refused" in record:
        raise ValueError(f"{who} says that the encoding cannot be attached again: {record['refused']}")
    _check(who, "", record, WHOLE)
    if record["format"] != FORMAT:
        raise ValueError(
            f"{who} has format {record['format']} (written by locant {record[NAME]}), this version reads format "
            f"{FORMAT}; install the locant that wrote it"
        )
    version = record[NAME]
    if version.split(".")[0] != locant.__version__.split(".")[0]:
        raise ValueError(
            f"{who} was written by locant {version}, which this one ({locant.__version__}) cannot be sure to read as "
            f"it was meant; install locant {version.split('.')[0]}.x, or save it again with this version"
        )
    for number, stack in enumerate(record["stacks"]):
        _check(who, f"stacks[{number}]", stack, STACK)
    return record["stacks"]


def _check(who: str, where: str, value: Any, rows: dict[str, Row]) -> None:
    """Raise a ValueError at the first key that is missing, or holds something else."""
    broken = "it is cut off or was not written by locant; save it again from the attached model"
    if not isinstance(value, dict):
        raise ValueError(f"{who} has {where or 'as a whole'} {value!r:.80}, needed an object; {broken}")
    for key, (what, holds) in rows.items():
        place = f"{where}.{key}".lstrip(".")
        if key not in value:
            raise ValueError(f"{who} has no {place}, needed {what}; {broken}")
        if not holds(value[key]):
            raise ValueError(f"{who} has {place} = {value[key]!r:.80}, needed {what}; {broken}")
