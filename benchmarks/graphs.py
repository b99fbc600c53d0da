"""What pair encodings tell apart, and what a small graph transformer learns with them: CSL, BREC, MUTAG.

    LOCANT_DATA=~/data python benchmarks/graphs.py --out results/graphs

CSL: ten circulants of 41 nodes, 15 relabellings each, 5 folds. BREC ($LOCANT_DATA/graphs/brec.jsonl.gz): how many of
its 400 pairs color refinement with each encoding separates; nothing is trained. MUTAG: its 10 fixed folds.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import statistics
import sys
import time
from pathlib import Path

import networkx as nx
import numpy as np
import torch
from torch import nn

from locant import graphs
from locant.compare.environment import environment

SKIPS = (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)
ENCODINGS = ("none", "shortest_path", "resistance")


def csl(seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Adjacencies and classes of the 150 graphs, each relabelled at random."""
    rng = np.random.default_rng(seed)
    found, labels = [], []
    for label, skip in enumerate(SKIPS):
        matrix = nx.to_numpy_array(nx.circulant_graph(41, [1, skip]))
        for _ in range(15):
            order = rng.permutation(41)
            found.append(matrix[np.ix_(order, order)])
            labels.append(label)
    return found, labels


def mutag(folder: Path) -> tuple[list[np.ndarray], list[torch.Tensor], list[int], list[list[int]]]:
    """Adjacencies, one-hot atoms, classes, and the test indices of ten folds."""
    lines = iter(gzip.open(folder / "MUTAG.txt.gz", "rt").read().split("\n"))
    found, atoms, labels = [], [], []
    for _ in range(int(next(lines))):
        n, label = map(int, next(lines).split())
        matrix, kinds = np.zeros((n, n)), []
        for u in range(n):
            kind, _, *neighbors = map(int, next(lines).split())
            kinds.append(kind)
            matrix[u, neighbors] = 1
        found.append(np.maximum(matrix, matrix.T))
        atoms.append(torch.tensor(kinds))
        labels.append(label)
    width = int(max(one.max() for one in atoms)) + 1
    names = sorted(set(labels))
    folds = json.load(gzip.open(folder / "MUTAG_folds.json.gz", "rt"))
    folds = list(folds.values()) if isinstance(folds, dict) else folds
    hot = [nn.functional.one_hot(one, width).float() for one in atoms]
    return found, hot, [names.index(label) for label in labels], folds


def learn(
    pairs: list[torch.Tensor] | None,
    features: list[torch.Tensor],
    labels: list[int],
    test: list[int],
    seed: int,
    epochs: int,
) -> float:
    """Accuracy on the test graphs after training on all others."""
    torch.manual_seed(seed)
    count = len(labels)
    sizes = [len(one) for one in features]
    psi, real = graphs.stack_pairs(pairs if pairs is not None else [torch.zeros(n, n, 1) for n in sizes])
    x = torch.zeros(count, max(sizes), features[0].shape[1])
    for row, one in enumerate(features):
        x[row, : len(one)] = one
    y = torch.tensor(labels)
    config = graphs.GraphModelConfig(
        features[0].shape[1], len(set(labels)), 0 if pairs is None else 1, multiply=pairs is not None
    )
    model = graphs.GraphTransformer(config)
    train = torch.tensor(sorted(set(range(count)) - set(test)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    steps = epochs * -(-len(train) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train), generator=generator)].split(32):
            logits = model(x[batch], None if pairs is None else psi[batch], real[batch])
            loss = nn.functional.cross_entropy(logits, y[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        guess = model(x[test], None if pairs is None else psi[test], real[test]).argmax(-1)
    return float((guess == y[test]).float().mean())


def encode(found: list[np.ndarray], name: str) -> list[torch.Tensor] | None:
    return None if name == "none" else [graphs.pair_encoding(one, name) for one in found]


def spread(values: list[float]) -> dict[str, float | list[float]]:
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values), "values": values}


def train_csl(seeds: list[int], epochs: int) -> dict:
    """Mean accuracy over 5 stratified folds, for each seed."""
    out = {}
    for name in ENCODINGS:
        by_seed = []
        for seed in seeds:
            found, labels = csl(seed)
            pairs, features = encode(found, name), [torch.ones(41, 1)] * len(found)
            folds = [[15 * c + 3 * f + k for c in range(10) for k in range(3)] for f in range(5)]
            by_seed.append(statistics.fmean(learn(pairs, features, labels, fold, seed, epochs) for fold in folds))
            print(f"csl {name} seed {seed}: {by_seed[-1]:.3f}", flush=True)
        out[name] = spread(by_seed)
    return out


def train_mutag(folder: Path, seeds: list[int], epochs: int) -> dict:
    """Mean accuracy over 10 fixed folds, for each seed."""
    found, hot, labels, folds = mutag(folder)
    out = {}
    for name in ENCODINGS:
        pairs = encode(found, name)
        by_seed = []
        for seed in seeds:
            by_seed.append(statistics.fmean(learn(pairs, hot, labels, fold, seed, epochs) for fold in folds))
            print(f"mutag {name} seed {seed}: {by_seed[-1]:.3f}", flush=True)
        out[name] = spread(by_seed)
    return out


def separate_brec(folder: Path, names: tuple[str, ...]) -> dict:
    """Pairs that refinement separates, by category and encoding."""
    rows = [json.loads(line) for line in gzip.open(folder / "brec.jsonl.gz", "rt")]
    total = collections.Counter(row["category"] for row in rows)
    found: dict[str, collections.Counter] = {name: collections.Counter() for name in names}
    start = time.perf_counter()
    for index, row in enumerate(rows):
        pair = [nx.from_graph6_bytes(row[side].encode()) for side in ("g1", "g2")]
        for name in names:
            found[name][row["category"]] += graphs.separates(*pair, name)
        if index % 50 == 49:
            print(f"brec {index + 1} pairs, {time.perf_counter() - start:.0f} s", flush=True)
    table = {name: {**{c: counts[c] for c in total}, "all": sum(counts.values())} for name, counts in found.items()}
    return {"pairs": {**total, "all": len(rows)}, "separated": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/graphs"))
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--csl-epochs", type=int, default=40)
    parser.add_argument("--mutag-epochs", type=int, default=30)
    parser.add_argument("--only", choices=("csl", "brec", "mutag"))
    options = parser.parse_args()
    if not os.environ.get("LOCANT_DATA"):
        parser.error(
            "LOCANT_DATA is not set; set it to a folder with graphs/brec.jsonl.gz and graphs/MUTAG.txt.gz in it"
        )
    folder = Path(os.environ["LOCANT_DATA"]) / "graphs"
    seeds = [int(seed) for seed in options.seeds.split(",")]
    runs = {
        "brec": lambda: separate_brec(
            folder, ("adjacency", "shortest_path", "resistance", "diffusion", "pseudoinverse")
        ),
        "csl": lambda: train_csl(seeds, options.csl_epochs),
        "mutag": lambda: train_mutag(folder, seeds, options.mutag_epochs),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/graphs.py " + " ".join(sys.argv[1:])
    for name in [options.only] if options.only else runs:
        start = time.perf_counter()
        body = {"what": name, "result": runs[name](), "seeds": seeds, "seconds": time.perf_counter() - start}
        body |= {"environment": environment(command)}
        (options.out / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
