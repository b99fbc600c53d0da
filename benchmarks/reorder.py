"""Does an encoder taught the order of the target translate better, where the order is known? A made-up language.

    python benchmarks/reorder.py --out results/reorder

100 words, each with one translation; sentences of 5 to 12 words. The target says them in another order: reversed, in
swapped pairs, or with the verb (the second word) last. Models of 2 + 2 layers and width 64; test sentences of trained
length, and of 13 to 18 words, which are longer than any trained one. `shuffled` is the negative control: DPE taught
places that a random permutation of each sentence gives.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU
from tqdm import tqdm

from locant.compare.environment import environment
from locant.training.hosts import ModelSize
from locant.training.mlm import EncodingChoice, TrainSettings
from locant.training.trainer import train
from locant.training.translation import TranslationCollate, Translations, build_marian, make_objective, translate

PAD, END, FIRST, WORDS = 0, 1, 2, 100
SIZE = ModelSize(num_layers=2, model_dim=64, num_heads=4, dropout=0.0, init_std=0.1)
ORDERS: dict[str, Callable[[int], list[int]]] = {
    "reversed": lambda n: list(range(n))[::-1],
    "swapped": lambda n: [k ^ 1 if k ^ 1 < n else k for k in range(n)],
    "verb last": lambda n: [0, *range(2, n), 1],
}
MODELS = ("sinusoidal", "dpe", "shuffled")


def sentences(order: str, count: int, shortest: int, longest: int, seed: int) -> Translations:
    """Pairs with the place of each source word in the target."""
    draw = random.Random(seed)
    sources, targets, places = [], [], []
    for _ in range(count):
        n = draw.randint(shortest, longest)
        words = [draw.randrange(WORDS) for _ in range(n)]
        said = ORDERS[order](n)
        sources.append(tuple(FIRST + word for word in words))
        targets.append(tuple(FIRST + WORDS + words[at] for at in said))
        places.append(tuple(float(said.index(at)) for at in range(n)))
    return Translations(tuple(sources), tuple(targets), tuple(places))


def shuffled(pairs: Translations, seed: int) -> Translations:
    """The same pairs with the places of each sentence permuted."""
    draw = random.Random(seed)
    assert pairs.places is not None
    return Translations(pairs.sources, pairs.targets, tuple(tuple(draw.sample(one, len(one))) for one in pairs.places))


@torch.no_grad()
def misplaced(model: Any, pairs: Translations) -> float | None:
    """Mean distance of the place whose sinusoid is nearest to c from the word's place in the target; None without c."""
    encoding = model.model.encoder.locant.stack[0]
    if not encoding.auxiliary_share:
        return None
    collate, total, count = TranslationCollate(pairs, PAD, END), 0.0, 0
    rows = encoding.waves(torch.arange(40))
    model.eval()
    for start in range(0, len(pairs), 64):
        batch = collate([{"example_id": k} for k in range(start, min(start + 64, len(pairs)))])
        encoding.train()  # keeps c; there is no dropout in it
        model.model.encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        encoding.eval()
        nearest = torch.cdist(encoding.aux.double(), rows).argmin(-1)
        gap = (nearest - batch["order_targets"]).abs()
        total, count = total + float(gap.nansum()), count + int((~gap.isnan()).sum())
    return total / count


def bleu(model: Any, pairs: Translations) -> float:
    """BLEU of greedy translations, words as they are."""
    longest = max(map(len, pairs.targets)) + 5
    written = translate(model, pairs.sources, longest, PAD, END, 1, 128)
    text = [[" ".join(f"w{word}" for word in one) for one in side] for side in (written, pairs.targets)]
    return BLEU(tokenize="none", force=True).corpus_score(text[0], [text[1]]).score


def run(order: str, kind: str, seed: int, steps: int, count: int) -> dict[str, Any]:
    """One model from one seed."""
    learned = sentences(order, count, 5, 12, seed=1)
    tests = {"trained": sentences(order, 300, 5, 12, seed=2), "longer": sentences(order, 300, 13, 18, seed=3)}
    choice = EncodingChoice("sinusoidal" if kind == "sinusoidal" else "dpe", label=kind)
    built = build_marian(SIZE, FIRST + 2 * WORDS, 32, choice, seed, PAD, END)
    pairs = shuffled(learned, seed) if kind == "shuffled" else learned
    settings = TrainSettings(steps=steps, batch_size=64, learning_rate=2e-3, warmup_fraction=0.1, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        objective, collate = make_objective(built.model), TranslationCollate(pairs, PAD, END)
        curve = train(objective, pairs, collate, built, settings, seed, work_dir=Path(folder))
    scores = {
        name: {"bleu": bleu(built.model, test), "misplaced": misplaced(built.model, test)}
        for name, test in tests.items()
    }
    return {"order": order, "model": kind, "seed": seed, "last_loss": curve[-1].loss, **scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/reorder"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--orders", nargs="+", choices=list(ORDERS), default=list(ORDERS))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pairs", type=int, default=20_000)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "reorder.json"
    command = " ".join(["python", "benchmarks/reorder.py", *sys.argv[1:]])
    done: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.is_file() else []
    grid = [(order, kind, seed) for order in given.orders for seed in given.seeds for kind in MODELS]
    for order, kind, seed in tqdm(grid, desc="training"):
        if any((one["order"], one["model"], one["seed"]) == (order, kind, seed) for one in done):
            continue
        done.append({**run(order, kind, seed, given.steps, given.pairs), "steps": given.steps, "pairs": given.pairs})
        body = {"made": environment(command), "bleu": "sacrebleu 2.6.0, tokenize none", "runs": done}
        path.write_text(json.dumps(body, indent=1) + "\n")
        print(json.dumps(done[-1]))


if __name__ == "__main__":
    main()
