"""Other implementations beside ours, at the same sizes, in one run: `make bench-peers`.

It runs in an environment of its own, since what is measured was removed from newer versions: transformers 4.56 computes
`relative_key` (Shaw) and `relative_key_query` (Huang Method 4), x-transformers computes T5's bias and ALiBi. Each does
the attention from q, k, v to the output, without projections. The baseline is plain SDPA without positions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertSelfAttention
from x_transformers.attend import Attend
from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

from locant.bench.attention import PASSES, Sizes, Variant
from locant.bench.timing import BASELINE, summarize, take_turns
from locant.compare.environment import environment

# Ours with the same table: transformers 4.56 has one vector for each distance, as `clip = length - 1`.
OURS = {"m4": "m4", "m4 clip 64": "m4 clip 64", "shaw": "shaw", "t5": "t5", "alibi": "alibi"}
Run = Callable[[str], None]


class Peer:
    """A function from nothing to an output, and the tensors a training step differentiates."""

    def __init__(self, forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> None:
        self.forward, self.leaves = forward, leaves
        with torch.no_grad():
            self.dout = torch.randn_like(forward())

    def run(self, name: str) -> None:
        if name == "forward":
            with torch.no_grad():
                self.forward()
        else:
            torch.autograd.grad(self.forward(), self.leaves, self.dout)


def transformers_4(kind: str, sizes: Sizes) -> Peer:
    """BertSelfAttention with its three projections taken out: q, k and v are the hidden states."""
    config = BertConfig(
        hidden_size=sizes.heads * sizes.head_dim,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.length,
        attention_probs_dropout_prob=0.0,
    )
    layer = BertSelfAttention(config, position_embedding_type=kind)
    layer.query, layer.key, layer.value = nn.Identity(), nn.Identity(), nn.Identity()
    x = torch.randn(sizes.batch, sizes.length, config.hidden_size, requires_grad=True)
    return Peer(lambda: layer(x)[0], [x, *layer.parameters()])


def x_transformers(kind: str, sizes: Sizes, flash: bool) -> Peer:
    """A bias module and the attention it is made for; ``flash`` asks for its SDPA path."""
    q, k, v = (torch.randn(sizes.batch, sizes.heads, sizes.length, sizes.head_dim).requires_grad_() for _ in range(3))
    bias: nn.Module = (
        AlibiPositionalBias(heads=sizes.heads, total_heads=sizes.heads)
        if kind == "alibi"
        else RelativePositionBias(scale=1.0, heads=sizes.heads)
    )
    attend = Attend(heads=sizes.heads, flash=flash)
    leaves = [q, k, v, *bias.parameters()]
    return Peer(lambda: attend(q, k, v, attn_bias=bias(sizes.length, sizes.length))[0], leaves)


def variants(sizes: Sizes) -> dict[str, Run]:
    found: dict[str, Run] = {BASELINE: Variant("none", BASELINE, sizes).run}
    for name, case in OURS.items():
        for backend in ("native", "blocked"):
            found[f"locant {name}, {backend}"] = Variant(case, backend, sizes).run
    release = version("transformers")
    found[f"transformers {release} relative_key"] = transformers_4("relative_key", sizes).run
    found[f"transformers {release} relative_key_query"] = transformers_4("relative_key_query", sizes).run
    release = version("x-transformers")
    for kind in ("t5", "alibi"):
        for flash in (False, True):
            name = f"x-transformers {release} {kind}{', flash' if flash else ''}"
            try:
                peer = x_transformers(kind, sizes, flash)
                peer.run("forward_backward")
            except (AssertionError, RuntimeError) as reason:
                print(f"{name}: refuses ({reason})")
                continue
            found[name] = peer.run
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    sizes = Sizes(batch=given.batch, length=given.length, threads=given.threads)
    runs = variants(sizes)
    results = {}
    for name in PASSES:
        turns = take_turns({key: partial(run, name) for key, run in runs.items()}, given.repeats)
        results[name] = {key: asdict(timing) for key, timing in summarize(turns).items()}
    print(f"{'':<48}{'forward':>24}{'forward and backward':>24}")
    for key in runs:
        cells = ["{1:.2f} ({0:.2f} .. {2:.2f})".format(*results[name][key]["ratio"]) for name in PASSES]
        print(f"{key:<48}{cells[0]:>24}{cells[1]:>24}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        made = environment(f"python benchmarks/peers.py --length {given.length} --batch {given.batch}")
        given.json.write_text(json.dumps({"made": made, "sizes": asdict(sizes), "passes": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
