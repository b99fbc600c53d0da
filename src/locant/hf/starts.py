"""How the parameters of attached encodings start: ``paper`` (as drawn), ``neutral`` (nothing changes), ``fit``.

`fit` makes the attached model's logits follow those of the host as it was. With e' the host's logits, e those of the
attached model on the same inputs, q and k its own queries and keys, and C the removal of each row's mean over its keys
(which a softmax ignores), it minimizes, over the parameters of the encodings,

    sum over layers, sequences, heads, pairs (i, j) that may attend of  (C e - C e')_ij^2

So word-position terms are fitted where an encoding has them (q.a, k.a), and averaged over the words where it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.backends import Call, reference
from locant.encoding import Encoding, Layer
from locant.hf.attachment import Attachment, attachments
from locant.hf.families import Site, embedding
from locant.hf.interface import Seen, projections
from locant.terms import Operands

INITS = ("paper", "neutral", "fit")
DRAWN_SEQUENCES, DRAWN_LENGTH = 24, 64  # inputs drawn from the vocabulary where none are given
HELD_OUT = 4  # every fourth sequence is not fitted to but measured on
STEPS, ROUNDS = 60, 2


@dataclass(frozen=True)
class LayerFit:
    """How well one attention module follows the host, on inputs that were not fitted to.

    ``explained``: 1 - |C e - C e'|^2 / |C e0 - C e'|^2, with e0 the logits of the attached model at the start (its
    encodings neutral where they have such a value); 1: the logits of the host, 0: no better than the start, negative:
    worse. None where the start already equals the host. ``lost``: root mean square of C e0 - C e', in logits. Both are
    None where nothing was held out.
    """

    path: str
    layer: int
    name: str
    explained: float | None
    lost: float | None


@dataclass(frozen=True)
class FitReport:
    """All layers of a fit; ``inputs`` says what it was fitted to, ``sequences`` how many, ``held_out`` measured on."""

    inputs: str
    sequences: int
    held_out: int
    layers: tuple[LayerFit, ...]

    def __str__(self) -> str:
        """A line for each layer."""
        if not self.held_out:
            return (
                f"fitted to {self.inputs}: {self.sequences} sequences, too few to hold one out, so nothing was "
                f"measured; give {HELD_OUT} or more"
            )
        head = f"fitted to {self.inputs}: {self.sequences} sequences, measured on {self.held_out} others"
        lines = [
            f"{fit.path or 'model'} layer {fit.layer}  {fit.name}  explained "
            f"{'-' if fit.explained is None else f'{fit.explained:.3f}'} of {fit.lost or 0:.3f} (rms, logits)"
            for fit in self.layers
        ]
        return "\n".join([head, *lines])


def fit_report(model: nn.Module) -> FitReport:
    """What ``attach(..., init="fit")`` reached in each layer.

    Raises: ValueError where nothing was fitted.
    """
    for _, _, attachment in attachments(model):
        if attachment.fit is not None:
            return attachment.fit
    raise ValueError(
        f"fit_report: nothing was fitted in {type(model).__name__}; attach with init='fit' (a loaded model does not "
        "carry the report)"
    )


def check_start(init: str, encodings: Iterable[Encoding], keep_absolute: bool) -> None:
    """Refuse a start that an encoding cannot have, before anything is touched."""
    if init not in INITS:
        raise ValueError(f"attach: unknown init={init!r}; choose {', '.join(map(repr, INITS))}")
    if init == "fit" and keep_absolute:
        raise ValueError(
            "attach: init='fit' with keep_absolute=True has nothing to fit, since the host's own positions still do "
            "their work; use init='neutral', or leave out keep_absolute"
        )
    for encoding in encodings:
        if init == "neutral" and encoding.properties.neutral is None:
            raise ValueError(
                f"attach: {encoding.name} has no parameter value at which it changes nothing, so init='neutral' cannot "
                "be; use init='paper'"
            )
        if init == "fit":
            _check_fittable(encoding)


def _check_fittable(encoding: Encoding) -> None:
    if not any(True for _ in encoding.parameters()):
        raise ValueError(f"attach: {encoding.name} has no parameters that init='fit' could fit; use init='paper'")
    for part in encoding.parts():
        if "embed" in part.sites:
            raise ValueError(
                f"attach: {part.name} acts on the input, not on a layer's logits, so init='fit' does not apply; "
                "keep_absolute=True keeps the host's own table"
            )


def neutralize(encodings: Iterable[Encoding]) -> None:
    """Every encoding at its neutral value, where it has one."""
    for encoding in encodings:
        if encoding.properties.neutral is not None:
            encoding.neutralize()


# --- inputs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """What a fit looks at: ``run(model)`` passes it through the model, ``name`` says what it is."""

    name: str
    run: Callable[[nn.Module], None]


def drawn_inputs(sites: Sequence[Site], sizes: Sequence[Mapping[str, Any]]) -> Inputs:
    """Words drawn evenly from the vocabulary, the same ones every time; every stack reads them.

    Raises: ValueError for a bare stack, which embeds no words.
    """
    batches = []
    for site, known in zip(sites, sizes, strict=True):
        table = embedding(site.module) if site.embeds else None
        if not isinstance(table, nn.Embedding):
            raise ValueError(
                f"attach: {type(site.module).__name__} embeds no words, so init='fit' needs inputs; give fit_inputs="
            )
        length = min(known["max_length"], DRAWN_LENGTH)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(table.num_embeddings, (DRAWN_SEQUENCES, length), generator=generator)
        batches.append((site.path, ids.to(table.weight.device)))

    def run(model: nn.Module) -> None:
        for path, ids in batches:
            model.get_submodule(path)(input_ids=ids, attention_mask=torch.ones_like(ids))

    return Inputs("words drawn from the vocabulary", run)


def given_inputs(inputs: Any) -> Inputs:
    """``fit_inputs`` as the user gave them: token ids, one batch, or several batches.

    Raises: TypeError for anything else.
    """
    batches = [inputs] if isinstance(inputs, Tensor | Mapping) else list(inputs)
    batches = [{"input_ids": batch} if isinstance(batch, Tensor) else batch for batch in batches]
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"attach: fit_inputs holds a {type(batch).__name__}; give token ids [B, n], a batch as the model takes "
                "it, or a list of those"
            )

    def run(model: nn.Module) -> None:
        for batch in batches:
            try:
                model(**batch)
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"attach: {type(model).__name__} does not run on {', '.join(batch)} of fit_inputs ({error}); give "
                    "batches with all that it takes (an encoder-decoder: decoder_input_ids, too)"
                ) from error

    return Inputs("the given inputs", run)


# --- the fit ----------------------------------------------------------------------------------------------------------


def record(model: nn.Module, inputs: Inputs) -> list[list[Seen]]:
    """Every call of every attention module on the inputs, for each attachment; in eval mode, without gradients."""
    found = attachments(model)
    seen: list[list[Seen]] = [[] for _ in found]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        for calls, (_, _, attachment) in zip(seen, found, strict=True):
            attachment.watch = calls.append
        with torch.no_grad():
            inputs.run(model)
    finally:
        for _, _, attachment in found:
            attachment.watch = None
        for module, mode in modes.items():
            module.training = mode
    return seen


def fit(model: nn.Module, host: list[list[Seen]], inputs: Inputs) -> FitReport:
    """Fit the encodings of an attached model to the recorded calls of its host; returns (and keeps) the report.

    Each of `ROUNDS` rounds records the queries and keys of the attached model as it is then and fits to those, so that
    deeper layers are fitted to what they will see. L-BFGS, from neutral where there is such a value; parameters that no
    logit of the inputs depends on stay there.
    """
    found = attachments(model)
    for _, _, attachment in found:
        neutralize(attachment.encodings)  # pyright: ignore[reportArgumentType]
    before: list[list[Seen]] = []
    for _ in range(ROUNDS):
        own = record(model, inputs)
        before = before or own
        for calls, wanted, (_, _, attachment) in zip(own, host, found, strict=True):
            _solve(attachment, calls, wanted)
    after = record(model, inputs)
    layers: list[LayerFit] = []
    for number, (path, _, attachment) in enumerate(found):
        layers += _measure(path, attachment, before[number], after[number], host[number])
    rows = sum(call.q.shape[0] for call in host[0] if call.index == 0)
    held = sum(len(_rows(call, True)) for call in host[0] if call.index == 0)
    report = FitReport(inputs.name, rows - held, held, tuple(layers))
    for _, _, attachment in found:
        attachment.fit = report
    return report


def _rows(call: Seen, held_out: bool) -> Tensor:
    """The sequences of a call that are measured on, or fitted to."""
    row = torch.arange(call.q.shape[0], device=call.q.device)
    apart = row % HELD_OUT == HELD_OUT - 1
    return row[apart if held_out else ~apart]


def _solve(attachment: Attachment, calls: list[Seen], wanted: list[Seen]) -> None:
    targets = [_Target.of(call, want) for call, want in zip(calls, wanted, strict=True)]
    for encodings in _groups(attachment):
        served = [t for t in targets if attachment.layers()[t.call.index] in encodings]
        parameters = list(dict.fromkeys(p for encoding in encodings for p in encoding.parameters()))
        _minimize(parameters, [(t, attachment.layers()[t.call.index]) for t in served])


def _groups(attachment: Attachment) -> list[list[Encoding]]:
    """Encodings that share parameters are fitted together, others apart."""
    groups: list[tuple[set[int], list[Encoding]]] = []
    for encoding in dict.fromkeys(attachment.layers()):
        own = {id(p) for p in encoding.parameters()}
        near = [group for group in groups if group[0] & own]
        joined = (own.union(*(g[0] for g in near)), [e for g in near for e in g[1]] + [encoding])
        groups = [group for group in groups if group not in near] + [joined]
    return [encodings for _, encodings in groups]


def _minimize(parameters: list[nn.Parameter], served: list[tuple[_Target, Encoding]]) -> None:
    trainable = [p.requires_grad for p in parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    total = sum(float(target.lost) for target, _ in served)
    solver = torch.optim.LBFGS(
        parameters,
        max_iter=STEPS,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = torch.stack([target.residual(encoding).square().sum() for target, encoding in served]).sum()
        value = value / max(total, 1e-12)
        value.backward()
        return value

    with torch.enable_grad():
        solver.step(loss)  # pyright: ignore[reportArgumentType]
    for parameter, was in zip(parameters, trainable, strict=True):
        parameter.grad = None
        parameter.requires_grad_(was)


@dataclass(frozen=True)
class _Target:
    """One call of an attention module in the attached model, and the host's centered logits in the same place."""

    call: Seen
    allowed: Tensor
    logits: Float[Tensor, "B H I J"]
    lost: float

    @classmethod
    def of(cls, call: Seen, want: Seen, held_out: bool = False) -> _Target:
        rows = _rows(call, held_out)
        call, want = _select(call, rows), _select(want, rows)
        allowed = _allowed(call)
        logits = _centered(_content(want), allowed)
        lost = (_centered(_content(call), allowed) - logits).square().sum()
        return cls(call, allowed, logits, float(lost))

    def residual(self, encoding: Encoding) -> Float[Tensor, "B H I J"]:
        """C e - C e' with the encoding at work."""
        return _centered(logits_of(self.call, encoding), self.allowed) - self.logits


