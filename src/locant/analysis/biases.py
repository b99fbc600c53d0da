"""What positions add to the logits of a layer whatever the content is, for any encoding, through its terms.

An encoding is asked for its terms at q = k = 0; no encoding is known by name. Hosts with a bias of their own (T5,
MPNet) or with vectors of their own (DeBERTa) are read into the same terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locant.analysis.model import Host, scale_of, submodule
from locant.analysis.plain import as_double
from locant.backends import Call, reference
from locant.encoding import Layer
from locant.hf.interface import projections
from locant.positions import Positions
from locant.terms import (
    LogBucket,
    Operands,
    PairBias,
    RelativeBias,
    RelativeGate,
    RelativeKey,
    RelativeQuery,
    RelativeScale,
    RelativeValue,
    SignedLogBucket,
    Term,
)


@dataclass(frozen=True)
class Companion:
    """What one term holds for each offset, without content: a bias, a factor, or the length of a vector.

    ``values`` [H or 1, K]; ``profile`` (biases alone): softmax over the offsets shown.
    """

    layer: int
    name: str
    kind: str
    offsets: Int[Tensor, "K"]
    values: Float[Tensor, "H K"]
    profile: Float[Tensor, "H K"] | None


KINDS: dict[type[Term], tuple[str, str]] = {
    RelativeBias: ("relative bias", "bias"),
    RelativeScale: ("relative scale", "scale"),
    RelativeGate: ("relative gate", "norm"),
    RelativeQuery: ("relative query", "norm"),
    RelativeKey: ("relative key", "norm"),
    RelativeValue: ("relative value", "norm"),
}


def terms_of(host: Host, layer: int, positions: Positions) -> tuple[tuple[Term, ...], Operands]:
    """The terms of a layer at q = k = 0, and the operands they read (q and k as the encoding changes zeros).

    Raises: ValueError for positions past a table, or an encoding that needs the layer's input.
    """
    queries, keys = positions.num_queries, positions.num_keys
    q = torch.zeros(1, host.num_heads, queries, host.head_dim)
    k = torch.zeros(1, host.num_heads, keys, host.head_dim)
    encoding = host.encoding_of(layer)
    terms: tuple[Term, ...] = ()
    with torch.no_grad():
        if encoding is not None and host.attachment is not None:
            positions = host.attachment.stack.prepare(positions)
            q, k = encoding.query_key(q, k, positions)
            module = host.module_of(layer)
            project = projections(module, host.attachment.family.projections, host.num_heads, host.head_dim)
            terms = encoding.terms(positions, Layer(q, k, None, *project))
        if encoding is None or (host.attachment is not None and host.attachment.spec.keep_absolute):
            terms += tuple(_own_terms(host, layer))
    q, k = q.double(), k.double()
    return terms, Operands(q, k, k, positions, scale_of(host, layer))


@torch.no_grad()
def content_free_logits(host: Host, layer: int, n: int) -> Float[Tensor, "H n n"] | None:
    """What positions alone add to the logits of a layer, in float64; None where they add nothing to any pair."""
    terms, operands = terms_of(host, layer, Positions.arange(n))
    if not terms and not bool(operands.q.any()):
        return None
    logits = reference.logits(Call(operands, terms, None, False, 0.0, False))[0]
    logits = logits.expand(host.num_heads, n, n)
    return logits if bool((logits != logits[:, :1, :1]).any()) else None


@torch.no_grad()
def companions(host: Host, layer: int, radius: int) -> tuple[Companion, ...]:
    """Every term of a layer that has one value or vector for each offset, at offsets -radius .. radius."""
    limit = host.trained_length
    if limit is not None:
        radius = min(radius, max(1, (limit - 3) // 2))
    key = torch.arange(1, 2 * radius + 2)  # ids from 1 on: id 0 is special to some encodings
    positions = Positions.from_ids(key[radius : radius + 1], key)
    terms, operands = terms_of(host, layer, positions)
    moved, _ = terms_of(host, layer, positions.shift(1))
    found = (_companion(*pair, operands, layer, key - 1 - radius) for pair in zip(terms, moved, strict=True))
    return tuple(companion for companion in found if companion is not None)


def _companion(term: Term, moved: Term, operands: Operands, layer: int, offsets: Tensor) -> Companion | None:
    """What ``term`` holds; None where it is no matter of offsets (``moved``: the same term one position farther)."""
    if isinstance(term, PairBias):
        values = as_double(term.tensor(operands.positions))[0, :, 0]
        assert isinstance(moved, PairBias)
        if not torch.equal(values, as_double(moved.tensor(operands.positions.shift(1)))[0, :, 0]):
            return None
        name, kind = "pair bias", "bias"
    elif type(term) in KINDS:
        name, kind = KINDS[type(term)]
        rows = term.rule.rows(operands.positions).flatten()[-len(offsets) :]  # pyright: ignore[reportAttributeAccessIssue]
        picked = as_double(term.table)[:, rows]  # pyright: ignore[reportAttributeAccessIssue]
        values = picked.norm(dim=-1) if kind == "norm" else picked
    else:
        return None
    profile = values.softmax(-1) if kind == "bias" else None
    return Companion(layer, name, kind, offsets, values, profile)


def _own_terms(host: Host, layer: int) -> list[Term]:
    """Terms of the host itself: a bucketed bias, or DeBERTa's vectors."""
    module: Any = host.module_of(layer)
    config = getattr(host.stack, "config", None)
    table = submodule(host.stack, host.layout.bias) or submodule(host.attention[0], host.layout.bias)
    if isinstance(table, nn.Embedding):
        far = getattr(config, "relative_attention_max_distance", 128)
        return [RelativeBias(table.weight.T, LogBucket(table.num_embeddings, far, causal=host.causal))]
    if getattr(module, "relative_attention", False):
        return _disentangled(host, module)
    return []


def _disentangled(host: Host, module: Any) -> list[Term]:
    """DeBERTa, both versions: vectors of offsets, projected by the layer's own or by extra weights."""
    encoder: Any = submodule(host.stack, "encoder")
    rows = encoder.get_rel_embedding()
    size = rows.shape[0] // 2
    buckets = getattr(module, "position_buckets", -1) > 0
    rule = SignedLogBucket(size, module.max_relative_positions if buckets else None)

    def first(*names: str) -> Any:
        found = (getattr(module, name, None) for name in names)
        return next((projected for projected in found if projected is not None), None)

    terms: list[Term] = []
    for kind, term, names in (
        ("c2p", RelativeQuery, ("pos_proj", "pos_key_proj", "key_proj")),
        ("p2c", RelativeKey, ("pos_q_proj", "pos_query_proj", "query_proj")),
    ):
        project = first(*names)
        if kind in module.pos_att_type and project is not None:
            terms.append(term(project(rows).unflatten(-1, (host.num_heads, -1)).transpose(0, 1), rule))
    return terms
