"""Which position encoding is active in a model: name, parameters, sharing, trained length, what lies beyond."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from locant.encoding import Encoding
from locant.hf.attachment import Attachment, attachments
from locant.hf.build import host_sizes, spare_rows, table_rows
from locant.hf.families import Site, find_sites

BEYOND = {
    "raise": "an error",
    "clip": "farther offsets share the last row",
    "saturate": "farther offsets share the last bucket",
    "defined": "defined at any length",
}
KINDS = {"table": "absolute", "weight": "absolute", "rotary": "rotary", "bias": "bucketed bias"}

HOST_BEYOND = {"table": "an error", "weight": "an error", "rotary": "defined", "bias": BEYOND["saturate"]}


@dataclass(frozen=True)
class LayerDescription:
    """One attention module. ``parameters``: numbers that its encoding holds; ``shared``: whether other layers use them.

    ``built_length``: tokens the encoding was built for; ``trained_length``: the longest input seen in training while it
    was attached (None: none was seen); ``max_length``: the longest input it serves (None: any).
    """

    layer: int
    name: str
    parameters: int
    shared: str
    built_length: int | None
    trained_length: int | None
    max_length: int | None
    beyond: str


@dataclass(frozen=True)
class StackDescription:
    """One stack of layers. ``parameters``: added in all, each tensor once; ``host``: what it brings of its own."""

    path: str
    model: str
    family: str
    attached: bool
    backend: str
    parameters: int
    host: tuple[str, ...]
    switched_off: tuple[str, ...]
    layers: tuple[LayerDescription, ...]


@dataclass(frozen=True)
class Description:
    """All stacks of a model; ``str()`` gives a table."""

    model: str
    stacks: tuple[StackDescription, ...]

    def __str__(self) -> str:
        """One table for each stack."""
        return "\n\n".join(_table(stack) for stack in self.stacks)


def describe(model: nn.Module) -> Description:
    """What gives a model its positions: the attached encoding, or what the host brings of its own.

    Raises: ValueError for a model without known attention.
    """
    there = attachments(model)
    if there:
        return Description(type(model).__name__, tuple(_attached(*item) for item in there))
    return Description(type(model).__name__, tuple(_host(site) for site in find_sites(model)))


def _attached(path: str, module: nn.Module, attachment: Attachment) -> StackDescription:
    own = tuple(f"{KINDS[kind]} ({where})" for kind, where in attachment.own)
    built, trained = attachment.spec.sizes["max_length"], attachment.longest_trained or None
    layers = attachment.layers()
    return StackDescription(
        path=path,
        model=type(module).__name__,
        family=attachment.family.name,
        attached=True,
        backend=attachment.spec.backend,
        parameters=sum(p.numel() for p in attachment.parameters()),
        host=own,
        switched_off=() if attachment.spec.keep_absolute else own,
        layers=tuple(
            LayerDescription(
                i, _name(attachment, i), _numel(e), _shared(e, i, layers), built, trained, e.max_length, _beyond(e)
            )
            for i, e in enumerate(layers)
        ),
    )


def _name(attachment: Attachment, index: int) -> str:
    given = attachment.spec.encoding
    return given if isinstance(given, str) else attachment.layers()[index].name if given is None else given[index]


def _numel(encoding: Encoding) -> int:
    return sum(p.numel() for p in encoding.parameters())


def _shared(encoding: Encoding, index: int, layers: tuple[Encoding, ...]) -> str:
    others = {id(p) for i, layer in enumerate(layers) if i != index for p in layer.parameters()}
    mine = [id(p) in others for p in encoding.parameters()]
    if not mine:
        return "yes" if any(layer is encoding for i, layer in enumerate(layers) if i != index) else "no"
    return "yes" if all(mine) else "in part" if any(mine) else "no"


def _beyond(encoding: Encoding) -> str:
    rules = []
    for part in encoding.parts():
        extend = getattr(part, "extend", "raise")
        rules.append(BEYOND[part.properties.beyond_range] if extend == "raise" else f"the table is extended ({extend})")
    return "; ".join(dict.fromkeys(rules))


def _is_own(site: Site, name: str) -> bool:
    return any(name == path or name.startswith(f"{path}.") for _, path in site.own)


def _host(site: Site) -> StackDescription:
    own = tuple(f"{KINDS[kind]} ({where})" for kind, where in site.own)
    kinds = [kind for kind, _ in site.own]
    rows = table_rows(site)
    limit = None if rows is None else rows - spare_rows(site)
    count = sum(p.numel() for name, p in site.module.named_parameters() if _is_own(site, name))
    beyond = "; ".join(dict.fromkeys(HOST_BEYOND[kind] for kind in kinds))
    name = "+".join(dict.fromkeys(f"{KINDS[kind]} of the host" for kind in kinds)) or "none"
    built = host_sizes(site)["max_length"]
    return StackDescription(
        path=site.path,
        model=type(site.module).__name__,
        family=site.family.name,
        attached=False,
        backend="host",
        parameters=0,
        host=own,
        switched_off=(),
        layers=tuple(
            LayerDescription(i, name, count, "yes" if kinds else "no", built, None, limit, beyond or BEYOND["defined"])
            for i in range(len(site.attention))
        ),
    )


def _table(stack: StackDescription) -> str:
    state = "attached" if stack.attached else "nothing attached"
    head = f"{stack.path or 'model'} ({stack.model}, {stack.family}): {state}, backend {stack.backend}"
    off = ", ".join(stack.switched_off) or "nothing"
    kept = ", ".join(name for name in stack.host if name not in stack.switched_off) or "nothing"
    rows = [("layer", "encoding", "parameters", "shared", "built for", "trained", "limit", "past what it is built for")]
    for layer in stack.layers:
        limit = "none" if layer.max_length is None else f"{layer.max_length}"
        rows.append(
            (
                f"{layer.layer}",
                layer.name,
                f"{layer.parameters:,}",
                layer.shared,
                f"{layer.built_length}",
                f"{layer.trained_length or ('none seen' if stack.attached else '-')}",
                limit,
                layer.beyond,
            )
        )
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [head, f"of the host: switched off {off}; kept {kept}", f"added parameters: {stack.parameters:,}", *lines]
    )
