"""docs/reports.md names a test that exists for every report; here are those that had no better place."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers as T

import locant
import locant.hf
from locant.backends import BACKENDS
from locant.encoding import Layer
from locant.terms import PairBias
from tests.hf_models import BERT_SIZES, HEADS, ROWS, attached, first, host, noisy, tokens

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "reports.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| (.*) \|$", re.MULTILINE)
NUMBERS = [
    1, 2, 3, 5, 6, 10, 11, 12, 13, 16, 18, 19, 20, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33, 36, 37, 39, 41, 42, 44, 46,
    47, 49, 50, 51, 53, 54, 55, 56, 58, 60, 61, 62, 63, 66, 67, 68, 70, 71, 73, 75, 76, 78, 79, 80, 83, 85, 87, 88, 89,
]  # fmt: skip


def missing(page: str) -> list[str]:
    """Tests that a page names and that nobody wrote, and rows that name none."""
    found = []
    for number, _, _, kept in ROW.findall(page):
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", kept)
        found += [] if named else [f"{number} names no test"]
        for file, name in named:
            path = TESTS / file
            source = path.read_text(encoding="utf-8") if path.is_file() else ""
            tree = ast.parse(source)
            if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
                found.append(f"{number} names {file}::{name}")
    return found


def test_every_report_has_a_row_with_a_test_that_exists() -> None:
    rows = ROW.findall(PAGE)
    assert [int(number) for number, *_ in rows] == NUMBERS
    assert missing(PAGE) == []
    links = [link for _, link, *_ in rows if "https://" in link]
    assert len(links) == len(set(links)) == len(rows) - 1, "only one was measured here"


def test_a_test_that_nobody_wrote_is_noticed() -> None:
    assert missing("| 7 | x | y | `test_reports.py::test_of_nothing` |") == ["7 names test_reports.py::test_of_nothing"]
    assert missing("| 7 | x | y | `test_never.py::test_of_nothing` |") == ["7 names test_never.py::test_of_nothing"]
    assert missing("| 7 | x | y | soon |") == ["7 names no test"]


def test_distances_past_the_radius_share_a_row_at_any_length() -> None:
    model = noisy(host("bert"), "shaw", clip=9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (11, 500):
            assert first(model(tokens(1, length))).isfinite().all()
    shaw = attached(model).layers()[0]
    with torch.no_grad():
        near, far = (locant.Positions.from_ids(torch.tensor([0, gap])) for gap in (9, 400))
        q, k, v = (torch.randn(1, HEADS, 2, 8) for _ in range(3))
        out = [locant.attention(q, k, v, shaw.terms(p, Layer(q, k)), p) for p in (near, far)]
    assert torch.equal(out[0], out[1])


def test_a_table_that_is_switched_off_is_gone() -> None:
    for family, table in (("bert", "position_embeddings"), ("gpt2", "wpe"), ("t5", "relative_attention_bias")):
        model = host(family)
        assert any(table in name for name, _ in model.named_parameters())
        locant.hf.attach(model, "shaw")
        assert not [name for name, _ in model.named_parameters() if table in name], family
        assert not [name for name in model.state_dict() if table in name], family


def test_padding_does_not_decide_whether_a_batch_is_too_long() -> None:
    def roberta() -> T.RobertaModel:
        torch.manual_seed(0)
        return T.RobertaModel(T.RobertaConfig(**{**BERT_SIZES, "pad_token_id": 3})).eval()

    usable = ROWS - 4
    for model in (locant.hf.guard(roberta()), locant.hf.attach(roberta(), "absolute")):
        full, padded = tokens(2, usable + 1), tokens(2, usable + 1)
        padded[1, -3:] = 3
        for ids in (full, padded):
            with pytest.raises(ValueError, match=f"{usable}.*{usable + 1}|{usable + 1}.*{usable}"):
                model(ids, attention_mask=(ids != 3).long())
        assert first(model(full[:, :-1])).isfinite().all()


def test_positions_follow_the_mask_and_not_the_padding_id() -> None:
    model, ids = noisy(host("roberta"), "absolute"), tokens(1, 7)
    ids[0, 3] = 1  # the padding id, in the middle of a text
    mask = torch.ones_like(ids)
    want = first(model(ids, attention_mask=mask, position_ids=torch.arange(7)[None]))
    assert torch.allclose(first(model(ids, attention_mask=mask)), want, atol=1e-6)
    assert torch.allclose(first(model(ids)), want, atol=1e-6)


def test_training_on_the_cpu_never_asks_flexattention(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: object, **kwargs: object) -> None:
        raise AssertionError("FlexAttention was asked")

    monkeypatch.setattr(torch.nn.attention.flex_attention, "flex_attention", called)
    for name in ("shaw", "t5"):
        model = noisy(host("bert"), name).train()
        first(model(tokens(2, 7))).square().mean().backward()
        assert all(p.grad is not None for p in attached(model).parameters())


ODD = locant.explain(*torch.randn(3, 2, HEADS, 43, 8), (PairBias(torch.randn(2, HEADS, 43, 43)),)).refused
SERVING = [name for name in BACKENDS if name != "reference" and name not in ODD]  # triton wants a GPU


def test_the_backends_of_a_cpu_serve_a_length_of_43() -> None:
    assert {"sdpa", "blocked"} <= set(SERVING)


@pytest.mark.parametrize("backend", SERVING)
def test_a_length_of_43_is_as_good_as_any(backend: str) -> None:
    torch.manual_seed(0)
    q, k, v, bias = (torch.randn(2, HEADS, 43, width, requires_grad=True) for width in (8, 8, 8, 43))
    results = []
    for name in (backend, "reference"):
        out = locant.attention(q, k, v, (PairBias(bias),), backend=name)
        assert isinstance(out, torch.Tensor)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))))
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results, strict=True))
