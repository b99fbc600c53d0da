"""Checks of the numbers: against the oracle, between backends, in low precision, and of every gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from locant.attention import explain
from locant.backends import BACKENDS
from locant.encoding import Encoding, Layer
from locant.positions import Positions
from locant.testing import oracle
from locant.testing.case import BATCH, DOUBLE, KEYS, QUERIES, Case, Host, Scene, numbers, of_keys, scenes
from locant.testing.verdict import Verdict


def check_oracle(case: Case) -> None:
    """Embedding and attention equal scalar loops over the case's equations, in float64 to 1e-12."""
    verdict = Verdict(case.id, "oracle")
    if case.logit is None and case.row is None:
        verdict.fail("the case has no logit; give the equation of one pair (or of one row)")
    encoding, host = case.build(), case.host()
    p, (q, k, v) = numbers(encoding, host), case.operands()
    tokens = case.random(BATCH, KEYS, case.model_dim, seed=8)
    for scene in scenes(case, encoding):
        positions = encoding.prepare(scene.positions)
        have = host.attend(encoding, q, k, v, tokens[:, :QUERIES], positions, backend="reference", **scene.how)
        ids = scene.positions.query, scene.positions.key
        want = oracle.attend(case.logit, case.row, case.value, p, q, k, v, *ids, scene.mask, scene.causal)
        verdict.close(f"output ({scene.name})", have, torch.from_numpy(want), 1e-12)
        embedded = encoding.embed(tokens, of_keys(positions))
        want = oracle.embed(case.embed, case.embed_row, p, tokens, ids[1], scene.positions.length)
        verdict.close(f"embedding ({scene.name})", embedded, torch.from_numpy(want), 1e-12)


def gradients(
    encoding: Encoding, host: Host, x: Tensor, memory: Tensor, scene: Scene, backend: str
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The output of one layer, and the gradient of a fixed random sum of it in every parameter and input."""
    leaves = {"x": x.detach().clone().requires_grad_(), "memory": memory.detach().clone().requires_grad_()}
    parameters = dict(encoding.named_parameters()) | {f"host.{n}": w for n, w in host.named_parameters()}
    out = host(encoding, leaves["x"], scene.positions, leaves["memory"], backend=backend, **scene.how)
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64, device="cpu").to(out)
    named = leaves | parameters
    found = torch.autograd.grad((out * weights).sum(), list(named.values()), allow_unused=True)
    return out.detach(), dict(zip(named, found, strict=True))


def able(case: Case, encoding: Encoding, host: Host, positions: Positions, dtype: torch.dtype = DOUBLE) -> list[str]:
    """The backends that serve the encoding's terms at these positions in this dtype."""
    q, k, v = case.operands(positions.num_queries, positions.num_keys, dtype)
    positions = encoding.prepare(positions)
    x = case.random(BATCH, positions.num_queries, case.model_dim, seed=8, dtype=dtype)
    terms = encoding.terms(positions, Layer(q, k, x, host.query, host.key))
    refused = explain(q, k, v, terms, positions).refused
    return [name for name in BACKENDS if name not in refused]


def check_backends(case: Case) -> None:
    """Each backend that serves the terms equals ``reference`` in output and every gradient; the others refuse."""
    verdict = Verdict(case.id, "backends")
    encoding, host = case.build(), case.host()
    x, memory = (case.random(BATCH, n, case.model_dim, seed=n) for n in (QUERIES, KEYS))
    served = able(case, encoding, host, Positions.arange(QUERIES, KEYS))
    for name in BACKENDS:
        if name not in served:
            _must_refuse(verdict, encoding, host, x, memory, name)
    for scene in scenes(case, encoding):
        want_out, want = gradients(encoding, host, x, memory, scene, "reference")
        for name, gradient in want.items():
            # https://github.com/huggingface/transformers/pull/31899: it would break data-parallel training
            verdict.must(gradient is not None, f"{name} has no gradient (reference, {scene.name})")
        auto = host(encoding, x, scene.positions, memory, **scene.how)
        verdict.close(f"output (auto, {scene.name})", auto, want_out, 1e-11)
        for backend in able(case, encoding, host, scene.positions):
            if backend == "reference":
                continue
            out, have = gradients(encoding, host, x, memory, scene, backend)
            verdict.close(f"output ({backend}, {scene.name})", out, want_out, 1e-11)
            _close_gradients(verdict, f"{backend}, {scene.name}", have, want, 1e-10)


def _must_refuse(verdict: Verdict, encoding: Encoding, host: Host, x: Tensor, memory: Tensor, backend: str) -> None:
    try:
        host(encoding, x, Positions.arange(QUERIES, KEYS), memory, backend=backend)
    except ValueError:
        return
    verdict.fail(f"backend {backend!r} refuses these terms in explain() but runs them when asked for by name")


def _close_gradients(
    verdict: Verdict, where: str, have: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], tolerance: float
) -> None:
    for name, expected in want.items():
        found = have[name]
        if expected is None:
            continue
        if found is None:
            verdict.fail(f"gradient of {name} ({where}) is missing")
        verdict.close(f"gradient of {name} ({where})", found, expected, tolerance)


