"""Checks of an encoding as a module: saved, moved, copied, compiled; what layers share is computed once."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from locant.catalog import stack
from locant.encoding import Stack
from locant.positions import Positions
from locant.testing.case import BATCH, KEYS, Case, Host, redraw
from locant.testing.verdict import Verdict

LAYERS = 3


def _tokens(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    return case.random(BATCH, KEYS, case.model_dim, seed=8, dtype=dtype)


def check_state_dict(case: Case) -> None:
    """Saved and loaded into a fresh object, also one built on the meta device, an encoding gives the same output."""
    verdict = Verdict(case.id, "state dict")
    encoding, host, positions = case.build(), case.host(), Positions.arange(KEYS)
    want = host(encoding, _tokens(case), positions)
    file = io.BytesIO()
    torch.save(encoding.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = case.make().double().eval()
    fresh.load_state_dict(state)
    verdict.close("output after loading", host(fresh, _tokens(case), positions), want, 0.0)
    with torch.device("meta"):
        empty = case.make().eval()
    on_meta = [name for name, w in empty.named_parameters() if not w.is_meta]
    verdict.must(not on_meta, f"built under torch.device('meta'), these are elsewhere: {', '.join(on_meta)}")
    empty = empty.to_empty(device="cpu").double()
    empty.load_state_dict(state)
    verdict.close("output after meta, to_empty and loading", host(empty, _tokens(case), positions), want, 0.0)


def check_dtype(case: Case) -> None:
    """The output has the dtype of its input, moved with it or kept in float32, and stays near the wide output."""
    verdict = Verdict(case.id, "dtype")
    encoding, host, positions = case.build(torch.float32), case.host(torch.float32), Positions.arange(KEYS)
    wide = host(encoding, _tokens(case, torch.float32), positions)
    q, k, v = case.operands(KEYS, KEYS, torch.float32)
    kept_wide = host.attend(encoding, q, k, v, _tokens(case, torch.float32), encoding.prepare(positions))
    for dtype in (torch.bfloat16, torch.float16):
        moved = case.host(dtype)(copy.deepcopy(encoding).to(dtype), _tokens(case, dtype), positions)
        x, prepared = _tokens(case, dtype), encoding.prepare(positions)
        kept = host.attend(encoding, q.to(dtype), k.to(dtype), v.to(dtype), x, prepared)
        embedded = encoding.embed(x, positions)
        verdict.must(embedded.dtype == dtype, f"parameters kept in float32: embedding is {embedded.dtype}, not {dtype}")
        for what, out, want in (("moved", moved, wide), ("kept in float32", kept, kept_wide)):
            verdict.must(out.dtype == dtype, f"parameters {what}: output is {out.dtype}, expected {dtype}")
            verdict.close(f"output, parameters {what}, {dtype}", out, want, 0.3)
    back = copy.deepcopy(encoding).to(torch.float16).to(torch.float32)
    out = host(back, _tokens(case, torch.float32), positions)
    verdict.must(out.dtype == torch.float32, f"moved to float16 and back: output is {out.dtype}")


def check_copies(case: Case) -> None:
    """A deep copy gives the same output and shares nothing; nothing is remembered between lengths or devices."""
    verdict = Verdict(case.id, "copies")
    encoding, host = case.build(), case.host()
    x = _tokens(case)
    want = host(encoding, x, Positions.arange(KEYS))
    short = host(encoding, x[:, :5], Positions.arange(5))
    twin = copy.deepcopy(encoding)
    verdict.close("output of a deep copy", host(twin, x, Positions.arange(KEYS)), want, 0.0)
    redraw(twin, 99)
    if any(w.numel() for w in twin.parameters()):
        verdict.far("a copy with other parameters gives the same output", host(twin, x, Positions.arange(KEYS)), want)
    verdict.close("output after its copy was changed", host(encoding, x, Positions.arange(KEYS)), want, 0.0)
    verdict.close("a shorter run after longer ones", host(encoding, x[:, :5], Positions.arange(5)), short, 0.0)
    trained = host(encoding.train(), x, Positions.arange(KEYS).batched(BATCH))
    verdict.close("output in eval mode", host(encoding.eval(), x, Positions.arange(KEYS)), want, 0.0)
    verdict.must(trained.shape == want.shape, "the output has another shape in train mode")


def check_dropout(case: Case) -> None:
    """Dropout falls on the weights, once: all dropped leaves nothing, and a seed repeats its output."""
    verdict = Verdict(case.id, "dropout")
    encoding, host, x, positions = case.build(), case.host(), _tokens(case), Positions.arange(KEYS)
    out = host(encoding, x, positions, dropout=1.0)
    verdict.close("output with all weights dropped", out, torch.zeros_like(out), 0.0)
    runs = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            runs.append(host(encoding, x, positions, dropout=0.5))
    verdict.close("output of the same seed", runs[1], runs[0], 0.0)
    verdict.far("two seeds drop the same weights", runs[2], runs[0])


class _Touched(TorchFunctionMode):
    """Counts the calls that read one of the given parameters."""

    def __init__(self, encoding: Stack) -> None:
        super().__init__()
        self.parameters, self.count = {id(w) for w in encoding.parameters()}, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += any(id(a) in self.parameters for a in (*args, *kwargs.values()))
        return func(*args, **kwargs)


def _run(layers: Stack, host: Host, x: Tensor, positions: Positions, **how: Any) -> Tensor:
    """The summed outputs of all layers at given (prepared or unprepared) positions."""
    outs = [host.layer(layer, x, x, positions, **how) for layer in layers]
    return torch.stack(outs).sum(0)


def check_shared_once(case: Case) -> None:
    """What layers share is computed once, at the entrance, and its gradient is the sum over the layers."""
    verdict = Verdict(case.id, "shared once")
    layers, host, positions = stack(case.make, LAYERS).double().eval(), case.host(), Positions.arange(KEYS)
    redraw(layers, 1, None)
    x = _tokens(case)
    prepared = layers.prepare(positions)
    with _Touched(layers) as touched:
        _run(layers, host, x, prepared)
    if all("prepare" in part.sites for part in layers.parts() if "embed" not in part.sites):
        verdict.must(touched.count == 0, f"the layers read parameters {touched.count} times after prepare()")
    parameters = list(layers.parameters())
    if not parameters or layers[0].sites == ("embed",):
        return
    once = torch.autograd.grad(_run(layers, host, x, prepared).square().sum(), parameters, allow_unused=True)
    each = torch.autograd.grad(_run(layers, host, x, positions).square().sum(), parameters, allow_unused=True)
    for (name, _), have, want in zip(layers.named_parameters(), once, each, strict=True):
        verdict.must((have is None) == (want is None), f"{name}: a gradient only with, or only without, prepare()")
        if have is not None and want is not None:
            verdict.close(f"gradient of {name}, shared against computed in each layer", have, want, 1e-11)


def check_checkpointing(case: Case) -> None:
    """Non-reentrant checkpointing gives equal gradients; reentrant refuses shared values that need gradients."""
    verdict = Verdict(case.id, "checkpointing")
    layers, host, positions = stack(case.make, LAYERS).double().eval(), case.host(), Positions.arange(KEYS)
    redraw(layers, 1, None)
    x = _tokens(case).requires_grad_()
    wanted = [*layers.parameters(), *host.parameters(), x]

    def gradient(mode: str) -> tuple[Tensor | None, ...]:
        prepared = layers.prepare(positions)
        total = torch.zeros((), dtype=torch.float64)
        for layer in layers:
            if mode == "none":
                out = host.layer(layer, x, x, prepared)
            else:
                out = checkpoint(host.layer, layer, x, x, prepared, use_reentrant=mode == "reentrant")
            total = total + out.square().sum()  # pyright: ignore[reportOptionalMemberAccess]
        for leaf in wanted:
            leaf.grad = None
        total.backward()
        return tuple(leaf.grad for leaf in wanted)

    want, have = gradient("none"), gradient("non-reentrant")
    _same(verdict, "non-reentrant", have, want)
    shared = [t for value in layers.prepare(positions).shared.values() for t in _tensors(value)]
    if not any(t.requires_grad for t in shared):
        _same(verdict, "reentrant", gradient("reentrant"), want)
        return
    try:
        gradient("reentrant")
    except RuntimeError as error:
        verdict.must("use_reentrant=False" in str(error), f"the refusal names no remedy: {error}")
    else:
        verdict.fail("shares values with gradients, but reentrant checkpointing was accepted and would lose them")


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in (value if isinstance(value, tuple) else (value,)) if isinstance(t, Tensor))


def _same(verdict: Verdict, mode: str, have: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
    for n, (mine, expected) in enumerate(zip(have, want, strict=True)):
        verdict.must((mine is None) == (expected is None), f"{mode}: gradient {n} is missing on one side")
        if mine is not None and expected is not None:
            verdict.close(f"{mode}: gradient {n}", mine, expected, 1e-12)


def check_compile(case: Case) -> None:
    """`torch.compile` takes the whole layer as one graph, forward and backward, and gives the same numbers."""
    verdict = Verdict(case.id, "compile")
    encoding, host, x = case.build(), case.host(), _tokens(case).requires_grad_()
    want = host(encoding, x, Positions.arange(KEYS))
    (slope,) = torch.autograd.grad(want.square().sum(), x)
    torch._dynamo.reset()

    def layer(x: Tensor) -> Tensor:
        return host(encoding, x, Positions.arange(KEYS))

    have = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    verdict.close("compiled output", have, want, 1e-11)
    verdict.close("compiled gradient", torch.autograd.grad(have.square().sum(), x)[0], slope, 1e-11)
