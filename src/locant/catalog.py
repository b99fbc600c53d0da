"""Encodings by name: found by walking their folder, built one by one or as the stack of a model."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from locant.encoding import Encoding, Stack, Sum

FOLDERS = ("encodings", "transforms")
SIZES = ("num_heads", "head_dim", "model_dim", "max_length", "causal")  # facts of the host, offered to every encoding


def _classes() -> dict[str, type[Encoding]]:
    return {name: kind for folder in FOLDERS for name, kind in _walk(folder)}


@lru_cache(maxsize=len(FOLDERS))
def _walk(folder: str) -> tuple[tuple[str, type[Encoding]], ...]:
    """Every Encoding class with a name, found by walking a folder."""
    package = f"{__package__}.{folder}"
    found: dict[str, type[Encoding]] = {}
    for info in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda m: m.name):
        module = importlib.import_module(f"{package}.{info.name}")
        for value in vars(module).values():
            if (
                inspect.isclass(value)
                and issubclass(value, Encoding)
                and value.__module__ == module.__name__
                and "name" in value.__dict__
            ):
                assert value.name not in found, f"two encodings are called {value.name!r}"
                found[value.name] = value
    return tuple(found.items())


def names(folder: Literal["encodings", "transforms"] = "encodings") -> list[str]:
    """The names of all encodings, sorted; or of the transforms of position ids, which stand before an encoding.

    Raises: ValueError for another folder.
    """
    if folder not in FOLDERS:
        raise ValueError(f"names: unknown folder {folder!r}; choose one of {', '.join(map(repr, FOLDERS))}")
    return sorted(name for name, _ in _walk(folder))


def encoding_class(name: str) -> type[Encoding]:
    """The class of a named encoding.

    Raises: ValueError for an unknown name, with the near ones.
    """
    classes = _classes()
    if name in classes:
        return classes[name]
    near = difflib.get_close_matches(name.lower(), classes, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}? (see locant list)"
        if near
        else f"choose one of {', '.join(names())}"
    )
    raise ValueError(f"unknown encoding {name!r}; {hint}")


def option_names(name: str) -> list[str]:
    """The constructor options of a named encoding, without the sizes of the host."""
    parameters = inspect.signature(encoding_class(name).__init__).parameters
    return [p for p in parameters if p != "self" and p not in SIZES]


def _accepted(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options the class takes; sizes it has no use for are dropped, anything else unknown raises."""
    parameters = [p for p in inspect.signature(encoding_class(name).__init__).parameters if p != "self"]
    for option in options:
        if option not in parameters and option not in SIZES:
            near = difflib.get_close_matches(option, parameters, n=2, cutoff=0.5)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"it takes {', '.join(parameters) or 'none'}"
            )
            raise ValueError(f"{name}: unknown option {option!r}={options[option]!r}; {hint}")
    hints = get_type_hints(encoding_class(name).__init__)
    for option, value in options.items():
        left_out = option not in parameters or (option in SIZES and value is None)
        if not left_out and not _fits(value, hints.get(option, Any)):
            wanted = str(getattr(hints[option], "__name__", hints[option])).replace("typing.", "")
            raise TypeError(f"{name}: option {option}={value!r} is a {type(value).__name__}; give {wanted}")
    missing = [
        p
        for p, spec in inspect.signature(encoding_class(name).__init__).parameters.items()
        if p != "self" and spec.default is inspect.Parameter.empty and options.get(p) is None
    ]
    if missing:
        raise ValueError(f"{name}: needs {', '.join(f'{m}=...' for m in missing)}, which was not given")
    return {key: value for key, value in options.items() if key in parameters and not (key in SIZES and value is None)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an option's annotated kind: a truthy string is no bool, 2.5 no int."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if isinstance(value, bool) and hint in (int, float):
        return False
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint) if isinstance(hint, type) else True  # a Literal is checked by its class


def load(name: str, **options: Any) -> Encoding:
    """Build one encoding by name, for one layer; ``"a+b"`` composes. See ``locant.names()``.

    Sizes of the host (num_heads, head_dim, model_dim, max_length, causal) may always be given: an encoding without use
    for one leaves it out. Raises: ValueError for an unknown name or option, with the near ones;
    TypeError for an option of another type.
    """
    if not isinstance(name, str):
        raise TypeError(f"load: the name is a {type(name).__name__} ({name!r}); give one of locant.names()")
    parts = [part.strip() for part in name.split("+")]
    if len(parts) > 1:
        options_of = [{k: v for k, v in options.items() if k in SIZES or k in option_names(part)} for part in parts]
        unused = set(options) - {k for given in options_of for k in given}
        if unused:
            raise ValueError(f"{name}: no part takes the option {sorted(unused)[0]!r}={options[sorted(unused)[0]]!r}")
        return Sum(*(load(part, **given) for part, given in zip(parts, options_of, strict=True)))
    built = encoding_class(name)(**_accepted(name, options))
    if options.get("causal") is not None:
        built.check_causal(options["causal"])
    return built


