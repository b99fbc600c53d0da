"""Can absolute position be read off hidden states? Haviv et al. 2022 (NoPos), the probe of its section 4.

Linear(M, 2M) - ReLU - Linear(2M, n), no biases, Xavier-uniform, trained by cross-entropy on the place of each token;
one for each layer, and a linear one beside it. Measured on held-out sequences: mean absolute distance of the most
probable place from the true one. Chance for uniform guesses: (n^2 - 1) / (3n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.analysis.model import Host
from locant.analysis.passes import run
from locant.analysis.plain import check_finite
from locant.analysis.windows import check_windows

RATES = (1e-3, 4e-3)  # learning rates that validation chooses from
STEPS, BATCH = 400, 1024  # updates, tokens in each


@dataclass(frozen=True)
class Reading:
    """What a probe read on held-out sequences: ``distance`` in positions, ``accuracy``, its learning rate.

    ``mean_prediction`` and ``spread`` [n]: mean and standard deviation over sequences of the answer for each place.
    """

    distance: float
    accuracy: float
    rate: float
    mean_prediction: Float[Tensor, "n"]
    spread: Float[Tensor, "n"]


@dataclass(frozen=True)
class Probe:
    """Protocol (f): every number [L+1] by layer, 0 = embeddings; ``chance`` is the distance of uniform guesses."""

    length: int
    train: int
    test: int
    layers: tuple[int, ...]
    chance: float
    distance: Float[Tensor, "L"]
    accuracy: Float[Tensor, "L"]
    linear_distance: Float[Tensor, "L"]
    linear_accuracy: Float[Tensor, "L"]
    mean_prediction: Float[Tensor, "L n"]
    spread: Float[Tensor, "L n"]


def chance_distance(n: int) -> float:
    """Mean distance of independent uniform guesses among n places."""
    return (n * n - 1) / (3 * n)


def read_positions(
    train: Float[Tensor, "N n M"],
    test: Float[Tensor, "T n M"],
    *,
    hidden: bool = True,
    rates: Sequence[float] = RATES,
    steps: int = STEPS,
    seed: int = 0,
) -> Reading:
    """Train a probe on hidden states and read held-out ones; the last quarter of ``train`` chooses the learning rate.

    ``hidden=False``: the linear probe. Raises: ValueError for fewer than 2 sequences on either side, unequal lengths,
    or states that are not finite.
    """
    if len(train) < 2 or len(test) < 2:
        raise ValueError(f"probe: got {len(train)} training and {len(test)} test sequences; give at least 2 of each")
    if train.shape[1:] != test.shape[1:]:
        raise ValueError(
            f"probe: training states are {tuple(train.shape)} but test states {tuple(test.shape)}; give one n"
        )
    check_finite("probe", "the hidden states", train)
    n = train.shape[1]
    held = max(1, len(train) // 4)
    fits = []
    for rate in rates:
        probe = _fit(train[:-held].float(), hidden, rate, steps, seed)
        fits.append((_distance(_answers(probe, train[-held:].float()), n), rate, probe))
    _, rate, probe = min(fits, key=lambda fit: fit[0])
    answers = _answers(probe, test.float())
    return Reading(
        distance=_distance(answers, n),
        accuracy=float((answers == torch.arange(n)).double().mean()),
        rate=rate,
        mean_prediction=answers.double().mean(0),
        spread=answers.double().std(0),
    )


def _fit(states: Tensor, hidden: bool, rate: float, steps: int, seed: int) -> nn.Module:
    count, n, width = states.shape
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        layers = [nn.Linear(width, n, bias=False)]
        if hidden:
            layers = [nn.Linear(width, 2 * width, bias=False), nn.ReLU(), nn.Linear(2 * width, n, bias=False)]
        for layer in layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        probe = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(probe.parameters(), lr=rate)
        flat, place = states.detach().flatten(0, 1), torch.arange(n).repeat(count)
        for _ in range(steps):
            rows = torch.randint(len(flat), (min(BATCH, len(flat)),))
            optimizer.zero_grad()
            F.cross_entropy(probe(flat[rows]), place[rows]).backward()
            optimizer.step()
    return probe


@torch.no_grad()
def _answers(probe: nn.Module, states: Tensor) -> Int[Tensor, "N n"]:
    return torch.stack([probe(one).argmax(-1) for one in states])


def _distance(answers: Tensor, n: int) -> float:
    return float((answers - torch.arange(n)).abs().double().mean())


def _states(host: Host, windows: Int[Tensor, "N n"], layers: Sequence[int]) -> list[Float[Tensor, "N n M"]]:
    """Hidden states of some layers, each window read once."""
    passes = []
    for window in windows:
        hidden = run(host, window[None], hidden=True).hidden
        passes.append([hidden[layer][0] for layer in layers])
    return [torch.stack(layer) for layer in zip(*passes, strict=True)]


def position_probe(
    host: Host,
    train: Int[Tensor, "N n"],
    test: Int[Tensor, "T n"],
    *,
    layers: Sequence[int] | None = None,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """Protocol (f) on a model: token ids that fill their length, without special tokens at fixed places (they leak it).

    Raises: ValueError for fewer than 2 sequences on either side, layers that do not exist, padded windows.
    """
    check_windows("probe", host, train)
    check_windows("probe", host, test)
    if train.shape[1] != test.shape[1]:
        raise ValueError(f"probe: training windows have {train.shape[1]} tokens but test windows {test.shape[1]}")
    chosen = tuple(range(host.num_layers + 1)) if layers is None else tuple(layers)
    if wrong := [layer for layer in chosen if not 0 <= layer <= host.num_layers]:
        raise ValueError(f"probe: layer {wrong[0]} does not exist; this model has 0 (embeddings) to {host.num_layers}")
    deep, flat = [], []
    sides = [_states(host, side, chosen) for side in (train, test)]
    for done in range(len(chosen)):
        states = [side[done] for side in sides]
        deep.append(read_positions(*states, steps=steps, seed=seed))
        flat.append(read_positions(*states, hidden=False, steps=steps, seed=seed))
        if progress is not None:
            progress(done + 1, len(chosen))

    def column(readings: list[Reading], name: str) -> Tensor:
        return torch.tensor([getattr(reading, name) for reading in readings], dtype=torch.float64)

    return Probe(
        length=train.shape[1],
        train=len(train),
        test=len(test),
        layers=chosen,
        chance=chance_distance(train.shape[1]),
        distance=column(deep, "distance"),
        accuracy=column(deep, "accuracy"),
        linear_distance=column(flat, "distance"),
        linear_accuracy=column(flat, "accuracy"),
        mean_prediction=torch.stack([reading.mean_prediction for reading in deep]),
        spread=torch.stack([reading.spread for reading in deep]),
    )