def _select(call: Seen, rows: Tensor) -> Seen:
    def of(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.shape[0] == 1 else tensor[rows]

    ids = call.route.positions
    picked = {
        name: getattr(ids, name)
        if getattr(ids, name) is None or getattr(ids, name).dim() == 1
        else of(getattr(ids, name))
        for name in ("query", "key", "query_special", "key_special", "query_document", "key_document")
    }
    positions = replace(ids, **picked, shared={})  # what was shared belongs to the parameters of then
    route = replace(call.route, positions=positions, x=of(call.route.x))
    return replace(call, q=call.q[rows], k=call.k[rows], mask=of(call.mask), bias=of(call.bias), route=route)


def _allowed(call: Seen) -> Tensor:
    """Which pairs count, [B|1 1|H I J]: those that may attend, without the rows of padding, which no query sees."""
    mask, (queries, keys) = call.mask, (call.q.shape[2], call.k.shape[2])
    if mask is not None and mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    if mask is None:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=call.q.device)
        mask = mask.tril(keys - queries) if call.causal else mask
    same = call.route.positions.same_document()
    mask = mask if same is None else mask & same[:, None]
    return mask & mask.any(-2)[..., None] if queries == keys else mask


def _centered(logits: Tensor, allowed: Tensor) -> Tensor:
    weight = allowed.to(logits.dtype)
    mean = (logits * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
    return (logits - mean) * weight


def _content(call: Seen) -> Tensor:
    """The logits of the call without its encoding: s q.k, and the host's own bias."""
    logits = (call.q * call.scale) @ call.k.transpose(-1, -2)
    return logits if call.bias is None else logits + call.bias


def logits_of(call: Seen, encoding: Encoding) -> Float[Tensor, "B H I J"]:
    """The logits of one call with an encoding at work, before mask and softmax."""
    positions = encoding.prepare(call.route.positions)
    q, k = encoding.query_key(call.q, call.k, positions)
    host = projections(call.module, call.route.projections, q.shape[1], k.shape[-1])
    terms = encoding.terms(positions, Layer(q, k, call.route.x, *host))
    factor = 1.0 if call.route.keeps_scale else encoding.logit_factor
    operands = Operands(q, k, k, positions, call.scale * factor)
    return reference.logits(Call(operands, terms, _allowed(call), False, 0.0, False))


def _measure(
    path: str, attachment: Attachment, before: list[Seen], after: list[Seen], host: list[Seen]
) -> list[LayerFit]:
    lost, left, count = {}, {}, {}
    with torch.no_grad():
        for first, last, want in zip(before, after, host, strict=True):
            index, encoding = first.index, attachment.layers()[first.index]
            start, end = _Target.of(first, want, True), _Target.of(last, want, True)
            lost[index] = lost.get(index, 0.0) + start.lost
            left[index] = left.get(index, 0.0) + float(end.residual(encoding).square().sum())
            pairs = end.allowed.expand(end.logits.shape).sum()
            count[index] = count.get(index, 0) + int(pairs)
    return [
        LayerFit(
            path=path,
            layer=index,
            name=attachment.layers()[index].name,
            explained=1 - left[index] / lost[index] if lost[index] > 1e-12 * count[index] else None,
            lost=(lost[index] / count[index]) ** 0.5 if count[index] else None,
        )
        for index in sorted(lost)
    ]
