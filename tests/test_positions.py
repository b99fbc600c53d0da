"""Who sits where: counted, masked, packed and explicit ids."""

from __future__ import annotations

import warnings

import pytest
import torch

from locant import Positions
from tests.unchecked import unchecked


def test_queries_are_the_last_keys():
    positions = Positions.arange(3, 7)
    assert positions.query.tolist() == [4, 5, 6] and positions.key.tolist() == list(range(7))
    assert (positions.span, positions.length, positions.contiguous) == (6, 7, True)
    assert positions.offsets()[0].tolist() == [-4, -3, -2, -1, 0, 1, 2]
    assert (positions.num_queries, positions.num_keys, positions.continuous) == (3, 7, False)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match=r"got 5 queries but only 3 keys; .* num_keys >= 5"):
        Positions.arange(5, 3)


@pytest.mark.parametrize(
    "mask, ids",
    [
        ([1, 1, 1, 0, 0], [0, 1, 2, 2, 2]),
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 2]),
        ([1, 0, 0, 1, 1], [0, 0, 0, 1, 2]),
        ([0, 0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ],
)
def test_ids_count_over_real_tokens(mask, ids):
    positions = Positions.from_mask(torch.tensor([mask], dtype=torch.bool))
    assert positions.key.tolist() == [ids] and positions.query.tolist() == [ids]
    assert not positions.contiguous and positions.length == 5


def test_a_new_token_counts_over_the_cache_of_its_own_row():
    # https://github.com/rasbt/reasoning-from-scratch/issues/33 and https://github.com/unslothai/unsloth/issues/3699
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert Positions.from_mask(mask, num_queries=1).query.tolist() == [[3], [6]]


def test_bad_masks_are_refused():
    with pytest.raises(ValueError, match="got 6 queries but a mask of 4 keys"):
        Positions.from_mask(torch.ones(1, 4, dtype=torch.bool), num_queries=6)
    with pytest.raises(TypeError, match=r"the mask has dtype torch\.float32, True/False is needed"):
        unchecked(Positions.from_mask)(torch.zeros(1, 4))


def test_explicit_ids_are_bounded_by_what_they_hold():
    positions = Positions.from_ids(torch.tensor([[3, 9], [4, 5]]), torch.tensor([2, 5, 11]))
    assert (positions.length, positions.span, positions.contiguous) == (12, 9, False)
    assert positions.offsets().tolist() == [[[-1, 2, 8], [-7, -4, 2]], [[-2, 1, 7], [-3, 0, 6]]]
    assert Positions.from_ids(torch.tensor([3, 9]), length=64).length == 64
    assert Positions.from_ids(torch.zeros(2, 0, dtype=torch.long)).length == 0


def test_real_valued_ids_are_kept_and_bounded():
    positions = Positions.from_ids(torch.tensor([-0.5, 1.25, 7.5]))
    assert positions.continuous and (positions.length, positions.span) == (9, 8)


@pytest.mark.parametrize(
    "ids, error, message",
    [
        (torch.tensor([0, -3]), ValueError, "the smallest id is -3; ids count from 0"),
        (torch.zeros(2, 3, 4, dtype=torch.long), ValueError, r"query ids have shape \(2, 3, 4\)"),
        (torch.tensor([True, False]), TypeError, r"query ids have dtype torch\.bool"),
        (torch.tensor([1j, 2j]), TypeError, r"query ids have dtype torch\.complex64"),
    ],
)
def test_bad_ids_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        Positions.from_ids(ids)


def test_equal_ids_warn_and_raise_when_strict():
    # https://github.com/HKU-MedAI/MGCA/issues/13: token types passed as position ids
    zeros = torch.zeros(2, 5, dtype=torch.long)
    with pytest.warns(UserWarning, match="all 5 ids are equal to 0"):
        Positions.from_ids(zeros)
    with pytest.raises(ValueError, match="all 5 ids are equal to 0"):
        Positions.from_ids(zeros, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Positions.from_ids(zeros[:, :1])


def test_a_bound_that_the_ids_pass_is_refused():
    with pytest.raises(ValueError, match="ids reach 10 but length=5"):
        Positions.from_ids(torch.tensor([0, 1, 9]), length=5)
    with pytest.raises(ValueError, match="the smallest id is -2"):
        Positions.from_ids(torch.tensor([-2, 1]), length=5)
    assert Positions.from_ids(torch.tensor([0, 4]), length=5).length == 5


def test_ids_that_are_no_number_are_refused():
    with pytest.raises(ValueError, match=r"ids reach from 0\.0 to inf"):
        Positions.from_ids(torch.tensor([0.0, float("inf")]))
    with pytest.raises(ValueError, match="nan"):
        Positions.from_ids(torch.tensor([0.0, float("nan"), 2.0]))


def test_packed_ids_restart_with_each_document():
    positions = Positions.packed(torch.tensor([[7, 7, 7, 2, 2, 7], [0, 1, 1, 1, 1, 1]]))
    assert positions.key.tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]
    same = positions.same_document()
    assert same is not None and same[0, 0].tolist() == [True, True, True, False, False, True]
    assert Positions.packed(torch.tensor([3, 3, 1])).key.tolist() == [0, 1, 0]
    assert Positions.arange(3).same_document() is None


def test_a_shift_moves_ids_and_keeps_offsets():
    positions = Positions.arange(2, 3)
    moved = positions.shift(5)
    assert moved.key.tolist() == [5, 6, 7] and moved.length == 8
    assert moved.offsets().equal(positions.offsets())
    rows = positions.shift(torch.tensor([[2], [9]]))
    assert rows.query.tolist() == [[3, 4], [10, 11]] and rows.length == 12
    assert positions.share("owner", 1).shift(1).shared == {}


def test_special_tokens_are_those_of_id_zero_unless_named():
    positions = Positions.packed(torch.tensor([4, 4, 6, 6]))
    assert positions.special()[1].tolist() == [True, False, True, False]
    named = Positions(
        positions.query,
        positions.key,
        3,
        4,
        query_special=torch.zeros(4, dtype=torch.bool),
        key_special=positions.key == 1,
    )
    assert named.special()[0].tolist() == [False] * 4 and named.special()[1].tolist() == [False, True, False, True]


def test_what_is_shared_is_recalled_by_its_owner_only():
    positions = Positions.arange(3).share("a", torch.ones(()))
    assert positions.recall("a", lambda: torch.zeros(())).item() == 1
    assert positions.recall("b", lambda: torch.zeros(())).item() == 0


def test_recalling_a_shared_value_without_its_gradient_is_refused():
    # https://github.com/huggingface/transformers/pull/11353: reentrant checkpointing and the shared bias
    positions = Positions.arange(3).share("t5", (torch.ones(2), torch.ones(2, requires_grad=True)))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"t5: .* use_reentrant=False"):
        positions.recall("t5", lambda: None)
    with torch.no_grad():
        assert positions.share("t5", torch.ones(2)).recall("t5", lambda: None) is not None
