"""Export attached models and compare what leaves with what stayed, in a process without annotation checks.

``python -m tests.exports WAY:HOST:ENCODING...`` with WAY export, onnx or step; sizes that an exporter keeps open are
symbols while it traces, which checks of annotations would take for wrong types.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import locant
from locant.encoding import Layer
from tests.hf_models import HEADS, ROWS, first, host, noisy, stir, tokens

UNSEEN = ((1, 4), (3, 12), (5, ROWS))  # (batch, length); traced are 2 rows of 7


class Plain(nn.Module):
    """A model as exporters want it: tensors in, one tensor out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return first(self.model(input_ids=ids, attention_mask=mask))


def to_export(family: str, name: str) -> dict[str, Any]:
    """What both exporters are called with: a model, a batch with padding on the left, and what may vary."""
    family, kept, _ = family.partition("+kept")
    model = noisy(host(family), name, keep_absolute=bool(kept))
    if family in ("gpt2", "llama"):
        model.config.use_cache = False
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    sizes = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=ROWS)}
    return {"mod": Plain(model).eval(), "args": (ids, mask), "dynamic_shapes": {"ids": sizes, "mask": sizes}}


def compare(run: Callable[[Tensor, Tensor], Tensor], model: nn.Module, tolerance: float) -> None:
    """At lengths and batches that were not traced, with padding on both sides."""
    for batch, length in UNSEEN:
        ids = tokens(batch, length, seed=9)
        mask = torch.ones_like(ids)
        mask[0, :1], mask[-1, -1:] = 0, 0
        far = (run(ids, mask) - model(ids, mask))[mask.bool()].abs().max()
        assert far <= tolerance, (batch, length, far)


def by_export(family: str, name: str) -> None:
    """torch.export; the program needs no operator of ours."""
    call = to_export(family, name)
    program = torch.export.export(**call, strict=False)
    calls = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [call for call in calls if "locant" in call], calls
    compare(program.module(), call["mod"], 1e-5)


@torch.no_grad()
def by_onnx(family: str, name: str) -> None:
    """An ONNX file, run in onnxruntime."""
    import onnxruntime

    call = to_export(family, name)
    shapes = call["dynamic_shapes"]
    program: Any = torch.onnx.export(call["mod"], call["args"], dynamic_shapes=shapes, dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])

    compare(run, call["mod"], 1e-4)


class Step(nn.Module):
    """Attention of the last queries over any number of keys."""

    def __init__(self, encoding: Any) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = self.encoding.prepare(locant.Positions.arange(q.shape[2], k.shape[2]))
        q, k = self.encoding.query_key(q, k, positions)
        out: Any = locant.attention(q, k, v, self.encoding.terms(positions, Layer(q, k)), positions, causal=True)
        return out


@torch.no_grad()
def by_step(_: str, name: str) -> None:
    """One decoding step with 5 keys, run with other numbers of keys: the last row of the whole."""
    torch.manual_seed(0)
    step = Step(stir(locant.load(name, num_heads=HEADS, head_dim=8, model_dim=24, max_length=ROWS, causal=True), 1))
    q, k, v = (torch.randn(2, HEADS, n, 8) for n in (1, 5, 5))
    keys = {2: Dim("keys", min=2, max=ROWS)}
    run = torch.export.export(step, (q, k, v), dynamic_shapes=({}, keys, keys), strict=False).module()
    for length in (3, 5, 11):
        k, v = (torch.randn(2, HEADS, length, 8) for _ in range(2))
        queries = torch.cat((torch.randn(2, HEADS, length - 1, 8), q), 2)
        assert torch.allclose(run(q, k, v), step(queries, k, v)[:, :, -1:], atol=1e-5), (name, length)


WAYS = {"export": by_export, "onnx": by_onnx, "step": by_step}

if __name__ == "__main__":
    for what in sys.argv[1:]:
        way, family, name = what.split(":")
        try:
            WAYS[way](family, name)
        except Exception as error:
            raise AssertionError(f"{what}: {error}") from error
