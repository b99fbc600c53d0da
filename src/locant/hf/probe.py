"""Run the stacks of layers of any Hugging Face model on made-up tokens, all in one way, to compare what comes out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from locant.hf.attachment import Attachment, attachments
from locant.hf.families import embedding

EXACT = 400_000_000  # parameters up to which a copy in float64 is probed, so that rounding hides nothing
EQUAL = {torch.float64: 1e-5, torch.float32: 1e-4}  # relative distance up to which outputs count as equal; else 3e-2
LENGTH = 11  # tokens of a probe


@dataclass(frozen=True)
class Probe:
    """One stack of layers that can be run on token ids, whatever its arguments are called.

    ``name`` is empty, or "encoder" and "decoder" where a model has both. ``names`` says how an argument of ours is
    called there, ``memory`` is what a decoder reads from its encoder [1 S M].
    """

    name: str
    module: nn.Module
    config: Any
    width: int
    names: dict[str, str] = field(default_factory=dict)
    memory: Tensor | None = None

    @property
    def bare(self) -> bool:
        """Whether it takes hidden states, and no ids."""
        return "input_ids" not in self.names

    @cached_property
    def attached(self) -> tuple[Attachment, ...]:
        """What is attached to it."""
        return tuple(attachment for _, _, attachment in attachments(self.module))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        return next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)

    @property
    def equal(self) -> float:
        """The relative distance up to which two outputs count as equal."""
        return EQUAL.get(self.dtype, 3e-2)

    def takes(self, name: str) -> bool:
        """Whether a call may have this argument; attached stacks take ids of positions and of documents."""
        return name in self.names

    @cached_property
    def reserved(self) -> set[int]:
        """Token ids with a meaning: padding, start, end, mask."""
        found = (getattr(self.config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "cls", "sep", "mask"))
        flat = (i for ids in found if ids is not None for i in (ids if isinstance(ids, list | tuple) else [ids]))
        return {*flat, 0, 1, 2, 3}

    @property
    def padding(self) -> int:
        """The id of the padding token, or any."""
        pad = getattr(self.config, "pad_token_id", None)
        return pad if isinstance(pad, int) and pad >= 0 else 0

    def ids(self, length: int, seed: int = 0) -> Int[Tensor, "1 J"]:
        """Distinct token ids without a meaning (repeated where the vocabulary is too small)."""
        free = [i for i in range(min(self.vocabulary, 5000)) if i not in self.reserved] or [0]
        order = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).repeat(-(-length // len(free)))
        return torch.tensor(free)[order[:length]][None]

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""
        return int(getattr(self.config, "vocab_size", None) or 1000)

    def run(self, ids: Int[Tensor, "B J"], **given: Any) -> Float[Tensor, "B J M"]:
        """The hidden states after the last layer."""
        return self.call(ids, **given)[0]

    def call(self, ids: Int[Tensor, "B J"], **given: Any) -> tuple[Tensor, Any]:
        """The hidden states after the last layer, and the whole output."""
        arguments: dict[str, Any] = {"hidden_states": self._states(ids)} if self.bare else {}
        if not self.bare:
            arguments[self.names["input_ids"]] = ids
        if self.memory is not None:
            memory = self.memory.expand(len(ids), -1, -1)
            arguments["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory)  # pyright: ignore
            arguments["attention_mask"] = torch.ones(memory.shape[:2], dtype=torch.long)
        for name, value in given.items():
            arguments[self.names.get(name, name)] = value
        if self.bare and not self.attached and "attention_mask" in arguments:
            arguments["attention_mask"] = arguments["attention_mask"][:, None, None, :].bool()
        with torch.no_grad():
            output = self.module(**arguments)
        out = getattr(output, "last_hidden_state", None)
        return output[0] if out is None else out, output

    def _states(self, ids: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1000, self.width, generator=generator).to(self.dtype)[ids % 1000]

    @cached_property
    def causal(self) -> bool:
        """Whether no token sees a later one, as seen from outputs."""
        ids = self.ids(5)
        other = torch.cat((ids[:, :-1], self.ids(6)[:, -1:]), 1)
        return distance(self.run(ids)[:, :-1], self.run(other)[:, :-1]) <= self.equal

    @cached_property
    def caches(self) -> bool:
        """Whether it can read on from what it has read."""
        if not (self.causal and self.takes("use_cache") and self.takes("cache")):
            return False
        return cache_of(self.call(self.ids(2), use_cache=True)[1]) is not None


def cache_of(output: Any) -> Any:
    """The key-value cache that came out of a model, if any."""
    found = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if found is None else found


def distance(a: Float[Tensor, "B J M"], b: Float[Tensor, "B J M"]) -> float:
    """The largest distance of two tokens' vectors, relative to their length; infinite where one is no number."""
    a, b = a.double(), b.double()
    size = torch.maximum(a.norm(dim=-1), b.norm(dim=-1)).clamp(min=1e-300)
    far = ((a - b).norm(dim=-1) / size).max()
    return float("inf") if far.isnan() else float(far)


