"""Position parameters in the layouts of the authors' own code, as attached encodings.

TUPE (guolinke/TUPE, on fairseq) stores a whole encoder: its post-norm layers are BERT's, so `from_public` builds the
v5 BERT model too. TISA (ulmewennberg/tisa) is a module that stands in many hosts: `load_public` fills it in.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from locant.encodings.tisa import Tisa
from locant.hf.attach import attach, detach
from locant.hf.attachment import attachments
from locant.hf.weights import load_torch, read_weights

Checkpoint = Mapping[str, Any] | str | os.PathLike[str]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """How one public code names its position parameters.

    ``needed``, ``optional``: its names, below a prefix of any kind; ``encoding``, ``options`` and ``convert`` give
    locant's name, options and state dict for what was found. ``host``: its other names, as regular expressions, and
    where they go in a BertModel (several targets share the rows among them). ``foreign``: names of another
    architecture, and what that is.
    """

    needed: tuple[str, ...]
    encoding: Callable[[State], str]
    options: Callable[[State], dict[str, Any]]
    convert: Callable[[State], dict[str, Tensor]]
    optional: tuple[str, ...] = ()
    host: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)


_TUPE = {
    "pos.weight": "table",
    "pos_ln.weight": "norm.weight",
    "pos_ln.bias": "norm.bias",
    "pos_q_linear.weight": "query_projection.weight",
    "pos_q_linear.bias": "query_projection.bias",
    "pos_k_linear.weight": "key_projection.weight",
    "pos_k_linear.bias": "key_projection.bias",
}
_BUCKETS = "relative_attention_bias.weight"  # [B + 1, H], where locant has [H, B + 1]
_LAYER, _BERT = r"layers\.(\d+)\.", r"encoder.layer.\1."

LAYOUTS = {
    "tupe": Layout(
        needed=tuple(_TUPE),
        optional=(_BUCKETS,),
        encoding=lambda state: "tupe_r" if _BUCKETS in state else "tupe_a",
        options=lambda state: (
            {"max_length": len(state["pos.weight"]) - 1}
            | ({"num_buckets": len(state[_BUCKETS]) - 1} if _BUCKETS in state else {})
        ),
        convert=lambda state: (
            {ours: state[theirs] for theirs, ours in _TUPE.items()}
            | ({"buckets": state[_BUCKETS].T} if _BUCKETS in state else {})
        ),
        host={
            r"embed_tokens\.weight": ("embeddings.word_embeddings.weight",),
            r"emb_layer_norm\.(weight|bias)": (r"embeddings.LayerNorm.\1",),
            rf"{_LAYER}self_attn\.in_proj_(weight|bias)": tuple(
                rf"{_BERT}attention.self.{part}.\2" for part in ("query", "key", "value")
            ),
            rf"{_LAYER}self_attn\.out_proj\.(weight|bias)": (rf"{_BERT}attention.output.dense.\2",),
            rf"{_LAYER}self_attn_layer_norm\.(weight|bias)": (rf"{_BERT}attention.output.LayerNorm.\2",),
            rf"{_LAYER}fc1\.(weight|bias)": (rf"{_BERT}intermediate.dense.\2",),
            rf"{_LAYER}fc2\.(weight|bias)": (rf"{_BERT}output.dense.\2",),
            rf"{_LAYER}final_layer_norm\.(weight|bias)": (rf"{_BERT}output.LayerNorm.\2",),
        },
        foreign={"emb_out_layer_norm.weight": "a pre-norm encoder, while BERT's layers are post-norm"},
    ),
    "tisa": Layout(
        needed=("kernel_amplitudes", "kernel_sharpness", "kernel_offsets"),
        encoding=lambda state: "tisa",
        options=lambda state: {"kernels": len(state["kernel_offsets"])},
        convert=Tisa.public_state,
    ),
}


def load_public(model: Any, checkpoint: Checkpoint, layout: str, **options: Any) -> Any:
    """Attach to a model, in place, what a checkpoint holds in a public layout (``"tupe"``, ``"tisa"``); returns it.

    ``checkpoint``: a state dict, or a file (safetensors; torch and fairseq files are read as data only). One set of
    parameters serves all layers, one for each layer serves them in order. ``options`` go to `attach`: what the tensors
    do not tell (``max_distance``, ``untie_cls``, ``keep_absolute``).
    Raises: ValueError for an unknown layout, missing tensors, shapes that do not fit the model, or a number of sets
    that is neither one nor that of the layers (the model is then as it was).
    """
    chosen = _layout(layout)
    state, _ = _read(checkpoint)
    sets = _sets(layout, chosen, state)
    name, inferred = chosen.encoding(sets[0]), chosen.options(sets[0])
    with torch.random.fork_rng(devices=[]):
        attach(model, name, **{**inferred, "share_layers": len(sets) == 1, **options})
    try:
        _fill(layout, chosen, sets, model)
    except ValueError:
        detach(model)
        raise
    return model


def from_public(
    checkpoint: Checkpoint, layout: str = "tupe", *, num_heads: int | None = None, **options: Any
) -> BertModel:
    """The encoder of a public checkpoint as a v5 BertModel with its encoding attached, in eval mode and stored dtype.

    ``num_heads`` is needed where neither the tensors (TUPE-R) nor the arguments that fairseq stores tell it. Tensors
    without a place (a language model's head) are left out, with a warning.
    Raises: ValueError as `load_public`, and for layouts that hold no encoder.
    """
    chosen = _layout(layout)
    if not chosen.host:
        raise ValueError(
            f"from_public: the layout {layout!r} holds no encoder, only position parameters; build the host and call "
            f"load_public(model, checkpoint, {layout!r})"
        )
    state, arguments = _read(checkpoint)
    prefix = _prefixes(layout, chosen, state)[0]
    inner = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    for name, what in chosen.foreign.items():
        if name in inner:
            raise ValueError(f"from_public: the checkpoint holds {prefix}{name}, so it is {what}; it has no v5 class")
    host, left = _host_state(chosen, inner)
    heads = num_heads or getattr(arguments, "encoder_attention_heads", None)
    heads = heads or (inner[_BUCKETS].shape[1] if _BUCKETS in inner else None)
    if heads is None:
        raise ValueError(
            f"from_public: neither the tensors nor stored arguments of this {layout!r} checkpoint tell the number of "
            "heads; give num_heads=..."
        )
    model = _bert(host, heads, chosen.options(inner)["max_length"])
    left = sorted([prefix + name for name in left] + [n for n in state if not n.startswith(prefix)])
    if left:
        warnings.warn(f"from_public: {len(left)} tensors have no place in a BertModel: {', '.join(left)}", stacklevel=2)
    return load_public(model, state, layout, **options)


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise ValueError(f"load_public: unknown layout {name!r}; choose one of {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name]


def _read(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], Any]:
    """The state dict, and the arguments that fairseq stores beside it."""
    if isinstance(checkpoint, Mapping):
        found: Any = checkpoint
    else:
        file = Path(checkpoint)
        if not file.is_file():
            raise FileNotFoundError(f"load_public: {file} does not exist; give a checkpoint file or a state dict")
        found = read_weights([file]) if file.suffix == ".safetensors" else load_torch(file)
    state = found.get("model", found) if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping):
        raise ValueError(f"load_public: the checkpoint holds a {type(found).__name__}; give tensors by name")
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, found.get("args") if state is not found else None


def _prefixes(layout: str, chosen: Layout, state: State) -> list[str]:
    """What stands before each set of position parameters, in the order of the numbers in it."""
    anchor = chosen.needed[0]
    found = [name.removesuffix(anchor) for name in state if name == anchor or name.endswith(f".{anchor}")]
    if not found:
        raise ValueError(
            f"load_public: no tensor is called {anchor!r}, by which a {layout!r} checkpoint is known (it holds "
            f"{', '.join(list(state)[:3]) or 'nothing'}, ...); give another layout"
        )
    return sorted(found, key=lambda prefix: ([int(n) for n in re.findall(r"\d+", prefix)], prefix))


def _sets(layout: str, chosen: Layout, state: State) -> list[dict[str, Tensor]]:
    sets = []
    for prefix in _prefixes(layout, chosen, state):
        missing = [name for name in chosen.needed if prefix + name not in state]
        if missing:
            raise ValueError(
                f"load_public: the {layout!r} checkpoint lacks {prefix}{missing[0]}; give all of its tensors"
            )
        names = [name for name in chosen.needed + chosen.optional if prefix + name in state]
        sets.append({name: state[prefix + name] for name in names})
    return sets


def _fill(layout: str, chosen: Layout, sets: list[dict[str, Tensor]], model: nn.Module) -> None:
    encodings = [encoding for _, _, there in attachments(model) for encoding in there.encodings]
    if len(sets) != len(encodings):
        raise ValueError(
            f"load_public: the {layout!r} checkpoint holds {len(sets)} sets of parameters but {type(model).__name__} "
            f"takes {len(encodings)}; give one for all layers, or one for each"
        )
    for encoding, tensors in zip(encodings, sets, strict=True):
        given = chosen.convert(tensors)
        for name, needed in encoding.state_dict().items():
            came = tuple(given[name].shape) if name in given else None
            if came != tuple(needed.shape):
                raise ValueError(
                    f"load_public: the {layout!r} checkpoint gives {name!r} the shape {came} but "
                    f"{type(model).__name__} needs {tuple(needed.shape)}; give a model of the checkpoint's sizes"
                )
        encoding.load_state_dict(given)


def _host_state(chosen: Layout, inner: State) -> tuple[dict[str, Tensor], list[str]]:
    """The state dict of a BertModel, and the names that have no place in it."""
    host: dict[str, Tensor] = {}
    left = []
    for name, tensor in inner.items():
        rule = next(((m, to) for pattern, to in chosen.host.items() if (m := re.fullmatch(pattern, name))), None)
        if rule is not None:
            match, targets = rule
            host |= dict(zip(map(match.expand, targets), tensor.chunk(len(targets)), strict=True))
        elif name not in chosen.needed + chosen.optional:
            left.append(name)
    return host, left


def _bert(host: dict[str, Tensor], num_heads: int, length: int) -> BertModel:
    words = host.get("embeddings.word_embeddings.weight")
    feed = host.get("encoder.layer.0.intermediate.dense.weight")
    if words is None or feed is None:
        raise ValueError(
            f"from_public: the checkpoint holds {len(host)} tensors of an encoder but neither words nor layers; give "
            "a whole checkpoint, or call load_public for its positions alone"
        )
    layers = {name.split(".")[2] for name in host if name.startswith("encoder.layer.")}
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=words.shape[1],
        num_hidden_layers=len(layers),
        num_attention_heads=num_heads,
        intermediate_size=len(feed),
        max_position_embeddings=length,
        type_vocab_size=1,  # fairseq's encoder has no segments
        layer_norm_eps=1e-5,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    model.to(dtype=words.dtype)  # pyright: ignore[reportCallIssue]
    host["embeddings.token_type_embeddings.weight"] = words.new_zeros(1, words.shape[1])
    host["embeddings.position_embeddings.weight"] = words.new_zeros(length, words.shape[1])
    lost = model.load_state_dict(host, strict=False)
    if lost.missing_keys or lost.unexpected_keys:
        raise ValueError(
            f"from_public: the checkpoint lacks {', '.join(lost.missing_keys[:3]) or 'nothing'} and has no place for "
            f"{', '.join(lost.unexpected_keys[:3]) or 'nothing'}; give a whole checkpoint"
        )
    return model