def stack(
    encoding: str | Sequence[str] | Callable[[], Encoding] | Encoding,
    num_layers: int,
    *,
    share_layers: bool | None = None,
    **options: Any,
) -> Stack:
    """Build the encodings of a model with ``num_layers`` layers.

    ``encoding`` is a name (``"a+b"`` composes), a sequence with one name for each layer, a function that builds one
    encoding, or an encoding (served to all layers as it is). ``share_layers`` overrides whether layers share one object
    (the default is each encoding's ``properties.layers``). An encoding that acts on the input embedding is always
    shared. Raises: ValueError for unknown names and options, or a sequence of another length.
    """
    if num_layers < 1:
        raise ValueError(f"stack: got num_layers={num_layers}; a model has 1 layer or more")
    given = [option for option in options if option not in SIZES]
    named = isinstance(encoding, str) or (isinstance(encoding, Sequence) and not isinstance(encoding, Encoding))
    if given and not named:
        raise ValueError(
            f"stack: {given[0]}={options[given[0]]!r} was given beside an encoding that is built already, or by a "
            "function; build it with that option, or give its name"
        )
    if isinstance(encoding, Encoding):
        if share_layers is False:
            raise ValueError(
                f"{encoding.name}: share_layers=False needs a fresh object for each layer; give the name or a function "
                "that builds one instead of the object"
            )
        return Stack([encoding] * num_layers)
    if isinstance(encoding, Sequence) and not isinstance(encoding, str):
        if len(encoding) != num_layers:
            raise ValueError(
                f"stack: got {len(encoding)} encodings for {num_layers} layers; give one name for each layer"
            )
        return Stack(_mixed(list(encoding), share_layers, options))
    build = encoding if callable(encoding) else lambda: load(encoding, **options)
    return Stack(_layers(build, num_layers, share_layers))


def _layers(build: Callable[[], Encoding], num_layers: int, share_layers: bool | None) -> list[Encoding]:
    built = [build() for _ in range(num_layers)]
    if len(built[0].parts()) == 1:
        return _tied(built, share_layers)
    columns = [_tied([layer.parts()[c] for layer in built], share_layers) for c in range(len(built[0].parts()))]
    if all(part is column[0] for column in columns for part in column):
        return [built[0]] * num_layers
    for layer, row in zip(built, zip(*columns, strict=True), strict=True):
        assert isinstance(layer, Sum)
        layer.members = nn.ModuleList(row)
    return built


def _mixed(encodings: list[str], share_layers: bool | None, options: dict[str, Any]) -> list[Encoding]:
    """One name for each layer: layers of the same name are built (and share) together."""
    layers: list[Encoding | None] = [None] * len(encodings)
    for name in dict.fromkeys(encodings):
        places = [i for i, other in enumerate(encodings) if other == name]
        own = {
            k: v for k, v in options.items() if k in SIZES or any(k in option_names(p.strip()) for p in name.split("+"))
        }
        for place, layer in zip(
            places, _layers(lambda name=name, own=own: load(name, **own), len(places), share_layers), strict=True
        ):
            layers[place] = layer
    unused = [
        k
        for k in options
        if k not in SIZES and not any(k in option_names(p.strip()) for n in encodings for p in n.split("+"))
    ]
    if unused:
        raise ValueError(f"stack: no encoding of {encodings} takes the option {unused[0]!r}={options[unused[0]]!r}")
    return [layer for layer in layers if layer is not None]


def _tied(built: list[Encoding], share_layers: bool | None) -> list[Encoding]:
    """One object for all layers, or separate ones that share what their class shares."""
    first = built[0]
    always = "embed" in first.sites or first.moves_ids
    if always and share_layers is False:
        what = "position ids" if first.moves_ids else "input embedding"
        raise ValueError(
            f"{first.name}: acts on the {what}, which all layers have in common; leave out share_layers=False"
        )
    if always or (first.properties.layers == "shared" if share_layers is None else share_layers):
        return [first] * len(built)
    for other in built[1:]:
        other.tie(first)
    return built