def exact_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU to be probed: eval mode, in float64 unless the model is large; the model stays as it is."""
    copied = copy.deepcopy(model).cpu().eval()
    return copied.double() if sum(p.numel() for p in model.parameters()) <= EXACT else copied


def probes(model: nn.Module) -> Iterator[Probe]:
    """The stacks of a model that can be run: its base, or encoder and decoder, or a bare encoder.

    Raises: ValueError for a model that takes neither token ids nor hidden states.
    """
    body = _body(model)
    config = getattr(body, "config", None)
    if getattr(config, "is_encoder_decoder", False) and _parameters(body) & {"decoder_input_ids"}:
        encoder = body.get_encoder()  # pyright: ignore[reportCallIssue]
        first = _probe("encoder", encoder, config)
        yield first
        yield _probe("decoder", body, config, "decoder_", first.run(first.ids(6, seed=7)))
        return
    yield _probe("", body, config)


def _body(model: nn.Module) -> nn.Module:
    """The module to be run: the base of a model with a head, or the one model inside a wrapper."""
    if not isinstance(model, PreTrainedModel) and not _parameters(model) & {"input_ids", "hidden_states"}:
        inside = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        model = model if inside is None else inside
    base = model.base_model if isinstance(model, PreTrainedModel) else model
    if not isinstance(base, nn.Module) or not _parameters(base) & {"input_ids", "hidden_states"}:
        takes = ", ".join(sorted(_parameters(base) - {"self", "kwargs"})) or "nothing"  # pyright: ignore
        raise ValueError(
            f"diagnose: {type(model).__name__} takes {takes}, needed input_ids (a text model) or hidden_states (a bare "
            "encoder); give the part of the model that does"
        )
    return base


def _probe(name: str, module: nn.Module, config: Any, prefix: str = "", memory: Tensor | None = None) -> Probe:
    own = _parameters(module)
    names = {"use_cache": "use_cache"} if "use_cache" in own else {}
    for ours in ("input_ids", "attention_mask", "position_ids"):
        if prefix + ours in own:
            names[ours] = prefix + ours
    cache = next((theirs for theirs in ("cache", "past_key_values") if theirs in own), None)
    if cache is not None:
        names["cache"] = cache
    if attachments(module) and not prefix:
        names.update(position_ids="position_ids", document_ids="document_ids")
    table = embedding(module)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, "hidden_size", None) or getattr(table, "embedding_dim", None) or _width(module)
    return Probe(name, module, text, int(width), names, memory)


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(type(module).forward).parameters)


def _width(module: nn.Module) -> int:
    """The width of a bare encoder without a config: that of its first linear layer."""
    first = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if first is None:
        raise ValueError(
            f"diagnose: {type(module).__name__} has no linear layer that tells its width; give a model with a config"
        )
    return first.in_features
