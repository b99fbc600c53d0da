"""What encodings of graphs tell apart, and what a small graph transformer learns with them: BREC, CSL, MUTAG, PTC.

    LOCANT_DATA=~/data python benchmarks/graphs.py --out results/graphs

BREC ($LOCANT_DATA/graphs/brec.jsonl.gz): how many of its 400 pairs color refinement separates; nothing is trained.
CSL: ten circulants of 41 nodes, 15 relabellings each, 5 folds. MUTAG, PTC: their 10 fixed folds. One fold is tested,
the next one is for validation, the rest for training. The settings are those of `Settings` for every encoding and data
set: they were chosen on validation folds of CSL, with relabellings of seeds that are not reported.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from torch import nn

from locant import graphs
from locant.compare.environment import environment

SKIPS = (2, 3, 4, 5, 6, 9, 11, 12, 13, 16)
LEARNED = ("none", "random_walk", "shortest_path", "resistance", "diffusion")
STEPS = 16  # of random walks
TU = ("mutag", "ptc")


@dataclass(frozen=True)
class Settings:
    """The same for every encoding: 3 layers of width 16 and 4 heads, 16 kernels spread over the encoding's range."""

    epochs: int = 100
    batch: int = 8
    learning_rate: float = 1e-2  # at its peak, after a tenth of the steps
    weight_decay: float = 0.01
    clip: float = 5.0


@dataclass
class Task:
    """Graphs, the features and class of each, and the test indices of each fold."""

    found: list[np.ndarray]
    features: list[torch.Tensor]
    labels: torch.Tensor
    folds: list[list[int]]


def csl(seed: int) -> Task:
    """The 150 graphs, each relabelled at random; nothing is known of a node."""
    rng = np.random.default_rng(seed)
    found, labels = [], []
    for label, skip in enumerate(SKIPS):
        matrix = nx.to_numpy_array(nx.circulant_graph(41, [1, skip]))
        for _ in range(15):
            order = rng.permutation(41)
            found.append(matrix[np.ix_(order, order)])
            labels.append(label)
    folds = [[15 * c + 3 * f + k for c in range(10) for k in range(3)] for f in range(5)]
    return Task(found, [torch.ones(41, 1)] * len(found), torch.tensor(labels), folds)


def tu(folder: Path, name: str) -> Task:
    """A data set of molecules, with one-hot atoms."""
    lines = iter(gzip.open(folder / f"{name}.txt.gz", "rt").read().split("\n"))
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
    folds = json.load(gzip.open(folder / f"{name}_folds.json.gz", "rt"))
    folds = list(folds.values()) if isinstance(folds, dict) else folds
    hot = [nn.functional.one_hot(one, width).float() for one in atoms]
    return Task(found, hot, torch.tensor([names.index(label) for label in labels]), folds)


