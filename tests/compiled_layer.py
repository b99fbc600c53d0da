"""`python -m tests.compiled_layer DEVICE BACKEND..`: torch.compile takes a call as one graph, of any length.

A process of its own, without the annotation checker, through which torch.compile cannot trace. For each backend it
prints its name and the number of graphs; the numbers equal those of the call that is not compiled.
"""

from __future__ import annotations

import sys

import torch

import locant
from locant import Positions, attention
from locant.encoding import Layer
from tests.kernel_runs import interpret


def main(device: str, *backends: str) -> None:
    """Forward and backward, at five lengths, with and without dropout."""
    if "triton" in backends and device == "cpu":
        interpret()
    from torch._dynamo.testing import CompileCounter  # it imports triton, which must know by then

    torch.set_default_device(device)
    torch.manual_seed(0)
    encoding = locant.load("huang_m4", num_heads=2, head_dim=8, model_dim=16, max_length=300, clip=9)
    torch.nn.init.normal_(encoding.table)

    for backend in backends:

        def layer(q, k, v, dropout, backend=backend):
            positions = encoding.prepare(Positions.arange(q.shape[2]))
            terms = encoding.terms(positions, Layer(q, k))
            return attention(q, k, v, terms, positions, dropout=dropout, backend=backend)

        def found(function, operands, dropout):
            torch.manual_seed(1)
            out = function(*operands, dropout)
            return [out, *torch.autograd.grad(out.square().sum(), [*operands, encoding.table])]

        torch._dynamo.reset()
        counter = CompileCounter()
        whole = torch.compile(layer, fullgraph=True, backend=counter)
        traced = torch.compile(layer, fullgraph=True, backend="aot_eager")
        heads = [torch.randn(1, 40, 2, 8).transpose(1, 2).requires_grad_() for _ in range(3)]  # as they come in models
        generated = torch.compile(layer, fullgraph=True, backend="inductor")
        for have, want in zip(found(generated, heads, 0.0), found(layer, heads, 0.0), strict=True):
            torch.testing.assert_close(have, want)
        for length in (70, 83, 91, 104):
            operands = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
            for dropout in (0.0, 0.5):
                eager = found(layer, operands, dropout)
                for function in (whole, traced):
                    for have, want in zip(found(function, operands, dropout), eager, strict=True):
                        torch.testing.assert_close(have, want, rtol=0, atol=0)
        print(backend, counter.frame_count, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
