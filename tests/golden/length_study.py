"""Set C, the encodings of the length-generalization study, and the distance of attention that it reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import locant
from locant.backends import Call, reference
from locant.encodings.rope import Rope
from locant.encodings.sinusoidal import Sinusoidal
from locant.lengthgen.attention_distance import jensen_shannon, symmetric_kl
from locant.terms import LogBucket, Operands
from tests.golden.cases import Case, Comparison
from tests.golden.parts import compare_weights, heads, merge, run_attention
from tests.golden.registry import check


def logits_of(
    encoding: locant.Encoding,
    q: Tensor,
    k: Tensor,
    positions: locant.Positions,
    scale: float | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """The logits [B H I J] before the mask."""
    positions = encoding.prepare(positions)
    q, k = encoding.query_key(q, k, positions)
    terms = encoding.terms(positions, locant.Layer(q, k))
    operands = Operands(q, k, k, positions, q.shape[-1] ** -0.5 if scale is None else scale)
    with torch.no_grad():
        return reference.logits(Call(operands, terms, allowed, False, 0.0, False))


@check("C", "lgpe")
def study(case: Case) -> Iterator[Comparison]:
    """Each stored case by the first word of its name."""
    kinds = {
        "abs": table,
        "rotary": rotary,
        "alibi": alibi,
        "t5": buckets,
        "attention": attention,
    }
    for name, tensors in case.members.items():
        run = distance if name == "attention_distance" else kinds[name.split("_")[0]]
        yield from run(name, tensors, case.meta["cases"][name])


def table(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """[sin | cos] of position ids."""
    encoding = locant.load("sinusoidal", model_dim=tensors["out"].shape[-1], layout="halves")
    assert isinstance(encoding, Sinusoidal)
    positions = locant.Positions.from_ids(tensors["position_ids"])
    yield Comparison(f"{name}/out", encoding.waves(positions.query).float(), tensors["out"], 1e-4)


def rotary(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """Neighboring pairs, at ids that are counted (from an offset on) or given."""
    x = tensors["x"].transpose(1, 2)
    encoding = locant.load("rope", head_dim=x.shape[-1], layout="interleaved")
    assert isinstance(encoding, Rope)
    past = settings.get("offset", 0)
    positions = locant.Positions.arange(x.shape[2], past + x.shape[2])
    if "position_ids" in tensors:
        positions = locant.Positions.from_ids(tensors["position_ids"])
    yield Comparison(f"{name}/out", encoding.rotate(x, positions.query).transpose(1, 2), tensors["out"])


def alibi(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """Slope times key id: ours, as the last token sees it, up to a number that the row has in common."""
    real, count = tensors["attention_mask"].bool(), settings["heads"]
    positions = locant.Positions.from_mask(real)
    nothing = torch.zeros(real.shape[0], count, real.shape[1], 1)
    bias = logits_of(locant.load("alibi", num_heads=count), nothing, nothing, positions)[:, :, -1]
    stored = tensors["out"].view(bias.shape)
    top = stored.masked_fill(~real[:, None], -torch.inf).amax(-1, keepdim=True)  # the key of the query itself
    mine = ((bias + top) * real[:, None]).view(tensors["out"].shape)
    yield Comparison(f"{name}/out", mine, tensors["out"])


def buckets(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """Buckets of key minus query."""
    rule = LogBucket(settings["num_buckets"], settings["max_distance"], causal=name.endswith("causal"))
    yield Comparison(f"{name}/bucket", rule.row(tensors["relative_position"]), tensors["bucket"])


def attention(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """A whole module without 1/sqrt(D), causal, and token by token."""
    count, width = settings["heads"], settings["d_kv"]
    x = tensors["hidden_states"]
    q, k, v = (heads(x @ tensors[f"param.{part}.weight"].T, count) for part in "qkv")
    encoding = built(name.removeprefix("attention_"), tensors, count, width, settings)
    yield from compare_weights(f"{name}/probs", tensors["probs"], encoding, q, k, causal=True, scale=1.0)
    positions = locant.Positions.arange(x.shape[1])
    out = run_attention(encoding, q, k, v, positions=positions, backend="auto", causal=True, scale=1.0)
    yield Comparison(f"{name}/out", merge(out) @ tensors["param.o.weight"].T, tensors["out"])


def built(
    kind: str, tensors: Mapping[str, Tensor], count: int, width: int, settings: Mapping[str, Any]
) -> locant.Encoding:
    """The encoding that a kind of the study's model names, with the stored weights."""
    sizes = dict(num_heads=count, head_dim=width, model_dim=settings["d_model"])
    if kind in ("none", "alibi"):
        return locant.load(kind, **sizes)
    if "rotary" in kind:
        return locant.load("rope", **sizes, layout="interleaved", rotary_dim=settings["rotary_dim"])
    if kind == "t5_relative_bias":
        encoding = locant.load("t5", **sizes, causal=True)
        encoding.load_state_dict({"table": tensors["param.relative_attention_bias.weight"].T})
        return encoding
    assert kind == "transformer_xl_relative_encoding", f"nobody here knows {kind!r}"
    encoding = locant.load("xlnet", **sizes)
    names = {"projection": "r.weight", "content_bias": "r_w_bias", "position_bias": "r_r_bias"}
    encoding.load_state_dict({mine: tensors[f"param.{theirs}"] for mine, theirs in names.items()})
    return encoding


def distance(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """The usual divergences, and what the public analyzer computes."""
    p, q = tensors["p"], tensors["q"]
    found = {
        "jsd_standard": jensen_shannon(p, q),
        "jsd_code": jensen_shannon(p, q, public=True),
        "symmetric_kl_code": 2 * symmetric_kl(p, q),  # a sum there, a mean here
    }
    for field, mine in found.items():
        yield Comparison(f"{name}/{field}", mine.mean(), tensors[field])
