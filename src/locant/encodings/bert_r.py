"""Ke, He & Liu 2021 (TUPE), their baseline BERT-R: absolute positions and a bucketed bias, arXiv:2006.15595, eq. 5.

x_i = w_i + P[pos_i],     e_ij = q_i . k_j / sqrt(D) + b_h[bucket(j - i)]
"""

from __future__ import annotations

from locant.catalog import load
from locant.encoding import Paper, Sum


class BertR(Sum):
    """Learned absolute positions at the input, and one bias for each head and bucket in every layer: absolute + t5.

    Shapes: tables [max_length, M] and [H, num_buckets], shared by all layers.     Acts on: input embedding; logits.
    Neutral at: tables = 0.     Past max_length: an error.     Cost: O(n M) and O(H max_distance), once.
    Raises: as its parts.
    """

    name = "bert_r"
    paper = Paper("2006.15595", "eq. 5", "Ke et al. 2021")

    def __init__(
        self,
        num_heads: int,
        model_dim: int,
        max_length: int = 512,
        num_buckets: int = 32,
        max_distance: int = 128,
        causal: bool = False,
    ) -> None:
        super().__init__(
            load("absolute", model_dim=model_dim, max_length=max_length),
            load("t5", num_heads=num_heads, num_buckets=num_buckets, max_distance=max_distance, causal=causal),
        )
