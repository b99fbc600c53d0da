"""What locant does with one architecture of transformers: builds it tiny, attaches, and compares with the equation."""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers as T
from torch import nn

import locant.hf
from locant.hf import interface
from locant.hf.attachment import attachments
from locant.hf.families import calls_interface, is_cross
from tests import hf_architectures as tiny
from tests.hf_models import stir

CLIP, LENGTH, BATCH, TOLERANCE, LARGEST = 3, 7, 2, 2e-4, 130_000_000
TABLE = Path(__file__).resolve().parents[1] / "docs" / "families.md"
EQUAL, LIMITED, REFUSED, ALONE, UNBUILT, UNRUN, WRONG = (
    "equals the core",
    "equals the core, with a limit",
    "refused",
    "not on the interface",
    "not built here",
    "not run here",
    "wrong",
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

    def record(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> Any:
        q, k, v, mask = query, key, value, attention_mask
        result = interface.attention_forward(module, q, k, v, mask, **options)
        if hasattr(module, "locant_index"):
            calls.append(Call(module, q, k, v, mask, options, result[0]))
        return result

    T.AttentionInterface._global_mapping["locant"] = record
    try:
        yield calls
    finally:
        T.AttentionInterface._global_mapping["locant"] = interface.attention_forward


def literal(call: Call, encoding: Any, ids: torch.Tensor, keeps_bias: bool = False) -> torch.Tensor:
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
    if keeps_bias and (kept := call.options.get("position_bias")) is not None:
        logits = logits + kept.double()
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
    if grid := next((n for n in ("grid_thw", "image_grid_thw", "grid_hws", "image_grid_hws") if n in names), None):
        if names[grid].default is inspect.Parameter.empty:
            given = tiny.INPUTS.get(type(module).__name__, {})
            return {**_grid(module, names, grid, same), **{n: make(config) for n, make in given.items()}}
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
    contents = ("input_ids", "pixel_values", "inputs_embeds", "hidden_states", "input_features", "input_values")
    if not wanted & set(contents):
        wanted |= {next((n for n in contents if n in names), main)}
    extra = tiny.INPUTS.get(type(module).__name__, {})
    inputs = {name: makers[name]() for name in wanted if name in makers and name not in extra}
    more = {name: make(config) for name, make in extra.items()}
    alike = {n: torch.ones_like(t) if same and t.is_floating_point() else t for n, t in more.items()}
    return {**inputs, **alike}


def _grid(module: nn.Module, names: Any, grid: str, same: bool) -> dict[str, Any]:
    """One image, as rows of pixels of its 4 x 4 patches."""
    config: Any = module.config
    channels = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    width = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    row = torch.randn(1 if same else 16, width).expand(16, -1).clone()
    content = next(n for n in names if n in ("hidden_states", "pixel_values"))
    return {content: row, grid: torch.tensor([[1, 4, 4]])}


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
            numbers = tiny.parameter_count(model_type, name)
            if numbers > LARGEST:
                raise MemoryError(f"no small configuration is known here: {numbers // 10**6} million parameters")
            torch.manual_seed(0)
            model = stir(tiny.model_class(name)(tiny.tiny_config(model_type)), 1, 0.1).eval().float()
        except Exception as error:
            return _stop(finding, UNBUILT, error)
        if hasattr(model, "set_default_language"):
            model.set_default_language("en_XX")
        if not any(calls_interface(m) and not is_cross(p, m) for p, m in model.named_modules()):
            finding.result = ALONE
            return finding
        try:
            with torch.no_grad():
                _look(model, finding)
        except Exception as error:
            ours = isinstance(error, ValueError) and str(error).startswith("attach:")
            return _stop(finding, REFUSED if ours else UNRUN, error)
    return finding


def _stop(finding: Finding, result: str, error: Exception) -> Finding:
    finding.result = result
    finding.notes.append(_said(error))
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
        finding.notes.append("no positions of its own were found: needs keep_absolute=True")
    else:
        _see_nothing(model, finding)
        locant.hf.detach(model)
    torch.manual_seed(3)
    locant.hf.attach(model, "huang_m4+tisa", clip=CLIP, **options)
    there = attachments(model)
    finding.stacks = tuple(f"{path or 'the model'}: {len(a.layers())}" for path, _, a in there)
    finding.switched_off = tuple(f"{kind} {where}" for _, _, a in there for kind, where in a.own if not options)
    served = {id(m) for _, s, a in there for m in s.modules() if hasattr(m, "locant_index")}
    finding.kind = _kind(model, there)
    left = [p for p, m in model.named_modules() if calls_interface(m) and not is_cross(p, m) and id(m) not in served]
    if left:
        finding.notes.append(f"left as it is: {', '.join(sorted({_short(p) for p in left}))}")
    for path, stack, attachment in there:
        stir(attachment, 3)
        _compare(stack, attachment, finding)
        if attachment.runner is None and finding.result != WRONG:
            _again(model, path, finding, "padding moves outputs", _pad)
            if attachment.spec.sizes["causal"]:
                _again(model, path, finding, "decoding with a cache moves outputs", _decode)
    if finding.notes and finding.result == EQUAL:
        finding.result = LIMITED


def _kind(model: Any, there: Any) -> str:
    main = getattr(model, "main_input_name", "input_ids")
    reads = next((word for key, word in (("pixel", "image "), ("input_", "sound ")) if main.startswith(key)), "")
    reads = "" if main == "input_ids" else reads
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{reads}encoder-decoder"
    return f"{reads}decoder" if any(a.spec.sizes["causal"] for _, _, a in there) else f"{reads}encoder"


def _short(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit()).rsplit(".", 2)[0]


def _see_nothing(model: nn.Module, finding: Finding) -> None:
    """Without positions, equal tokens have equal queries and keys wherever they stand."""
    for _, stack, attachment in attachments(model):
        with recorded() as calls:
            stack(**given_to(stack, same=True))
        for call in calls[:1]:
            middle = call.k.shape[2] // 2  # first and last ones may be special, or at the edge of a convolution
            rows = call.k if attachment.runner is None else call.k[:, :, max(middle - 1, 0) : middle + 2]
            apart = (rows - rows[:, :, :1]).abs().max() / rows.abs().max().clamp(min=1e-9)
            if apart > TOLERANCE:
                finding.notes.append("order enters before the first attention, too")
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
        keeps_bias = attachment.spec.keep_absolute or not attachment.family.bias
        want = literal(call, layers[call.module.locant_index], torch.arange(keys)[None], keeps_bias)
        off = (call.out.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
        if not off < TOLERANCE:
            finding.notes.append(f"layer {call.module.locant_index} is off by {off:.2g}")
            finding.result = WRONG


def _again(
    model: nn.Module, path: str, finding: Finding, what: str, measure: Callable[[nn.Module], float | str]
) -> None:
    """Note what a way of reading a sentence does to the outputs, and whether it does that to the host alone, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        off = measure(model.get_submodule(path))
        if not isinstance(off, str) and off < 1e-3:
            return
        alone = measure(locant.hf.detach(copy.deepcopy(model)).get_submodule(path))
    host = " (the host alone, too)" if isinstance(alone, str) or alone >= 1e-3 else ""
    finding.notes.append(f"{what}{f': {off}' if isinstance(off, str) else ''}{host}")


def _pad(stack: nn.Module) -> float | str:
    """A sentence alone, padded on the left and padded on the right."""
    inputs = given_to(stack)
    if "attention_mask" not in inspect.signature(stack.forward).parameters or set(inputs) - {"input_ids"}:
        return 0.0
    ids = inputs["input_ids"][:1]
    pads, ones = torch.full((1, 2), 2), torch.ones(1, LENGTH, dtype=torch.long)
    rows, mask = torch.cat((pads, ids, pads), 1), torch.nn.functional.pad(ones, (2, 2))
    try:
        want = stack(ids, attention_mask=ones)[0]
        left = stack(rows[:, :-2], attention_mask=mask[:, :-2])[0][:, 2:]
        right = stack(rows[:, 2:], attention_mask=mask[:, 2:])[0][:, :-2]
    except Exception as error:
        return f"an error ({_said(error)})"
    scale = want.abs().max().clamp(min=1.0)
    return max(float((got - want).abs().max() / scale) for got in (left, right))


def _decode(stack: nn.Module) -> float | str:
    """A sentence read in two parts, with a cache, and in one."""
    names = inspect.signature(stack.forward).parameters
    name = next((n for n in ("cache", "past_key_values") if n in names), None)
    inputs = given_to(stack)
    if name is None or "input_ids" not in inputs:
        return 0.0
    ids = inputs.pop("input_ids")
    try:
        want = stack(ids, use_cache=False, **inputs)[0][:, 4:]
        cache = getattr(stack(ids[:, :4], use_cache=True, **inputs), "past_key_values", None)
        if cache is None:
            return 0.0
        got = stack(ids[:, 4:], **{name: cache}, use_cache=True, **inputs)[0]
    except Exception as error:
        return f"an error ({_said(error)})"
    return float((got - want).abs().max() / want.abs().max().clamp(min=1.0))


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).removeprefix("ValueError: attach: ")[:160].rstrip()


# --- the table --------------------------------------------------------------------------------------------------------

ORDER = (EQUAL, LIMITED, REFUSED, UNRUN, UNBUILT, ALONE)
MEANING = {
    EQUAL: "every attention layer of every stack gives what the equation gives, with q, k, v and mask as the host made "
    "them; without an encoding, equal tokens have equal keys; padding on either side and a cache change nothing",
    LIMITED: "the same, with what the last column says",
    REFUSED: "attach, or the first call, says why",
    UNRUN: "attaches, but the walk has no input that the host takes; not compared",
    UNBUILT: "the walk has no tiny configuration of it, or a library is missing; not tried",
    ALONE: "computes attention on its own, or has none; attach refuses it",
}


def row(finding: Finding) -> str:
    """One line of the table."""
    cells = (
        finding.model_type,
        finding.model,
        finding.kind,
        ", ".join(dict.fromkeys(finding.stacks)),
        ", ".join(dict.fromkeys(finding.switched_off)),
        "; ".join(dict.fromkeys(finding.notes)),
    )
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def page(findings: list[Finding]) -> str:
    """The page of all architectures, by result."""
    groups = {result: [f for f in findings if f.result == result] for result in ORDER}
    lines = [
        "# Every architecture of transformers",
        "",
        f"Made with transformers {T.__version__} by `python -m tests.hf_walk`, which builds every architecture that",
        "has an Auto class with a tiny random configuration, attaches `huang_m4+tisa` with random tables and compares.",
        'What is "left as it is" keeps its own positions; attach to it by itself: `attach(model.vision_tower, ...)`.',
        "",
        "| Result | Architectures | Meaning |",
        "|---|---|---|",
        *(f"| {result} | {len(groups[result])} | {MEANING[result]} |" for result in ORDER),
    ]
    for result in ORDER[:-1]:
        lines += ["", f"## {result[0].upper()}{result[1:]}", ""]
        lines += [
            "| Architecture | Model | Kind | Stack: layers | Switched off | Limit or reason |",
            "|---|---|---|---|---|---|",
        ]
        lines += [row(finding) for finding in groups[result]]
    lines += ["", f"## {ALONE[0].upper()}{ALONE[1:]}", "", ", ".join(f.model_type for f in groups[ALONE]) + "."]
    return "\n".join(lines) + "\n"


def walk(only: tuple[str, ...] = ()) -> Iterator[Finding]:
    """What is found for all architectures, or some."""
    for model_type, name in tiny.architectures().items():
        if not only or model_type in only:
            yield examine(model_type, name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    T.logging.set_verbosity_error()
    findings = []
    for found in walk(tuple(sys.argv[1:])):
        findings.append(found)
        print(f"{found.result:32}{row(found)}", flush=True)
    if not sys.argv[1:]:
        wrong = [finding.model_type for finding in findings if finding.result == WRONG]
        assert not wrong, wrong
        TABLE.write_text(page(findings), encoding="utf-8")
