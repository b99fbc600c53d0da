"""What locant does with one architecture of transformers: builds it tiny, attaches, and compares with the equation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as T
from torch import nn

import locant.hf
from locant.hf import interface
from locant.hf.attachment import attachments
from locant.hf.families import calls_interface, find_sites, is_cross
from tests import hf_architectures as tiny
from tests.hf_models import stir

CLIP, LENGTH, BATCH, TOLERANCE = 3, 7, 2, 2e-4
EQUAL, LIMITED, REFUSED, ALONE, UNBUILT = (
    "equals the core",
    "equals the core, with a limit",
    "refused",
    "not on the interface",
    "not built",
)


@dataclass
class Finding:
    """One row of the table of families."""

    model_type: str
    model: str
    kind: str = ""
    result: str = EQUAL
    stacks: tuple[str, ...] = ()
    switched_off: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """One call of an attached attention module, and what came out."""

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    out: torch.Tensor


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collect the calls of attached attention modules."""
    calls: list[Call] = []

    def record(module: Any, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        result = interface.attention_forward(module, q, k, v, mask, **options)
        if hasattr(module, "locant_index"):
            calls.append(Call(module, q, k, v, mask, options, result[0]))
        return result

    T.AttentionInterface._global_mapping["locant"] = record
    try:
        yield calls
    finally:
        T.AttentionInterface._global_mapping["locant"] = interface.attention_forward


def literal(call: Call, encoding: Any, ids: torch.Tensor) -> torch.Tensor:
    """softmax(s (q.k + q.a + k.a) + f) v, pair by pair, in float64; ids [B J] of the keys, the last are the queries."""
    q, k, v = (t.double() for t in (call.q, call.k, call.v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    count, keys = q.shape[2], k.shape[2]
    ids = ids[:, ids.shape[1] - keys :]
    offset = ids[:, None, :] - ids[:, keys - count :, None]
    gaussians, vectors = _tables(encoding)
    a = vectors[offset.clamp(-CLIP, CLIP) + CLIP]  # [B I J D]
    logits = q @ k.transpose(-1, -2) + torch.einsum("bhid,bijd->bhij", q, a) + torch.einsum("bhjd,bijd->bhij", k, a)
    scale = call.options.get("scaling")
    logits = logits * (q.shape[-1] ** -0.5 if scale is None else scale)
    amplitude, sharpness, center = gaussians  # [S H 1 1 1] each
    bumps = amplitude * torch.exp(-sharpness.abs() * (offset.double() - center) ** 2)
    logits = logits + bumps.sum(0).transpose(0, 1)
    if (cap := call.options.get("softcap")) is not None:
        logits = torch.tanh(logits / cap) * cap
    causal = call.options.get("is_causal")
    causal = getattr(call.module, "is_causal", False) if causal is None else causal
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask, -1e30) if call.mask.dtype == torch.bool else logits + call.mask.double()
    elif causal and count > 1:
        logits = logits.masked_fill(~torch.ones(count, keys, dtype=torch.bool).tril(keys - count), -1e30)
    sinks = call.options.get("s_aux")
    if sinks is not None:
        extra = sinks.double().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return (torch.cat((logits, extra), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def _tables(encoding: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    vectors, gaussians = encoding.parts()
    kernels = (gaussians.amplitude, gaussians.sharpness, gaussians.center)
    return tuple(p.detach().double()[:, :, None, None, None] for p in kernels), vectors.table[0].detach().double()


# --- inputs -----------------------------------------------------------------------------------------------------------


def given_to(module: nn.Module, same: bool = False) -> dict[str, Any]:
    """Small random inputs of a stack, by the names its forward has; ``same``: every token alike."""
    torch.manual_seed(5)
    config: Any = module.config
    names = inspect.signature(module.forward).parameters
    required = {n for n, p in names.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    main = getattr(module, "main_input_name", "input_ids")
    wanted = required | ({main} if main in names else set())
    makers = {
        "input_ids": lambda: _ids(same),
        "pixel_values": lambda: _pixels(config, same),
        "hidden_states": lambda: _rows(config, same),
        "inputs_embeds": lambda: _rows(config, same),
        "input_features": lambda: _sound(config, same),
        "input_values": lambda: torch.ones(BATCH, 1600) if same else torch.randn(BATCH, 1600),
    }
    if "encoder_hidden_states" in names and any(
        is_cross(p, m) and calls_interface(m) for p, m in module.named_modules()
    ):
        makers["encoder_hidden_states"] = lambda: torch.randn(BATCH, 5, width_of(config))
        wanted.add("encoder_hidden_states")
    if not wanted & set(makers):
        wanted |= {n for n in ("input_ids", "pixel_values", "inputs_embeds", "hidden_states") if n in names}
    extra = tiny.INPUTS.get(type(module).__name__, {})
    inputs = {name: makers[name]() for name in wanted if name in makers and name not in extra}
    return {**inputs, **{name: value(config) if callable(value) else value for name, value in extra.items()}}


def _ids(same: bool) -> torch.Tensor:
    return torch.full((BATCH, LENGTH), 9) if same else torch.randint(6, tiny.VOCABULARY - 2, (BATCH, LENGTH))


def width_of(config: Any) -> int:
    """The width of a stack's hidden states."""
    return next(getattr(config, n) for n in ("hidden_size", "d_model", "n_embd", "dim") if hasattr(config, n))


def _rows(config: Any, same: bool) -> torch.Tensor:
    row = torch.randn(BATCH, 1 if same else LENGTH, width_of(config))
    return row.expand(-1, LENGTH, -1).clone()


def _pixels(config: Any, same: bool) -> torch.Tensor:
    size = getattr(config, "image_size", 16)
    height, width = (size, size) if isinstance(size, int) else size
    shape = (BATCH, getattr(config, "num_channels", None) or getattr(config, "in_channels", 3), height, width)
    return torch.ones(shape) if same else torch.randn(shape)


def _sound(config: Any, same: bool) -> torch.Tensor:
    bins = next(
        (getattr(config, n) for n in ("num_mel_bins", "n_mels", "input_feat_per_channel") if hasattr(config, n)), 80
    )
    shape = (BATCH, bins, 2 * getattr(config, "max_source_positions", 32))
    return torch.ones(shape) if same else torch.randn(shape)


# --- the walk ---------------------------------------------------------------------------------------------------------


def examine(model_type: str, name: str) -> Finding:
    """Build, attach, compare; what goes wrong is named, not raised."""
    finding = Finding(model_type, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.manual_seed(0)
            model = stir(tiny.model_class(name)(tiny.tiny_config(model_type)), 1, 0.1).eval().float()
        except Exception as error:
            return _stop(finding, UNBUILT, error)
        if not any(calls_interface(m) and not is_cross(p, m) for p, m in model.named_modules()):
            finding.result = ALONE
            return finding
        try:
            with torch.no_grad():
                _look(model, finding)
        except Exception as error:
            return _stop(finding, "failed", error)
    return finding


def _stop(finding: Finding, result: str, error: Exception) -> Finding:
    finding.result = result
    finding.notes.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
    return finding


def _look(model: nn.Module, finding: Finding) -> None:
    options: dict[str, Any] = {}
    try:
        locant.hf.attach(model, "none")
    except ValueError as error:
        if "keep_absolute=True leaves it" not in str(error) or "no positions of its own" not in str(error):
            _stop(finding, REFUSED, error)
            return
        options = {"keep_absolute": True}
        finding.notes.append("brings no positions that could be switched off: keep_absolute=True")
    else:
        _see_nothing(model, finding)
        locant.hf.detach(model)
    torch.manual_seed(3)
    locant.hf.attach(model, "huang_m4+tisa", clip=CLIP, share_layers=False, **options)
    there = attachments(model)
    finding.stacks = tuple(f"{path or 'the model'}: {len(a.layers())}" for path, _, a in there)
    finding.switched_off = tuple(f"{kind} {where}" for _, _, a in there for kind, where in a.own if not options)
    served = {id(m) for _, s, a in there for m in s.modules() if hasattr(m, "locant_index")}
    left = [p for p, m in model.named_modules() if calls_interface(m) and not is_cross(p, m) and id(m) not in served]
    if left:
        finding.notes.append(f"left as they are: {', '.join(sorted({_short(p) for p in left}))}")
    for _, stack, attachment in there:
        stir(attachment, 3)
        _compare(stack, attachment, finding)
    if finding.notes and finding.result == EQUAL:
        finding.result = LIMITED


def _short(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit()).rsplit(".", 2)[0]


def _see_nothing(model: nn.Module, finding: Finding) -> None:
    """Without positions, equal tokens have equal queries and keys wherever they stand."""
    for _, stack, attachment in attachments(model):
        with recorded() as calls:
            stack(**given_to(stack, same=True))
        for call in calls[:1]:
            start = 1 if attachment.runner is not None and call.k.shape[2] > 3 else 0
            rows = call.k[:, :, start:-1] if start else call.k
            apart = (rows - rows[:, :, :1]).abs().max() / rows.abs().max().clamp(min=1e-9)
            if apart > TOLERANCE:
                finding.notes.append(f"equal tokens differ in the keys of the first layer by {apart:.2g}")
            if call.options.get("position_bias") is not None and attachment.own and call.options["position_bias"].any():
                finding.notes.append("a bias of the host reaches attention")


def _compare(stack: nn.Module, attachment: Any, finding: Finding) -> None:
    with recorded() as calls:
        stack(**given_to(stack))
    layers, reached = attachment.layers(), {call.module.locant_index for call in calls}
    if reached != set(range(len(layers))):
        finding.notes.append(f"layers {sorted(set(range(len(layers))) - reached)} were not reached")
    for call in calls:
        keys = call.k.shape[2]
        want = literal(call, layers[call.module.locant_index], torch.arange(keys)[None])
        off = (call.out.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
        if not off < TOLERANCE:
            finding.notes.append(f"layer {call.module.locant_index} is off by {off:.2g}")
            finding.result = "wrong"