ROUNDINGS = {torch.float32: 8, torch.bfloat16: 2}  # float32 kernels sum in other orders, bfloat16 ones in float32


def check_low_precision(case: Case) -> None:
    """In float32 and bfloat16 the error against float64 is at most twice that of ``reference`` in it."""
    verdict = Verdict(case.id, "low precision")
    for dtype in (torch.float32, torch.bfloat16):
        encoding, host = case.build(dtype), case.host(dtype)
        exact, exact_host = case.build(dtype).double(), case.host(dtype).double()  # the rounded numbers, exactly
        x, memory = (case.random(BATCH, n, case.model_dim, seed=n, dtype=dtype) for n in (QUERIES, KEYS))
        # A random mask may leave a head that looks one way nothing but the other side: noise in any precision.
        asked = [scene for scene in scenes(case, encoding) if scene.name != "mask"]
        for scene in asked if dtype == torch.float32 else asked[:2]:
            truth = gradients(exact, exact_host, x.double(), memory.double(), scene, "reference")
            base = gradients(encoding, host, x, memory, scene, "reference")
            verdict.must(base[0].dtype == dtype, f"the output is {base[0].dtype}, expected {dtype}")
            verdict.must(bool(base[0].isfinite().all()), f"output not finite (reference, {dtype})")
            for backend in able(case, encoding, host, scene.positions, dtype):
                if backend == "reference":
                    continue
                mine = gradients(encoding, host, x, memory, scene, backend)
                size = truth[0].abs().max().item()
                _no_worse(verdict, f"output ({backend}, {scene.name}, {dtype})", mine[0], base[0], truth[0], size)
                size = max(want.abs().max().item() for want in truth[1].values() if want is not None)
                for name, want in truth[1].items():
                    have, reference = mine[1][name], base[1][name]
                    if have is None or reference is None or want is None:
                        continue
                    what = f"gradient of {name} ({backend}, {scene.name}, {dtype})"
                    _no_worse(verdict, what, have, reference, want, size)


def _no_worse(verdict: Verdict, what: str, have: Tensor, reference: Tensor, truth: Tensor, size: float) -> None:
    """The rule of two: error at most twice the reference's, and a few roundings of the largest number there is.

    The floor serves what cancels: a gradient that is 0 in exact arithmetic is the rest of large ones.
    """
    error = (have.double() - truth).abs().max().item()
    base = (reference.double() - truth).abs().max().item()
    allowed = 2 * base + ROUNDINGS[have.dtype] * torch.finfo(have.dtype).eps * size
    verdict.must(error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g} (reference: {base:.3g})")


STEP = 1e-5  # of the central difference: its own error is about STEP^2 beside rounding of about 1e-11


def check_gradcheck(case: Case) -> None:
    """The gradients of ``reference`` are finite differences in float64; `check_backends` holds the others to them.

    One random direction for each parameter and input, whose derivative is measured by a central difference.
    """
    verdict = Verdict(case.id, "gradcheck")
    encoding, host = case.build(), case.host()
    x, memory = (case.random(2, n, case.model_dim, seed=n).requires_grad_() for n in (3, 5))
    leaves = {"x": x, "memory": memory} | dict(encoding.named_parameters())
    weights = case.random(2, case.num_heads, 3, case.head_dim, seed=9)

    def total() -> Tensor:
        return (host(encoding, x, Positions.arange(3, 5), memory, backend="reference") * weights).sum()

    found = torch.autograd.grad(total(), list(leaves.values()), allow_unused=True)
    for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
        if gradient is None:
            verdict.fail(f"{name} has no gradient")
        direction = case.random(*leaf.shape, seed=10)
        with torch.no_grad():
            start, ends = leaf.clone(), []
            for step in (STEP, -STEP):
                leaf.copy_(start + step * direction)
                ends.append(total())
            leaf.copy_(start)
        measured = (ends[0] - ends[1]) / (2 * STEP)
        verdict.close(f"derivative in {name}", (gradient * direction).sum(), measured, 1e-7)
