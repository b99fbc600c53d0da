"""Checks of what an encoding claims in `properties`: a claim holds, and what is not claimed fails."""

from __future__ import annotations

import torch
from torch import Tensor

from locant.backends import Call, reference
from locant.catalog import stack
from locant.encoding import Encoding, Layer, Properties
from locant.positions import Positions
from locant.terms import Operands
from locant.testing.case import BATCH, KEYS, Case, Host
from locant.testing.verdict import Verdict


class _Plain(Encoding):
    """No position at all, at another encoding's logit factor."""

    name = "plain"
    properties = Properties(True, True, "defined", "shared", neutral="always")

    def __init__(self, logit_factor: float) -> None:
        super().__init__()
        self.logit_factor = logit_factor


def check_neutral(case: Case) -> None:
    """At its neutral value an encoding equals none at the same logit factor; where it has none, neutralize says so."""
    verdict = Verdict(case.id, "neutral")
    encoding, host = case.build(), case.host()
    x = case.random(BATCH, KEYS, case.model_dim, seed=8)
    if encoding.properties.neutral is None:
        try:
            encoding.neutralize()
        except ValueError as error:
            verdict.must(encoding.name in str(error), f"neutralize() does not name the encoding: {error}")
            return
        verdict.fail("claims no neutral value, but neutralize() raises nothing")
    encoding.neutralize()
    causal = not encoding.properties.bidirectional
    plain = host(_Plain(encoding.logit_factor), x, Positions.arange(KEYS), causal=causal)
    verdict.close("output at the neutral value", host(encoding, x, Positions.arange(KEYS)), plain, 1e-12)


def check_position(case: Case) -> None:
    """Away from its neutral value an encoding breaks permutation equivariance (one that is always neutral keeps it)."""
    verdict = Verdict(case.id, "position")  # https://github.com/microsoft/foldingdiff lost all position unnoticed
    encoding, host = case.build(), case.host()
    x = case.random(BATCH, KEYS, case.model_dim, seed=8)
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(1))
    have = host(encoding, x[:, order], Positions.arange(KEYS))
    same = host(encoding, x, Positions.arange(KEYS))[:, :, order]
    if not encoding.properties.bidirectional:  # the causal mask alone tells permuted tokens apart
        plain = host(_Plain(encoding.logit_factor), x, Positions.arange(KEYS), causal=True)
        verdict.far("the output is that of a causal mask alone", host(encoding, x, Positions.arange(KEYS)), plain, 1e-3)
    elif encoding.properties.neutral == "always":
        verdict.close("output of permuted tokens", have, same, 1e-12)
    else:
        verdict.far("the output of permuted tokens is the permuted output, so there is no position", have, same, 1e-3)


def check_shift(case: Case) -> None:
    """Adding a number to all ids changes nothing where that is claimed, and something where it is not."""
    verdict = Verdict(case.id, "shift")
    encoding, host = case.build(), case.host()
    x = case.random(BATCH, KEYS, case.model_dim, seed=8)
    positions = Positions.arange(KEYS)
    room = 5 if encoding.max_length is None else encoding.max_length - KEYS
    verdict.must(room > 0, f"max_length={encoding.max_length} leaves no room to shift {KEYS} ids; build a longer one")
    have, want = (host(encoding, x, where) for where in (positions.shift(min(5, room)), positions))
    if encoding.properties.shift_invariant:
        verdict.close("output at shifted ids", have, want, 1e-11)
    else:
        verdict.far("claims no shift invariance, but shifted ids give the same output", have, want)


def logits(encoding: Encoding, host: Host, q: Tensor, k: Tensor, x: Tensor, positions: Positions) -> Tensor:
    """The logits [B H I J] of given q and k, before the mask."""
    positions = encoding.prepare(positions)
    q, k = encoding.query_key(q, k, positions)
    terms = encoding.terms(positions, Layer(q, k, x, host.query, host.key))
    scale = encoding.logit_factor / q.shape[-1] ** 0.5
    queries, keys = q.shape[2], k.shape[2]
    past = torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    allowed = None if encoding.properties.bidirectional else past
    return reference.logits(Call(Operands(q, k, k, positions, scale), terms, allowed, False, 0.0, False))


def check_symmetry(case: Case) -> None:
    """With q = k the logits are symmetric where that is claimed, and not where it is not."""
    verdict = Verdict(case.id, "symmetry")
    encoding, host = case.build(), case.host()
    positions = Positions.arange(KEYS)
    x = encoding.embed(case.random(BATCH, KEYS, case.model_dim, seed=8), encoding.prepare(positions))
    q = host.split(host.query(x))
    have = logits(encoding, host, q, q, x, positions)
    if encoding.properties.symmetric:
        verdict.close("logits against their transpose", have, have.transpose(-1, -2), 1e-11)
    else:
        verdict.far("claims no symmetry, but the logits are symmetric", have, have.transpose(-1, -2))


