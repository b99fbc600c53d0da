"""DeBERTa: presets, identities, errors."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Positions
from locant.encoding import Layer
from tests.unchecked import build

SIZES = {"num_heads": 3, "head_dim": 8, "model_dim": 10}


def test_presets_are_those_of_the_two_versions():
    first, second = (locant.load("deberta", **SIZES, max_length=512, version=v) for v in ("v1", "v2"))
    assert first.table.shape == (1024, 10) and first.norm is None and first.key_rule.max_distance is None
    assert second.table.shape == (512, 10) and second.norm.eps == 1e-7 and second.key_rule.max_distance == 512
    assert second.key_projection is None and second.query_projection is None
    assert first.key_projection.bias is None and first.query_projection.bias is not None
    assert first.logit_factor == pytest.approx(3**-0.5)
    assert locant.load("deberta", **SIZES, p2c=False).logit_factor == pytest.approx(2**-0.5)


def test_one_projected_table_for_both_terms_is_method_4():
    deberta = locant.load("deberta", **SIZES, clip=12).double()
    m4 = locant.load("huang_m4", num_heads=3, head_dim=8, clip=12, share_heads=False).double()
    with torch.no_grad():
        deberta.query_projection.weight.copy_(deberta.key_projection.weight)
        rows = deberta.key_projection(deberta.table).unflatten(-1, (3, 8)).transpose(0, 1)  # row i - j + 12
        m4.table[:, 1:].copy_(rows.flip(1))  # row j - i + 12; the row of offset -12 is not asked for
    q, k, v = (torch.randn(2, 3, 9, 8, dtype=torch.float64) for _ in range(3))
    outs = [
        locant.attention(q, k, v, e.terms(Positions.arange(9), Layer(q, k)), logit_factor=deberta.logit_factor)
        for e in (deberta, m4)
    ]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)


def test_the_indices_of_code_and_paper_differ_and_agree_at_offset_zero():
    q, positions = torch.randn(1, 3, 5, 8), Positions.arange(5)
    code, paper = (locant.load("deberta", **SIZES, clip=6, p2c_index=name, c2p=False) for name in ("code", "paper"))
    paper.load_state_dict(code.state_dict())
    (a,), (b,) = (e.terms(positions, Layer(q, q)) for e in (code, paper))
    rows_a, rows_b = a.rule.rows(positions), b.rule.rows(positions)
    assert (
        torch.equal(rows_a.diagonal(), rows_b.diagonal())
        and torch.equal(rows_a, rows_b.T)
        and rows_a[0, 1] != rows_b[0, 1]
    )


def test_the_second_version_needs_the_layers_projections():
    encoding, q = locant.load("deberta", **SIZES, version="v2"), torch.zeros(1, 3, 5, 8)
    with pytest.raises(ValueError, match="the layer gives no project_key, which share_projections=True needs"):
        encoding.terms(Positions.arange(5), Layer(q, q))
    with pytest.raises(ValueError, match="the layer gives no project_query"):
        encoding.terms(Positions.arange(5), Layer(q, q, project_key=torch.nn.Linear(10, 24)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"version": "v3"}, "unknown version='v3'; choose 'v1' or 'v2'"),
        ({"p2c_index": "both"}, "unknown p2c_index='both'"),
        ({"c2p": False, "p2c": False}, "c2p=False and p2c=False leave no position term"),
        ({"clip": 1}, "clip=1 tells no offsets apart; give clip >= 2"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"deberta: {message}"):
        build("deberta", **SIZES, **options)
