"""Zheng et al. 2022 (DPE), dynamic position encoding for translation, COLING 2022, arXiv:2204.08142.

    x'_t = s_t + c_t,     c_t = p_t + W h_t + b,     h = LN(Enc(s + p)),     p_t = P(t)  the sinusoid
    order loss  L_o = mean over aligned t of |c_t - P(g_t)|^2 / M,     g_t: the place in the target of what t says
    total = lam L + (1 - lam) L_o

Note: the idea is the paper's (a network before the encoder, taught the order of the target beside the translation); its
distance, lam, depth and treatment of words without a partner could not be read, so those are options, with defaults
of our own. Enc are ``layers`` pre-LN layers of the host's heads, without dropout. W and b start at 0: the sinusoid.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from locant.encoding import Encoding, Paper, Properties
from locant.positions import Positions


class _Block(nn.Module):
    """Self-attention and feed-forward, each on normalized input and added to it."""

    def __init__(self, model_dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        width = num_heads * head_dim
        self.num_heads = num_heads
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(model_dim), nn.LayerNorm(model_dim)
        self.project = nn.Linear(model_dim, 3 * width)
        self.out = nn.Linear(width, model_dim)
        self.wide, self.narrow = nn.Linear(model_dim, 4 * model_dim), nn.Linear(4 * model_dim, model_dim)

    def forward(self, x: Float[Tensor, "B I M"], seen: Bool[Tensor, "B 1 I I"] | None) -> Float[Tensor, "B I M"]:
        parts = self.project(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.feed_forward_norm(x))))


class Dpe(Encoding):
    """The source side of a translation model gets positions that move toward the order of the target.

    Shapes: ``layers`` Transformer layers of width M, and W [M M], b [M].     Acts on: input embedding, and a loss.
    Neutral at: nowhere.     Past any length: defined.     Cost: ``layers`` encoder layers, once.
    The network reads all tokens given to it but padding (``Positions.key_real``) and other documents, so it is no
    encoding for decoders, which would read ahead. After a forward in training mode ``aux`` holds c, for
    ``auxiliary_loss``. ``loss``: "mse", "l1" (mean |c - P(g)|) or "cosine" (1 - cos); ``unaligned``: tokens without a
    partner have no loss ("mask"), or take the place of the nearest token that has one ("neighbour").
    Raises: ValueError for layers < 1, lam outside (0, 1], unknown loss or unaligned, or where it serves a decoder.
    """

    name = "dpe"
    paper = Paper("2204.08142", "section 3 (read in part)", "Zheng et al. 2022")
    properties = Properties(
        shift_invariant=False,
        symmetric=True,
        beyond_range="defined",
        layers="shared",
        decoders=False,
        cache_safe=False,
    )

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        head_dim: int,
        layers: int = 2,
        lam: float = 0.5,
        loss: Literal["mse", "l1", "cosine"] = "mse",
        unaligned: Literal["mask", "neighbour"] = "mask",
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"dpe: layers={layers} leaves no network; give 1 or more, or use 'sinusoidal'")
        if not 0 < lam <= 1:
            raise ValueError(f"dpe: lam={lam} is no share of the translation loss; give 0 < lam <= 1")
        if loss not in ("mse", "l1", "cosine"):
            raise ValueError(f"dpe: unknown loss={loss!r}; choose 'mse', 'l1' or 'cosine'")
        if unaligned not in ("mask", "neighbour"):
            raise ValueError(f"dpe: unknown unaligned={unaligned!r}; choose 'mask' or 'neighbour'")
        self.model_dim, self.loss, self.unaligned = model_dim, loss, unaligned
        self.auxiliary_share = 1.0 - lam
        self.blocks = nn.ModuleList(_Block(model_dim, num_heads, head_dim) for _ in range(layers))
        self.norm, self.correct = nn.LayerNorm(model_dim), nn.Linear(model_dim, model_dim)
        nn.init.zeros_(self.correct.weight)
        nn.init.zeros_(self.correct.bias)

    def waves(self, ids: Shaped[Tensor, "... I"]) -> Float[Tensor, "... I M"]:
        """P for any ids, in float64: sines and cosines of 10000^(-2c/M) p in turns."""
        pair = torch.arange(self.model_dim, device=ids.device) // 2
        angle = ids[..., None].double() * 10000.0 ** (-2 * pair.double() / self.model_dim)
        even = torch.arange(self.model_dim, device=ids.device) % 2 == 0
        return torch.where(even, angle.sin(), angle.cos())

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """s + c."""
        waves, seen = self.waves(positions.query).to(self.correct.weight.dtype), _seen(positions)
        hidden = x.to(waves.dtype) + waves
        for block in self.blocks:
            hidden = block(hidden, seen)
        places = waves + self.correct(self.norm(hidden))
        self.aux = places if self.training else None
        return x + places.to(x.dtype)

    def auxiliary_loss(self, aux: Any, targets: Float[Tensor, "B I"]) -> Tensor:
        """L_o of c [B I M]; ``targets``: g, real numbers that count from 0, NaN where a token has no partner."""
        if aux.shape[:2] != targets.shape:
            raise ValueError(
                f"dpe: targets have shape {tuple(targets.shape)} but positions were computed for "
                f"{tuple(aux.shape[:2])}; give one place for each source token, NaN for those without a partner"
            )
        targets = _from_neighbors(targets) if self.unaligned == "neighbour" else targets
        aligned = ~targets.isnan()
        have, want = aux[aligned].float(), self.waves(targets[aligned]).float()
        if self.loss == "cosine":
            each = 1 - F.cosine_similarity(have, want, dim=-1)
        else:
            each = ((have - want).abs() if self.loss == "l1" else (have - want).square()).mean(-1)
        return each.sum() / max(len(each), 1)


def _seen(positions: Positions) -> Bool[Tensor, "B 1 I I"] | None:
    """Which tokens the network may read for each: real ones of its document, and itself; None where that is all."""
    count = positions.num_queries
    real, documents = positions.key_real, positions.query_document
    if real is None and documents is None:
        return None
    seen = torch.ones(1, count, count, dtype=torch.bool, device=positions.query.device)
    if real is not None:
        seen = seen & real[..., None, positions.num_keys - count :]
    if documents is not None:
        seen = seen & (documents[..., :, None] == documents[..., None, :])
    itself = torch.eye(count, dtype=torch.bool, device=seen.device)
    return (seen | itself)[:, None]


def _from_neighbors(targets: Float[Tensor, "B I"]) -> Float[Tensor, "B I"]:
    """NaN replaced by the nearest number of its row, the one before where two are as near; rows of NaN stay."""
    place = torch.arange(targets.shape[-1], device=targets.device)
    apart = (place[:, None] - place).abs().expand(len(targets), -1, -1)
    nearest = apart.masked_fill(targets.isnan()[:, None, :], targets.shape[-1]).argmin(-1)
    return targets.gather(-1, nearest)
