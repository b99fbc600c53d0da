"""Backend `flex` equals `reference` in output and every gradient, run step by step on the CPU; else it says why not."""

from __future__ import annotations

import pytest
import torch

from locant import Positions, explain
from locant.backends import flex
from locant.backends.call import Call
from locant.terms import (
    Clip,
    LogitMap,
    LowRankBias,
    Operands,
    RelativeBias,
    RelativeGate,
    RelativeQuery,
    RelativeValue,
    Untied,
    WeightScale,
)
from tests.scripts import process

N, WIDTH = 7, 16


def test_it_equals_reference_in_output_and_every_gradient():
    lines = process("tests.kernel_runs", "flex", "cpu", "default").splitlines()
    assert lines[-2:] == ["deterministic: refused, refused", "14 runs, 0 differ"]


@pytest.mark.slow
def test_it_equals_reference_in_every_run():
    assert process("tests.kernel_runs", "flex", "cpu", "slow").endswith(" runs, 0 differ\n")


@pytest.mark.slow
def test_one_graph_serves_every_length_of_a_family():
    """Of six families: terms or none, causal or not, above one tile and within one."""
    lines = process("tests.flex_families", "cpu").splitlines()
    assert lines[-1] == "21 calls, 6 families, no compile twice"


def call(*terms: object, positions: Positions | None = None, q: torch.Tensor | None = None, **changes) -> Call:
    q = torch.randn(2, 3, N, WIDTH) if q is None else q
    settings = {"allowed": None, "plain_causal": False, "dropout": 0.0, "return_weights": False, **changes}
    scale = settings.pop("scale", 0.5)
    return Call(Operands(q, q, q, positions or Positions.arange(N), scale), terms, **settings)


def test_without_a_gpu_it_is_refused_with_the_reason():
    q = torch.randn(1, 2, 5, WIDTH)
    assert "tensors are on cpu (where FlexAttention has no backward)" in explain(q, q, q).refused["flex"]


def test_what_it_cannot_serve_is_refused_with_the_reason():
    rule, vectors = Clip(4), torch.randn(1, 9, WIDTH)
    query = RelativeQuery(vectors, rule)
    assert flex.terms_refused(call(query)) is None
    assert flex.terms_refused(call(query, positions=Positions.packed(torch.zeros(2, N, dtype=torch.long)))) is None
    refused = {
        "RelativeGate: a score function sees the product": call(RelativeGate(vectors, rule)),
        "RelativeValue: a score function changes logits": call(RelativeValue(vectors, rule)),
        "WeightScale: a score function changes logits": call(WeightScale(torch.ones(3, N, N))),
        "LogitMap: a score function sees one pair": call(LogitMap(lambda content, bias, positions, allowed: content)),
        "LowRankBias: its factors": call(LowRankBias(torch.ones(1, 3, N, 2), torch.ones(1, 3, N, 2))),
        "a rule that reads only the offset": call(RelativeBias(torch.randn(3, 11), Untied(rule, 9, 10))),
        "integer ids": call(query, positions=Positions.from_ids(torch.rand(N) * 5)),
        "not in torch.float64": call(q=torch.randn(2, 3, N, WIDTH, dtype=torch.float64)),
        "heads are 8 and 8 wide": call(q=torch.randn(2, 3, N, 8)),
        "nothing to compute": call(q=torch.randn(0, 3, N, WIDTH)),
        "must be one number": call(scale=torch.ones(N)),
        "dropout falls on the weights": call(dropout=0.1),
        "does not return weights": call(return_weights=True),
    }
    for why, one in refused.items():
        assert why in (flex.terms_refused(one) or ""), why


def test_deterministic_algorithms_refuse_tables_alone():
    torch.use_deterministic_algorithms(True)
    try:
        assert "added atomically" in (flex.terms_refused(call(RelativeBias(torch.randn(3, 9), Clip(4)))) or "")
        assert flex.terms_refused(call()) is None
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("queries", "keys"), [(128, 128), (130, 300), (257, 383)])
def test_the_mask_tells_tiles_seen_in_full_in_part_and_not_at_all(queries: int, keys: int):
    allowed = torch.ones(2, 1, queries, keys, dtype=torch.bool).tril(keys - queries)
    allowed[1, :, :, :140] = False
    q, k = torch.randn(2, 3, queries, WIDTH), torch.randn(2, 3, keys, WIDTH)
    mask = flex.block_mask(
        Call(Operands(q, k, k, Positions.arange(queries, keys), 1.0), (), allowed, False, 0.0, False)
    )
    for b in range(2):
        for row in range(-(-queries // 128)):
            tiles = {
                "full": (mask.full_kv_num_blocks, mask.full_kv_indices),
                "some": (mask.kv_num_blocks, mask.kv_indices),
            }
            found = {
                what: set(columns[b, 0, row, : number[b, 0, row]].tolist()) for what, (number, columns) in tiles.items()
            }
            for column in range(-(-keys // 128)):
                tile = allowed[b, 0, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                whole = tile.numel() == 128 * 128 and bool(tile.all())
                assert (column in found["full"]) == whole
                assert (column in found["some"]) == (bool(tile.any()) and not whole)
