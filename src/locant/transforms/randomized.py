"""Ruoss et al. 2023, randomized positional encodings, ACL 2023 (short papers), arXiv:2305.16843, section 3.

    pos'_t = I_t,     I = sort of T ids drawn without replacement from {0, .., L-1}

Note: the code draws once for a whole batch, in evaluation too (``per="batch"``); here each sequence has its own draw in
training. Evaluation keeps to one fixed draw, or (``evaluation="even"``) to its mean, round((t+1)(L+1)/(T+1) - 1). Ids
are moved, so relative encodings see the distance of two drawn ids; the code draws distances for those.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from locant.encoding import Paper, Properties
from locant.positions import Positions
from locant.transform import Transform, rows_of


class Randomized(Transform):
    """Ids are replaced by random ones from a longer range, in their order, so that long inputs meet no new id.

    Shapes: no parameters.     Acts on: ids; their order stays.     Past L: refuses.     Cost: a sort of L for each row.
    T is the number of real tokens of a sequence (of its longest document). In evaluation the ids of T tokens are not
    those of T + 1, so cached keys are refused unless ``eval_length`` fixes T.
    Raises: ValueError if L < 1, for an unknown per or evaluation, more than L tokens, cached keys; as `Transform`.
    """

    name = "randomized"
    paper = Paper("2305.16843", "section 3", "Ruoss et al. 2023")
    properties = Properties(
        shift_invariant=False,
        symmetric=True,
        beyond_range="raise",
        layers="shared",
        neutral="always",
        cache_safe=False,
        draws=True,
    )

    def __init__(
        self,
        max_position: int = 2048,
        per: Literal["sequence", "batch"] = "sequence",
        evaluation: Literal["random", "even"] = "random",
        eval_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed)
        if max_position < 1:
            raise ValueError(f"randomized: max_position={max_position} leaves no ids; give 1 or more")
        if per not in ("sequence", "batch"):
            raise ValueError(f"randomized: unknown per={per!r}; choose 'sequence' or 'batch'")
        if evaluation not in ("random", "even"):
            raise ValueError(f"randomized: unknown evaluation={evaluation!r}; choose 'random' or 'even'")
        if eval_length is not None and not 0 < eval_length <= max_position:
            raise ValueError(
                f"randomized: eval_length={eval_length} tokens cannot have different ids below "
                f"max_position={max_position}; give 1 to {max_position}"
            )
        self.max_length = max_position if eval_length is None else eval_length
        self.max_position, self.per, self.evaluation, self.eval_length = max_position, per, evaluation, eval_length
        if eval_length is not None:
            self.properties = replace(self.properties, cache_safe=True)
        order = torch.randperm(max_position, generator=torch.Generator().manual_seed(seed or 0), device="cpu")
        self.register_buffer("order", torch.empty(max_position, dtype=torch.long).copy_(order))

    def sample(self, positions: Positions, generator: torch.Generator, own: torch.Generator) -> Int[Tensor, "B T"]:
        """I for each sequence, or [1 T] for the batch; rows of fewer than T tokens end in L."""
        self._check_integers(positions)
        rows = rows_of(positions, self.name) if self.per == "sequence" else 1
        order = torch.rand(rows, self.max_position, generator=generator).argsort(-1).to(positions.key.device)
        return self._sorted(order, self._count(positions, rows), self._room(positions))

    def fixed(self, positions: Positions) -> Int[Tensor, "B T"]:
        """I of evaluation: of T tokens, or of ``eval_length``."""
        self._check_integers(positions)
        cached = positions.num_keys - positions.num_queries
        if cached and self.eval_length is None:
            raise ValueError(
                f"randomized: {cached} keys were read before, and the ids of {positions.num_keys} tokens are not those "
                "that they had; give eval_length= (the longest text to be generated), which fixes the ids"
            )
        if self.eval_length is None:
            count, room = self._count(positions, None), self._room(positions)
        else:
            count, room = positions.key.new_full((1, 1), self.eval_length), self._room(positions, self.eval_length)
        if self.evaluation == "random":
            return self._sorted(self.order[None], count, room)  # pyright: ignore[reportIndexIssue]
        mean = (torch.arange(1, room + 1, device=count.device) * (self.max_position + 1.0)).double() / (count + 1) - 1
        return mean.round().long().clamp(max=self.max_position - 1)

    def apply(self, positions: Positions, draws: Int[Tensor, "B T"]) -> Positions:
        """I of every id."""
        query, key = (self._picked(draws, ids) for ids in (positions.query, positions.key))
        span = max(self.max_position - 1, 0)
        return replace(
            positions, query=query, key=key, span=span, length=self.max_position, contiguous=False, shared={}
        )

    def check_length(self, positions: Positions) -> None:
        """Nothing: the ids are checked before they are moved."""

    def _check_integers(self, positions: Positions) -> None:
        if positions.continuous:
            raise ValueError(
                f"randomized: ids are {positions.key.dtype}, but drawn ids are looked up by number; give integer ids"
            )

    def _picked(self, draws: Tensor, ids: Tensor) -> Tensor:
        if ids.dim() == 1 and len(draws) == 1:
            return draws[0].clamp(max=self.max_position - 1)[ids]
        ids = ids.expand(len(draws), -1) if ids.dim() == 1 else ids
        return draws.expand(len(ids), -1).gather(-1, ids).clamp(max=self.max_position - 1)

    def _room(self, positions: Positions, most: int | None = None) -> int:
        """The bound of T, checked."""
        most = self.max_position if most is None else most
        if positions.length > most:
            what = "eval_length" if most != self.max_position else "max_position"
            raise ValueError(
                f"randomized: positions reach {positions.length} but {what}={most}; truncate to {most} tokens, or "
                f"build it with {what}={positions.length}"
            )
        return most if most != self.max_position else positions.length

    def _count(self, positions: Positions, rows: int | None) -> Int[Tensor, "B 1"]:
        """T of each row (of all, for one row): the largest id of a real token, and one."""
        key, real = positions.key, positions.key_real
        key = key if real is None else torch.where(real, key, 0)
        count = (key.amax(-1, keepdim=True) + 1) if positions.num_keys else key.new_zeros(*key.shape[:-1], 1)
        count = count[None] if count.dim() == 1 else count
        return count.amax(0, keepdim=True) if rows == 1 else count

    def _sorted(self, order: Int[Tensor, "B L"], count: Int[Tensor, "B2 1"], room: int) -> Int[Tensor, "B3 T"]:
        """The first T of a random order, sorted; L beyond T."""
        first = order[:, :room]
        beyond = torch.arange(room, device=order.device) >= count
        return first.masked_fill(beyond, self.max_position).sort(-1).values
