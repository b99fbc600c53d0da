"""Transforms of position ids: what stands before an encoding, ``"shape+absolute"``, and moves the ids that it reads.

A transform draws once for each forward, at the entrance, and hands on `Positions` with other ids; layers replay under
gradient checkpointing with the same ones. The draw and the use are two functions: ``sample`` and ``apply``.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from locant.encoding import Encoding
from locant.positions import Positions


class Transform(Encoding):
    """Base of all transforms: ``prepare`` draws in training mode, and keeps to fixed ids in evaluation mode.

    The generator is a transform's own: what it draws follows from its seeds and the number of draws so far, which are
    saved with the model (``draws_state``), so a resumed run goes on with the draws of the run it resumes. ``seed``:
    None draws it from torch's global generator when the transform is built. ``own_seed``: a second seed is drawn there
    even so, for what transforms of the same seed do not share. In distributed training each rank draws its own.
    """

    draws_state: Tensor  # seed, own seed, number of draws

    def __init__(self, seed: int | None, own_seed: bool = False) -> None:
        super().__init__()
        first, own = torch.randint(2**62, (2,), device="cpu").tolist()
        first = first if seed is None else seed
        own = own if own_seed or seed is None else seed + 1
        self.register_buffer("draws_state", torch.tensor((first, own, 0)))

    def sample(self, positions: Positions, generator: torch.Generator, own: torch.Generator) -> Any:
        """What one forward in training draws; ``own``: see ``own_seed``."""
        raise NotImplementedError

    def fixed(self, positions: Positions) -> Any:
        """What stands in the place of draws in evaluation; None leaves the ids as they are."""
        return None

    def apply(self, positions: Positions, draws: Any) -> Positions:
        """The moved positions; the same for the same draws."""
        raise NotImplementedError

    def prepare(self, positions: Positions) -> Positions:
        """Move the ids, once.

        Raises: ValueError in training for ids without a batch axis or with cached keys; RuntimeError where the entrance
        itself is run again in backward.
        """
        if self in positions.shared:
            return positions
        draws = self._drawn(positions) if self.training else self.fixed(positions)
        if draws is None:
            return positions
        query, key = positions.special()
        moved = self.apply(positions, draws)
        return replace(moved, query_special=query, key_special=key).share(self, True)

    def neutralize(self) -> None:
        """Nothing to do: a transform adds nothing."""

    def _drawn(self, positions: Positions) -> Any:
        cached = positions.num_keys - positions.num_queries
        if cached:
            raise ValueError(
                f"{self.name}: draws in training mode, but {cached} keys were read before and have the ids of another "
                "draw; call model.eval() to decode with a cache"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{self.name}: the entrance of the model runs again in backward and would draw {self.name} anew; "
                "checkpoint the layers (model.gradient_checkpointing_enable()), not the whole model"
            )
        seed, own, count = (int(n) for n in self.draws_state)
        self.draws_state[2] += 1
        shared, alone = _generator(seed, count), _generator(seed, own, count)
        return self.sample(positions, shared, alone)


def _generator(*parts: int) -> torch.Generator:
    """A generator whose stream depends on all parts, and on the rank in distributed training."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    digest = hashlib.blake2b(repr((*parts, rank)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def rows_of(positions: Positions, who: str) -> int:
    """The number of sequences.

    Raises: ValueError for ids without a batch axis, of which it cannot be told how many sequences they serve.
    """
    if positions.query.dim() != 2:
        raise ValueError(
            f"{who}: draws for each sequence, but the ids have shape {tuple(positions.query.shape)}, one row for any "
            "number of them; give [batch, tokens] (Positions.batched), or pass the batch to Stack.prepare"
        )
    return positions.query.shape[0]


def documents_of(positions: Positions) -> Shaped[Tensor, "B 1"] | Shaped[Tensor, "B J"]:
    """For every key the place of the first key of its document; [B 1] zeros where there is one document in each row."""
    documents = positions.key_document
    if documents is None:
        return torch.zeros(positions.key.shape[0], 1, dtype=torch.long, device=positions.key.device)
    documents = documents.expand(positions.key.shape)
    return (documents[:, :, None] == documents[:, None, :]).int().argmax(-1)


def of_queries(values: Shaped[Tensor, "B N"], positions: Positions) -> Shaped[Tensor, "B N2"]:
    """Values of the keys [B J], or of the rows [B 1], as values of the queries, which are the last keys."""
    return values if values.shape[-1] == 1 else values[:, positions.num_keys - positions.num_queries :]


def check_ranges(who: str, global_shift: float, local_shift: float, scaling: float) -> None:
    """Raise a ValueError for ranges that nothing can be drawn from."""
    if not (0 <= global_shift < math.inf and 0 <= local_shift < math.inf and 1 <= scaling < math.inf):
        raise ValueError(
            f"{who}: global_shift={global_shift}, local_shift={local_shift} and scaling={scaling} are no ranges; give "
            "finite numbers, shifts >= 0 and scaling >= 1"
        )
