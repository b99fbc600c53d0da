"""Bucket rules give the rows of the public functions in every setting, exact powers among them."""

from __future__ import annotations

import pytest
import torch
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
from transformers.models.t5.modeling_t5 import T5Attention

from locant.terms import LogBucket, SignedLogBucket

OFFSETS = torch.arange(-700, 701)


@pytest.mark.parametrize("num_buckets", [4, 8, 10, 18, 20, 32, 34, 38, 48, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_t5_buckets_are_the_public_ones(num_buckets, causal):
    for max_distance in (27, 32, 81, 100, 128, 160, 164, 196, 256, 288, 1000):
        if max_distance <= num_buckets // (2 if causal else 4):
            continue
        public = T5Attention._relative_position_bucket(
            OFFSETS, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
        )
        assert torch.equal(LogBucket(num_buckets, max_distance, causal).row(OFFSETS), public), max_distance


@pytest.mark.parametrize("size", [4, 6, 8, 10, 14, 18, 20, 30, 64, 256])
def test_deberta_buckets_are_the_public_ones(size):
    for max_distance in (13, 16, 17, 19, 22, 65, 76, 109, 128, 207, 512, 1000):
        if max_distance - 1 <= size // 2:
            continue
        public = make_log_bucket_position(OFFSETS, size, max_distance).long()
        assert torch.equal(SignedLogBucket(size, max_distance).bucket(OFFSETS), public), max_distance