def encode(task: Task, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Features of nodes, and of pairs where the encoding has some."""
    if name == "none":
        return task.features, None
    if name == "random_walk":
        walks = [graphs.random_walk(one, STEPS).float() for one in task.found]
        return [torch.cat(both, 1) for both in zip(task.features, walks, strict=True)], None
    return task.features, [graphs.pair_encoding(one, name) for one in task.found]


def build(node_dim: int, out_dim: int, psi: torch.Tensor | None, real: torch.Tensor) -> graphs.GraphTransformer:
    """The model, its kernels spread over the pairs of the training graphs."""
    paired = psi is not None
    model = graphs.GraphTransformer(graphs.GraphModelConfig(node_dim, out_dim, int(paired), multiply=paired))
    if model.bias is not None and psi is not None:
        model.bias.fit(psi, real)
    return model


def learn(task: Task, name: str, fold: int, seed: int, settings: Settings) -> tuple[float, float]:
    """Accuracy on the validation graphs and on the test graphs."""
    features, pairs = encode(task, name)
    sizes = torch.tensor([len(one) for one in features])
    psi, real = graphs.stack_pairs(pairs if pairs is not None else [torch.zeros(n, n, 1) for n in sizes.tolist()])
    x = nn.utils.rnn.pad_sequence(features, batch_first=True)
    y, held = task.labels, (task.folds[(fold + 1) % len(task.folds)], task.folds[fold])
    train = torch.tensor(sorted(set(range(len(y))) - set(held[0]) - set(held[1])))
    seen = x[train][real[train]]
    x = (x - seen.mean(0)) / seen.std(0).clamp(min=1e-6)
    torch.manual_seed(seed)
    model = build(x.shape[-1], int(y.max()) + 1, None if pairs is None else psi[train], real[train])

    def run(rows: torch.Tensor) -> torch.Tensor:
        n = int(sizes[rows].max())
        return model(x[rows, :n], None if pairs is None else psi[rows, :n, :n], real[rows, :n])

    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    steps = settings.epochs * -(-len(train) // settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(settings.epochs):
        for rows in train[torch.randperm(len(train), generator=generator)].split(settings.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(run(rows), y[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        first, second = (float((run(torch.tensor(rows)).argmax(-1) == y[rows]).float().mean()) for rows in held)
    return first, second


def spread(by_seed: list[list[float]]) -> dict:
    """Mean over folds for each seed, the mean and deviation of those, and every fold."""
    means = [statistics.fmean(one) for one in by_seed]
    return {
        "mean": statistics.fmean(means),
        "std_over_seeds": statistics.stdev(means) if len(means) > 1 else None,
        "std_over_folds": statistics.fmean(map(statistics.stdev, by_seed)) if len(by_seed[0]) > 1 else None,
        "seeds": means,
        "folds": by_seed,
    }


def majority(task: Task) -> dict:
    """Accuracy of the most frequent class of all graphs outside a fold."""
    values = []
    for test in task.folds:
        rest = [label for i, label in enumerate(task.labels.tolist()) if i not in set(test)]
        (common, _), *_ = collections.Counter(rest).most_common(1)
        values.append(float((task.labels[test] == common).float().mean()))
    return spread([values])


def train(
    make: Callable[[int], Task], names: Sequence[str], seeds: Sequence[int], settings: Settings
) -> Iterator[dict]:
    """Validation and test accuracy over all folds, for each encoding and seed; what is known after each encoding."""
    out: dict = {"settings": asdict(settings), "majority": {"test": majority(make(seeds[0]))}}
    for name in names:
        found = []
        for seed in seeds:
            task = make(seed)
            found.append([learn(task, name, fold, seed, settings) for fold in range(len(task.folds))])
            print(f"{name} seed {seed}: {[round(test, 2) for _, test in found[-1]]}", flush=True)
        validation, test = ([[pair[side] for pair in one] for one in found] for side in (0, 1))
        out[name] = {"validation": spread(validation), "test": spread(test)}
        yield out


def spe_of_random_weights(graph: np.ndarray) -> torch.Tensor:
    """What a stable encoding with 8 outputs holds: the numbers that it gives with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = graphs.StableEncoding(32, 8).double()
    values, vectors = graphs.spectrum(graph)
    with torch.no_grad():
        return encoding(values, vectors)


YARDSTICKS: dict[str, str | Callable[[Any], torch.Tensor]] = {
    **{name: name for name in ("adjacency", "shortest_path", "resistance", "diffusion", "laplacian", "pseudoinverse")},
    "spe": spe_of_random_weights,
    "random_walk": lambda graph: graphs.symmetric_pairs(graphs.random_walk(graph, STEPS)),
    "heat_kernel": lambda graph: graphs.symmetric_pairs(graphs.heat_kernel(graph, (0.1, 0.5, 1.0, 2.0, 5.0))),
}


def separate_brec(folder: Path) -> Iterator[dict]:
    """Pairs that refinement separates, by category and encoding; and graphs told from a relabelled copy: by mistake."""
    rows = [json.loads(line) for line in gzip.open(folder / "brec.jsonl.gz", "rt")]
    total = collections.Counter(row["category"] for row in rows)
    found: dict[str, collections.Counter] = {name: collections.Counter() for name in YARDSTICKS}
    mistaken = dict.fromkeys(YARDSTICKS, 0)
    start = time.perf_counter()
    for index, row in enumerate(rows):
        first, second = (nx.to_numpy_array(nx.from_graph6_bytes(row[side].encode())) for side in ("g1", "g2"))
        order = np.random.default_rng(index).permutation(len(first))
        for name, encoding in YARDSTICKS.items():
            found[name][row["category"]] += graphs.separates(first, second, encoding)
            mistaken[name] += graphs.separates(first, first[np.ix_(order, order)], encoding)
        if index % 50 == 49:
            print(f"brec {index + 1} pairs, {time.perf_counter() - start:.0f} s", flush=True)
    table = {name: {**{c: counts[c] for c in total}, "all": sum(counts.values())} for name, counts in found.items()}
    yield {"pairs": {**total, "all": len(rows)}, "separated": table, "separated_from_own_copy": mistaken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/graphs"))
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--encodings", default=",".join(LEARNED), help="those that are trained with")
    parser.add_argument("--epochs", type=int, default=Settings.epochs)
    parser.add_argument("--only", choices=("brec", "csl", *TU))
    options = parser.parse_args()
    data = os.environ.get("LOCANT_DATA")
    if not data and options.only != "csl":
        parser.error(
            "LOCANT_DATA is not set; set it to a folder with graphs/brec.jsonl.gz and graphs/MUTAG.txt.gz in it"
        )
    folder = Path(data or "") / "graphs"
    seeds, names = [int(seed) for seed in options.seeds.split(",")], options.encodings.split(",")
    settings = Settings(options.epochs)
    runs = {
        "brec": lambda: separate_brec(folder),
        "csl": lambda: train(csl, names, seeds, settings),
        **{name: lambda name=name: train(lambda _: tu(folder, name.upper()), names, seeds, settings) for name in TU},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/graphs.py " + " ".join(sys.argv[1:])
    for name in [options.only] if options.only else runs:
        start = time.perf_counter()
        for result in runs[name]():
            body = {"what": name, "result": result, "seeds": [] if name == "brec" else seeds}
            body |= {"seconds": time.perf_counter() - start, "environment": environment(command)}
            (options.out / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
