"""Likhomanenko et al. 2021 (CAPE), continuous augmented positions, NeurIPS 2021, arXiv:2106.03143, section 3.1.

    p_t = delta t (- mean over the real tokens),     p'_t = (p_t + Delta + delta eps_t) lambda  in training
    Delta ~ U(-a, a),  log lambda ~ U(-log c, log c)  for each sequence;     eps_t ~ U(-b, b)  for each token

Note: the paper adds a sinusoid of p' to sqrt(M) times the token: ``"cape+sinusoidal"`` with ``scale_tokens=True``.
Here p' stands before any encoding that reads real positions (rope, alibi, kerple, fire, sandwich, too). Images have two
axes: `cape_2d`. The public code counts one padded token as real (``inclusive_length=True``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from locant.encoding import Paper, Properties
from locant.positions import Positions
from locant.transform import Transform, check_ranges, documents_of, of_queries, rows_of


@dataclass(frozen=True)
class CapeDraws:
    """One draw: Delta and lambda for each sequence [B 1] (each token of packed documents [B J]), eps for each token.

    ``local_shift`` is in the unit of ids times ``delta``: eps delta.
    """

    global_shift: Float[Tensor, "B N"]
    local_shift: Float[Tensor, "B J"]
    scale: Float[Tensor, "B N"]


class Cape(Transform):
    """Ids become real numbers that are shifted, jittered and stretched at random in training.

    Shapes: no parameters.     Acts on: ids, in float32.     Past any length: defined.     Cost: O(B n).
    ``delta``: the step between two integer ids (seconds for sound); real-valued ids are taken as they come.
    ``frequency``: multiplies p' at the end (30 for seconds). Order stays (up to chance 0) for local_shift <= 0.5.
    ``normalize``: the mean of a sequence is its origin, which needs the whole sequence: refused with cached keys.
    ``sync``: two stacks with the same ``seed`` (an encoder and its decoder) draw the same Delta and lambda; ``delta``
    of one of them may be the ratio of their lengths.
    Raises: ValueError for shifts below 0, scaling < 1, delta or frequency <= 0, any of them infinite, sync without a
    seed; as `Transform`.
    """

    name = "cape"
    paper = Paper("2106.03143", "section 3.1", "Likhomanenko et al. 2021")
    properties = Properties(
        shift_invariant=True, symmetric=True, beyond_range="defined", layers="shared", neutral="always", draws=True
    )

    def __init__(
        self,
        global_shift: float = 5.0,
        local_shift: float = 0.5,
        scaling: float = 1.03,
        normalize: bool = False,
        delta: float = 1.0,
        frequency: float = 1.0,
        inclusive_length: bool = False,
        sync: bool = False,
        seed: int | None = None,
    ) -> None:
        super().__init__(seed, own_seed=sync)
        check_ranges("cape", global_shift, local_shift, scaling)
        if not (0 < delta < math.inf and 0 < frequency < math.inf):
            raise ValueError(
                f"cape: delta={delta} and frequency={frequency} leave no order of positions; give finite numbers > 0"
            )
        if inclusive_length and not normalize:
            raise ValueError("cape: inclusive_length=True has no effect with normalize=False; leave it out")
        if sync and seed is None:
            raise ValueError("cape: sync=True needs a seed that both stacks have in common, but seed=None; give seed=1")
        self.global_shift, self.local_shift, self.scaling = global_shift, local_shift, scaling
        self.normalize, self.delta, self.frequency = normalize, delta, frequency
        self.inclusive_length = inclusive_length
        if normalize:
            self.properties = replace(self.properties, cache_safe=False)

    def sample(self, positions: Positions, generator: torch.Generator, own: torch.Generator) -> CapeDraws:
        """Delta, eps delta and lambda."""
        rows, documents = rows_of(positions, self.name), documents_of(positions)
        shape, device = (rows, documents.shape[-1]), documents.device
        shift = uniform(shape, self.global_shift, generator).to(device).gather(-1, documents)
        scale = uniform(shape, math.log(self.scaling), generator).exp().to(device).gather(-1, documents)
        local = uniform((rows, positions.num_keys), self.local_shift * self.delta, own).to(device)
        return CapeDraws(shift, local, scale)

    def fixed(self, positions: Positions) -> CapeDraws | None:
        """No shift and no scale."""
        if not self.normalize and self.delta == self.frequency == 1:
            return None
        zero = torch.zeros(1, 1, device=positions.key.device)
        return CapeDraws(zero, zero, zero + 1)

    def apply(self, positions: Positions, draws: CapeDraws) -> Positions:
        """p'."""
        cached = positions.num_keys - positions.num_queries
        if self.normalize and cached:
            raise ValueError(
                f"cape: normalize=True with {cached} cached keys: the mean moves with every token, and all keys read "
                "before with it; use normalize=False in decoders"
            )
        query, key = (self._real(ids) for ids in (positions.query, positions.key))
        if self.normalize:
            mean = self._mean(key if key.dim() == 2 else key[None], positions)
            query, key = query - of_queries(mean, positions), key - mean
        shift, scale = (of_queries(t.double(), positions) for t in (draws.global_shift, draws.scale))
        query = (query + shift + of_queries(draws.local_shift.double(), positions)) * scale
        key = (key + draws.global_shift.double() + draws.local_shift.double()) * draws.scale.double()
        if positions.query.dim() == positions.key.dim() == 1 and len(key) == 1:
            query, key = query[0], key[0]
        query, key = ((ids * self.frequency).float() for ids in (query, key))
        widest = (positions.span * self.delta + self._jitter()) * self._stretch() * self.frequency
        farthest = (positions.length * self.delta + self.global_shift + self._jitter()) * self._stretch()
        return replace(
            positions,
            query=query,
            key=key,
            span=math.ceil(widest),
            length=math.ceil(farthest * self.frequency),
            contiguous=False,
            shared={},
        )

    def _jitter(self) -> float:
        return 2 * self.local_shift * self.delta if self.training else 0.0

    def _stretch(self) -> float:
        return self.scaling if self.training else 1.0

    def _real(self, ids: Shaped[Tensor, "... N"]) -> Float[Tensor, "... N"]:
        """Ids as float64; integers in steps of delta."""
        return ids.double() if ids.is_floating_point() else ids.double() * self.delta

    def _mean(self, key: Float[Tensor, "B J"], positions: Positions) -> Float[Tensor, "B2 N"]:
        """The mean of the real keys of each key's document."""
        real = torch.ones_like(key, dtype=torch.bool) if positions.key_real is None else positions.key_real
        if self.inclusive_length:
            real = real | torch.cat((real[:, :1], real[:, :-1]), -1)
        documents = positions.key_document
        counted = real.to(key.dtype)
        if documents is None:
            return (key * counted).sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
        together = (documents[..., :, None] == documents[..., None, :]) * counted[..., None, :]
        return (together * key[..., None, :]).sum(-1) / together.sum(-1).clamp(min=1)


def uniform(shape: tuple[int, ...], most: float, generator: torch.Generator) -> Float[Tensor, "..."]:
    """Draws from U(-most, most)."""
    return (2 * torch.rand(shape, generator=generator) - 1) * most
