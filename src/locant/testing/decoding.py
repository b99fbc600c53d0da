"""Checks of where tokens sit: key-value caches, padding on either side, packed documents, rows that see nothing."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from locant.encoding import Encoding
from locant.positions import Positions
from locant.testing.case import DOUBLE, Case, Host, Scene, of_keys
from locant.testing.exactness import able, gradients
from locant.testing.verdict import Verdict

LENGTH = 9


def check_cache(case: Case) -> None:
    """Decoding by chunks of 1, 2 and 3 tokens over cached keys equals the full causal pass; or it is not claimed to."""
    verdict = Verdict(case.id, "cache")  # https://github.com/huggingface/transformers/issues/19045
    x = case.random(2, LENGTH, case.model_dim, seed=8)
    if not case.build().properties.cache_safe:
        return _not_cached(verdict, case, x)
    full = case.host()(case.build(), x, Positions.arange(LENGTH), causal=True, backend="reference")
    for backend, dtype in _everywhere(case):
        encoding, host, tokens = case.build(dtype), case.host(dtype), x.to(dtype)
        for chunk in (1, 2, 3):
            cached, outs = tokens[:, :0], []
            for start in range(0, LENGTH, chunk):
                new = tokens[:, start : start + chunk]
                positions = encoding.prepare(Positions.arange(new.shape[1], start + new.shape[1]))
                new = encoding.embed(new, positions)
                cached = torch.cat((cached, new), 1)
                outs.append(host.layer(encoding, new, cached, positions, causal=True, backend=backend))
            tolerance = 1e-11 if dtype == DOUBLE else 1e-4
            verdict.close(f"output by chunks of {chunk} ({backend})", torch.cat(outs, 2), full, tolerance)


def _not_cached(verdict: Verdict, case: Case, x: Tensor) -> None:
    """Claims no cache: decoding token by token is refused, or gives something else."""
    encoding, host = case.build(), case.host()
    full, outs = host(encoding, x, Positions.arange(LENGTH), causal=True), []
    try:
        for step in range(LENGTH):
            positions = encoding.prepare(Positions.arange(1, step + 1))
            seen = encoding.embed(x[:, : step + 1], of_keys(positions))
            outs.append(host.layer(encoding, seen[:, -1:], seen, positions, causal=True))
    except ValueError as error:
        verdict.must(encoding.parts()[0].name in str(error), f"the refusal of a cache does not name it: {error}")
        return
    verdict.far("claims no cache, but decoding equals the full pass", torch.cat(outs, 2), full)


def _everywhere(case: Case) -> list[tuple[str, torch.dtype]]:
    """Every backend that serves counted positions, in float64, or in float32 where it knows no wider one."""
    found: dict[str, torch.dtype] = {}
    for dtype in (DOUBLE, torch.float32):
        for name in able(case, case.build(dtype), case.host(dtype), Positions.arange(2, LENGTH), dtype):
            found.setdefault(name, dtype)
    return list(found.items())


def _directions(encoding: Encoding) -> tuple[bool, ...]:
    """Causal or not, as the encoding serves."""
    return (False, True) if encoding.properties.bidirectional else (True,)


def _alone(encoding: Encoding, host: Host, x: Tensor, causal: bool) -> Tensor:
    """The output [H N D] of one row run by itself."""
    return host(encoding, x, Positions.arange(x.shape[1]), causal=causal, backend="reference")[0]


def check_padding(case: Case) -> None:
    """Padding left, right or in holes changes no real token, causal or not, in a batch of unequal rows."""
    # https://github.com/huggingface/transformers/issues/22707, https://github.com/PaddlePaddle/PaddleNLP/pull/6495
    verdict = Verdict(case.id, "padding")
    encoding, host = case.build(), case.host()
    masks = {
        "right": [[1] * 5 + [0] * 4, [1] * 8 + [0]],
        "left": [[0] * 4 + [1] * 5, [0] + [1] * 8],
        "holes": [[1, 1, 0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1, 1, 1, 1]],
    }
    x = case.random(2, LENGTH, case.model_dim, seed=8)
    backends = able(case, encoding, host, Positions.from_mask(torch.tensor(masks["left"], dtype=torch.bool)))
    for side, causal in itertools.product(masks, _directions(encoding)):
        mask = torch.tensor(masks[side], dtype=torch.bool)
        alone = [_alone(encoding, host, x[b : b + 1, real], causal) for b, real in enumerate(mask)]
        how = {"mask": mask[:, None, None], "causal": causal}
        for backend in backends:
            out = host(encoding, x, Positions.from_mask(mask), backend=backend, **how)
            for b, real in enumerate(mask):
                verdict.close(f"row {b}, {side}, causal={causal}, {backend}", out[b, :, real], alone[b], 1e-11)


def check_packing(case: Case) -> None:
    """Documents packed into one row each equal their own run."""
    verdict = Verdict(case.id, "packing")  # https://github.com/huggingface/transformers/pull/46333
    encoding, host = case.build(), case.host()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 4, 4]])
    x = case.random(2, LENGTH, case.model_dim, seed=8)
    backends = able(case, encoding, host, Positions.packed(documents))
    places = [(b, row == document) for b, row in enumerate(documents) for document in row.unique()]
    for causal in _directions(encoding):
        alone = [_alone(encoding, host, x[b : b + 1, own], causal) for b, own in places]
        for backend in backends:
            out = host(encoding, x, Positions.packed(documents), causal=causal, backend=backend)
            for (b, own), want in zip(places, alone, strict=True):
                where = f"row {b}, document at {own.nonzero()[0].item()}, causal={causal}, {backend}"
                verdict.close(where, out[b, :, own], want, 1e-11)


def check_explicit_ids(case: Case) -> None:
    """Counted ids given explicitly, for all rows or for each, equal the fast path."""
    verdict = Verdict(case.id, "explicit ids")
    encoding, host = case.build(), case.host()
    x = case.random(2, LENGTH, case.model_dim, seed=8)
    ids = torch.arange(LENGTH)
    for backend in able(case, encoding, host, Positions.from_ids(ids)):
        want = host(encoding, x, Positions.arange(LENGTH), backend=backend)
        for given in (ids, ids.expand(2, -1), ids[None]):
            have = host(encoding, x, Positions.from_ids(given), backend=backend)
            verdict.close(f"ids of shape {tuple(given.shape)} ({backend})", have, want, 1e-12)


def check_empty_rows(case: Case) -> None:
    """A query that sees nothing gives zeros, and all gradients stay finite."""
    verdict = Verdict(case.id, "empty rows")  # https://github.com/huggingface/transformers/issues/48176
    x, memory = (case.random(2, n, case.model_dim, seed=n) for n in (7, 11))
    mask = torch.ones(2, 1, 1, 11, dtype=torch.bool)
    mask[1] = False
    for backend, dtype in _everywhere(case):
        encoding, host = case.build(dtype), case.host(dtype)
        scene = Scene("empty", Positions.arange(7, 11), mask, causal=not encoding.properties.bidirectional)
        out, found = gradients(encoding, host, x.to(dtype), memory.to(dtype), scene, backend)
        verdict.must(
            bool((out[1] == 0).all()), f"{backend}: a row that sees nothing gives {out[1].abs().max():.3g}, not 0"
        )
        verdict.must(bool((out[0] != 0).any()), f"{backend}: the row that sees everything is 0 too")
        bad = [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]
        verdict.must(not bad, f"{backend}: gradients not finite: {', '.join(bad)}")


def check_shapes(case: Case) -> None:
    """One query, one key, an empty batch: shapes follow, and one key alone gets all the weight."""
    verdict = Verdict(case.id, "shapes")
    encoding, host = case.build(), case.host()
    for backend in able(case, encoding, host, Positions.arange(2, 4)):
        for batch, queries, keys in ((2, 1, 1), (1, 1, 5), (0, 3, 4), (2, 4, 4)):
            x, memory = (case.random(batch, n, case.model_dim, seed=n) for n in (queries, keys))
            out = host(encoding, x, Positions.arange(queries, keys), memory, backend=backend)
            want = (batch, case.num_heads, queries, case.head_dim)
            verdict.must(tuple(out.shape) == want, f"output {tuple(out.shape)}, expected {want} ({backend})")
            verdict.must(bool(out.isfinite().all()), f"output not finite for {want} ({backend})")
