"""A BERT of transformers 4.56 with `relative_key_query` (Huang Method 4), beside the same BERT with locant's attention.

It runs in the environment of `make bench-peers`. transformers 4.56 is older than what `locant.hf` attaches to, so the
attention of each layer is replaced by a module that keeps its three projections and calls `locant.attention`; all else
of the model is the same. The baseline is the absolute model on SDPA. Before anything is timed, ours with the peer's own
table (one vector for each distance) must give the peer's hidden states.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import locant
from locant.bench.attention import CASES
from locant.bench.model import BASELINE, PASSES, Host, ModelSizes, bert
from locant.bench.timing import summarize, take_turns
from locant.compare.environment import environment
from locant.encoding import Layer

PEER = "relative_key_query"  # no absolute table at the input


class Attention(nn.Module):
    """A layer's projections, and `locant.attention` with Method 4 between them and its output."""

    def __init__(self, old: Any, case: str, backend: str, sizes: ModelSizes) -> None:
        super().__init__()
        self.query, self.key, self.value, self.backend = old.query, old.key, old.value, backend
        name, options = CASES[case]
        width = sizes.model_dim // sizes.num_heads
        facts = {"num_heads": sizes.num_heads, "head_dim": width, "model_dim": sizes.model_dim}
        self.encoding: Any = locant.load(name, **facts, max_length=sizes.length, **options)
        self.heads = sizes.num_heads

    def forward(self, hidden: Tensor, **others: Any) -> tuple[Tensor, None]:
        """The output before the last projection; the batch has no padding, so no mask comes."""
        q, k, v = (
            project(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        positions = locant.Positions.arange(hidden.shape[1], device=hidden.device)
        terms = self.encoding.terms(positions, Layer(q, k))
        out = locant.attention(q, k, v, terms, positions, backend=self.backend)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2), None


def swapped(case: str, backend: str, sizes: ModelSizes) -> nn.Module:
    """The peer's model with our attention in every layer."""
    model: Any = bert(sizes, position_embedding_type=PEER, attn_implementation="eager")
    for layer in model.encoder.layer:
        layer.attention.self = Attention(layer.attention.self, case, backend, sizes)
    return model


def check(peer: Any, ours: Any, ids: Tensor) -> float:
    """The largest difference of hidden states, with the peer's table (of query minus key) in our layers.

    Raises: ValueError where it is more than rounding.
    """
    for theirs, mine in zip(peer.encoder.layer, ours.encoder.layer, strict=True):
        table = theirs.attention.self.distance_embedding.weight.detach().flip(0)
        middle, clip = len(table) // 2, mine.attention.self.encoding.table.shape[1] // 2
        mine.attention.self.encoding.table.data.copy_(table[None, middle - clip : middle + clip + 1])
    with torch.no_grad():
        difference = (peer.eval()(ids).last_hidden_state - ours.eval()(ids).last_hidden_state).abs().max().item()
    if not difference < 1e-4:
        raise ValueError(f"peers: hidden states differ by {difference:.2g}; what is timed is not the same model")
    return difference


def hosts(sizes: ModelSizes) -> tuple[dict[str, Host], float]:
    """The baseline, the peer and ours; and by how much ours without a clip differs from the peer."""
    models: dict[str, Callable[[], nn.Module]] = {
        BASELINE: lambda: bert(sizes, attn_implementation="sdpa"),
        f"transformers {version('transformers')} {PEER}": lambda: bert(
            sizes, position_embedding_type=PEER, attn_implementation="eager"
        ),
        "locant m4, native": lambda: swapped("m4", "native", sizes),
        "locant m4 clip 64, native": lambda: swapped("m4 clip 64", "native", sizes),
        "locant m4 clip 64, blocked": lambda: swapped("m4 clip 64", "blocked", sizes),
    }
    found = {name: Host(make(), sizes) for name, make in models.items()}
    _, peer, ours, *_ = found.values()
    return found, check(peer.model, ours.model, peer.ids[:, : sizes.length])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="3 if time is short")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = ModelSizes(given.layers, given.width, given.heads, given.batch, given.length, given.threads)
    found, difference = hosts(sizes)
    print(f"hidden states of ours and of the peer differ by {difference:.1e}")
    results = {}
    for name in PASSES:
        turns = take_turns({key: partial(host.run, name) for key, host in found.items()}, given.repeats)
        results[name] = {key: asdict(timing) for key, timing in summarize(turns, BASELINE).items()}
    print(f"{'':<48}" + "".join(f"{name:>24}{'ms':>9}" for name in PASSES))
    for key in found:
        cells = []
        for name in PASSES:
            low, middle, high = results[name][key]["ratio"]
            cells.append(
                f"{f'{middle:.2f} ({low:.2f} .. {high:.2f})':>24}{results[name][key]['milliseconds'][1]:>9.0f}"
            )
        print(f"{key:<48}{''.join(cells)}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        command = f"python benchmarks/peer_models.py --layers {given.layers} --repeats {given.repeats}"
        made = {"made": environment(command), "sizes": asdict(sizes), "difference": difference, "passes": results}
        given.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