def check_content(case: Case) -> None:
    """What an encoding adds to the logits depends on q or k exactly where ``content`` is claimed."""
    verdict = Verdict(case.id, "content")
    encoding, host = case.build(), case.host()
    plain, positions = _Plain(encoding.logit_factor), Positions.arange(KEYS)
    x = case.random(BATCH, KEYS, case.model_dim, seed=8)
    added = []
    for seed in (3, 4):
        q, k = (case.random(BATCH, case.num_heads, KEYS, case.head_dim, seed=s) for s in (seed, seed + 10))
        added.append(logits(encoding, host, q, k, x, positions) - logits(plain, host, q, k, x, positions))
    if encoding.properties.content:
        verdict.far("claims to depend on content, but adds the same to any q and k", added[0], added[1])
    else:
        verdict.close("what is added to other q and k", added[0], added[1], 1e-11)


def check_range(case: Case) -> None:
    """Past the range: ``clip`` and ``saturate`` share one value, ``raise`` raises, ``defined`` stays finite."""
    verdict = Verdict(case.id, "range")
    encoding, host = case.build(), case.host()
    claim = encoding.properties.beyond_range
    if claim == "raise":
        return _raises_past_the_table(verdict, case, encoding, host)
    verdict.must(encoding.max_length is None, f"claims {claim!r}, but has max_length={encoding.max_length}")
    x = case.random(BATCH, 2, case.model_dim, seed=8)

    def at(distance: int) -> Tensor:
        return host(encoding, x, Positions.from_ids(torch.tensor([1, 1 + distance])))

    verdict.must(bool(at(100_000).isfinite().all()), "output not finite 100000 tokens away")
    if claim == "defined":
        return
    if case.reach is None:
        verdict.fail(f"claims {claim!r}; give the case its reach, the distance from which farther ones share a value")
    for farther in (case.reach + 1, case.reach + 7, 500):
        verdict.close(f"output at distance {farther} against {case.reach}", at(farther), at(case.reach), 1e-12)
    verdict.far(
        f"distances {case.reach - 1} and {case.reach} already share a value", at(case.reach - 1), at(case.reach)
    )


def _raises_past_the_table(verdict: Verdict, case: Case, encoding: Encoding, host: Host) -> None:
    limit = encoding.max_length
    if limit is None:
        verdict.fail("claims to raise past its range, but max_length is None")
    x = case.random(BATCH, limit, case.model_dim, seed=8)
    verdict.must(bool(host(encoding, x, Positions.arange(limit)).isfinite().all()), f"not finite at max_length={limit}")
    for positions in (Positions.arange(limit + 1), Positions.from_ids(torch.tensor([0, limit]))):
        tokens = case.random(BATCH, positions.num_keys, case.model_dim, seed=8)
        try:
            host(encoding, tokens, positions)
        except ValueError as error:
            verdict.must(
                str(limit) in str(error), f"the error past the table does not name its length {limit}: {error}"
            )
        else:
            verdict.fail(f"claims to raise past its range, but id {limit} with max_length={limit} raised nothing")


def check_parameters(case: Case) -> None:
    """The number of parameters is the formula's, for one layer and for three."""
    verdict = Verdict(case.id, "parameters")
    encoding = case.make()
    if case.parameters is None:
        verdict.fail("the case has no parameter count; give parameters=...")
    have = sum(w.numel() for w in encoding.parameters())
    verdict.must(have == case.parameters, f"{have} parameters, the formula says {case.parameters}")
    shared = encoding.properties.layers == "shared" if case.shared is None else case.shared
    want = case.parameters * (1 if shared else 3) if case.stack_parameters is None else case.stack_parameters
    have = sum(w.numel() for w in stack(case.make, 3).parameters())
    verdict.must(have == want, f"{have} parameters in three layers, the formula says {want}")


def check_layers(case: Case) -> None:
    """Three layers share one object, or have one each, as ``layers`` claims; ``share_layers`` overrides it."""
    verdict = Verdict(case.id, "layers")
    claim = case.make().properties.layers
    embeds = {part.name: "embed" in part.sites or part.moves_ids for part in case.make().parts()}
    default, shared = stack(case.make, 3), stack(case.make, 3, share_layers=True)
    for part, name in enumerate(embeds):
        distinct = len({id(layer.parts()[part]) for layer in default})
        own = default[0].parts()[part].properties.layers
        verdict.must(
            distinct == (1 if own == "shared" else 3), f"{name}: {distinct} objects in three layers of {own!r}"
        )
        distinct = len({id(layer.parts()[part]) for layer in shared})
        verdict.must(distinct == 1, f"{name}: {distinct} objects with share_layers=True")
    verdict.must(claim in ("shared", "separate"), f"claims layers={claim!r}, not 'shared' or 'separate'")
    if not any(embeds.values()):
        distinct = len({id(layer) for layer in stack(case.make, 3, share_layers=False)})
        verdict.must(distinct == 3, f"{distinct} objects in three layers with share_layers=False")
        return
    try:
        stack(case.make, 3, share_layers=False)
    except ValueError:
        return
    verdict.fail("acts on the input embedding (or moves ids), but share_layers=False was accepted")
