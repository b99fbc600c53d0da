"""Encodings by name, composed, and stacked over layers; what the base class refuses."""

from __future__ import annotations

import pytest
import torch

import locant
from locant import Encoding, Positions
from locant.attention import attention
from locant.catalog import _accepted, encoding_class, option_names
from locant.encoding import Layer, Sum
from locant.terms import RelativeBias
from tests.unchecked import unchecked

SIZES = dict(num_heads=3, head_dim=8, model_dim=10, max_length=24)
NAMES = """absolute alibi bert_ad bert_r deberta huang_m1 huang_m2 huang_m3 huang_m4 none rope shaw sinusoidal t5 tisa
tupe_a tupe_r xlnet""".split()


def test_names_are_found_by_walking_the_folder():
    assert set(NAMES) <= set(locant.names()) and locant.names() == sorted(locant.names())
    assert all(encoding_class(name).name == name for name in locant.names())


@pytest.mark.parametrize("name", NAMES)
def test_sizes_of_the_host_may_always_be_given(name):
    encoding = locant.load(name, **SIZES, causal=False)
    assert encoding.name == name and encoding.parts() and encoding.paper.equation
    assert set(encoding.sites) <= {"prepare", "embed", "query_key", "terms", "auxiliary_loss"}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in (*locant.names(), "cape+fire", "randomized+alibi")), ("dape", {"kernel": 3})],
)
def test_a_sequence_of_length_zero_gives_nothing(name, options):
    causal = name != "dpe"
    stack = locant.stack(name, 1, **{**SIZES, "model_dim": 24}, causal=causal, **options)
    for positions in (Positions.arange(0), Positions.from_mask(torch.zeros(2, 0, dtype=torch.bool))):
        placed, x = stack.prepare(positions, 2), torch.zeros(2, 0, 24)
        x = stack.embed(x, placed)
        q, k = stack[0].query_key(torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0, 8), placed)
        out = attention(q, k, k, stack[0].terms(placed, Layer(q, k, x)), placed, causal=causal)
        assert isinstance(out, torch.Tensor) and out.shape == (2, 3, 0, 8)


def test_without_keys_the_last_id_is_0():
    fire = locant.load("fire", num_heads=3, causal=False)
    (term,) = fire.terms(Positions.arange(0), Layer(torch.zeros(1, 3, 0, 8), torch.zeros(1, 3, 0, 8)))
    assert Positions.arange(0).last().tolist() == [[0]] and term


def test_sites_are_the_overridden_hooks():
    sites = {name: locant.load(name, **SIZES).sites for name in NAMES}
    assert sites["none"] == () and sites["absolute"] == ("embed",) and sites["rope"] == ("query_key",)
    assert sites["xlnet"] == ("query_key", "terms") and sites["tupe_r"] == ("prepare", "terms")
    assert sites["bert_r"] == ("prepare", "embed", "terms")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("hunag_m4", {}, "unknown encoding 'hunag_m4'; did you mean 'huang_m4'"),
        ("zzzz", {}, "unknown encoding 'zzzz'; choose one of absolute, alibi"),
        ("shaw", SIZES | {"clop": 4}, "shaw: unknown option 'clop'=4; did you mean 'clip'"),
        ("none", {"strength": 3}, "none: unknown option 'strength'=3; it takes none"),
        ("shaw", {"num_heads": 3}, "shaw: needs head_dim=..., which was not given"),
        ("shaw", {"num_heads": None, "head_dim": 8}, "shaw: needs num_heads=..., which was not given"),
        ("rope+alibi", SIZES | {"clip": 3}, "rope\\+alibi: no part takes the option 'clip'=3"),
    ],
)
def test_wrong_names_and_options_are_refused_with_the_near_ones(name, options, message):
    with pytest.raises(ValueError, match=message):
        locant.load(name, **options)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("huang_m4", {"share_heads": "no"}, "huang_m4: option share_heads='no' is a str; give bool"),
        ("shaw", {"clip": 2.5}, r"shaw: option clip=2\.5 is a float; give int"),
        ("shaw", {"clip": True}, "shaw: option clip=True is a bool; give int"),
        ("rope+t5", {"num_buckets": "8"}, "t5: option num_buckets='8' is a str; give int"),
        ("rope", {"base": "big"}, "rope: option base='big' is a str; give float"),
        ("shaw", {"num_heads": 2.0}, r"shaw: option num_heads=2\.0 is a float; give int"),
        (3, {}, r"load: the name is a int \(3\)"),
    ],
)
def test_options_of_another_type_are_refused(name, options, message):
    with pytest.raises(TypeError, match=message):
        unchecked(locant.load)(name, **SIZES | options)


def test_options_of_a_fitting_type_are_taken():
    assert _accepted("rope", {**SIZES, "base": 500})["base"] == 500  # an int is a number
    assert locant.load("xlnet", **SIZES, clamp=None).clamp is None and locant.load("xlnet", **SIZES, clamp=4).clamp == 4


def test_names_in_capitals_are_near():
    with pytest.raises(ValueError, match="unknown encoding 'TISA'; did you mean 'tisa'"):
        locant.load("TISA", **SIZES)


def test_options_of_a_name_leave_out_sizes():
    assert option_names("shaw")[:2] == ["clip", "share_heads"] and "num_heads" not in option_names("shaw")


def test_sums_join_hooks_terms_and_claims():
    both = locant.load("tupe_a", **SIZES) + locant.load("huang_m4", **SIZES, clip=4) + locant.load("absolute", **SIZES)
    assert isinstance(both, Sum) and both.name == "tupe_a+huang_m4+absolute" and len(both.parts()) == 3
    assert both.sites == ("prepare", "embed", "terms")
    assert both.logit_factor == pytest.approx(0.5**0.5) and both.max_length == 24
    claims = both.properties
    assert (claims.shift_invariant, claims.symmetric, claims.beyond_range, claims.layers) == (
        False,
        False,
        "raise",
        "separate",
    )
    assert claims.neutral == "query_projection = 0 and table = 0 and table = 0" and claims.content
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8)
    assert len(both.terms(both.prepare(Positions.arange(5)), Layer(q, k))) == 3
    nested = both + (locant.load("rope", head_dim=8) + locant.load("none"))
    assert len(nested.parts()) == 5 and nested.properties.neutral is None


def test_a_sum_with_a_part_without_neutral_value_changes_nothing():
    both = locant.load("huang_m4", **SIZES, clip=4) + locant.load("rope", head_dim=8)
    before = both.parts()[0].table.clone()
    with pytest.raises(ValueError, match=r"huang_m4\+rope: has no neutral parameter value"):
        both.neutralize()
    assert torch.equal(both.parts()[0].table, before)


def test_encodings_that_hold_no_neutral_value_say_so():
    for name in ("rope", "sinusoidal", "alibi"):
        with pytest.raises(ValueError, match=f"{name}: has no neutral parameter value"):
            locant.load(name, **SIZES).neutralize()


def test_the_base_class_does_nothing():
    base, x = Encoding(), torch.randn(1, 5, 10)
    positions = Positions.arange(5)
    assert base.prepare(positions) is positions and base.embed(x, positions) is x
    assert base.auxiliary_loss(None, None) is None and base.sites == ()


# --- stacks ---


def test_sharing_over_layers_is_identity():
    separate, shared = locant.stack("shaw", 4, **SIZES), locant.stack("tupe_a", 4, **SIZES)
    assert len({id(layer) for layer in separate}) == 4 and len({id(layer) for layer in shared}) == 1
    assert (len(separate), separate.name, shared.max_length, len(shared.parts())) == (4, "shaw", 24, 1)
    assert len({id(layer) for layer in locant.stack("shaw", 4, share_layers=True, **SIZES)}) == 1
    assert len({id(layer) for layer in locant.stack("tupe_a", 4, share_layers=False, **SIZES)}) == 4
    assert separate[2] is separate.layers[2]


def test_a_sum_shares_part_by_part():
    layers = locant.stack("absolute+shaw", 3, **SIZES)
    assert len({id(layer.parts()[0]) for layer in layers}) == 1 and len({id(layer.parts()[1]) for layer in layers}) == 3
    bert_r = locant.stack("bert_r", 3, **SIZES)
    assert len(bert_r.parts()) == 2


def test_layers_may_differ():
    layers = locant.stack(["none", "shaw", "none", "tisa"], 4, clip=5, kernels=2, **SIZES)
    assert [layer.name for layer in layers] == ["none", "shaw", "none", "tisa"] and layers.name == "none, shaw, tisa"
    assert layers[0] is layers[2] and len(layers[3].amplitude) == 2
    built = locant.stack(lambda: locant.load("shaw", **SIZES), 2)
    assert built[0] is not built[1]
    one = locant.load("shaw", **SIZES)
    assert list(locant.stack(one, 2)) == [one, one]


def test_deberta_layers_read_one_table():
    layers = locant.stack("deberta", 3, **SIZES)
    assert layers[0].table is layers[2].table and layers[0].key_projection is not layers[2].key_projection


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: locant.stack("none", 0), "got num_layers=0"),
        (lambda: locant.Stack([]), "got 0 layers"),
        (lambda: locant.stack(["none", "none"], 3), "got 2 encodings for 3 layers"),
        (
            lambda: locant.stack(locant.load("none"), 2, share_layers=False),
            "none: share_layers=False needs a fresh object",
        ),
        (lambda: locant.stack("absolute", 2, share_layers=False, **SIZES), "absolute: acts on the input embedding"),
        (
            lambda: locant.stack(["none", "shaw"], 2, kernels=3, **SIZES),
            r"\['none', 'shaw'\] takes the option 'kernels'=3",
        ),
        (lambda: locant.stack(locant.load("none"), 2, clip=4), "stack: clip=4 was given beside an encoding"),
        (lambda: locant.stack(lambda: locant.load("none"), 2, clip=4), "stack: clip=4 was given beside an encoding"),
    ],
)
def test_wrong_stacks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_length_past_the_table_is_refused_at_the_entrance():
    # https://github.com/huggingface/transformers/issues/125: one error with the limit, the length and two remedies
    layers = locant.stack("absolute", 2, **SIZES)
    layers.prepare(Positions.arange(24))
    with pytest.raises(
        ValueError, match=r"positions reach 25 but the table has 24 rows; truncate to 24 tokens, or .*=25"
    ):
        layers.prepare(Positions.arange(25))


def test_the_length_is_checked_on_shapes_not_on_padding():
    # https://github.com/huggingface/transformers/issues/9116: the same error for a full and for a padded row
    layers, mask = locant.stack("absolute", 2, **SIZES), torch.ones(1, 30, dtype=torch.bool)
    for padded in (mask, mask.clone().index_fill(1, torch.arange(10, 30), False)):
        with pytest.raises(ValueError, match="positions reach 30"):
            layers.prepare(Positions.from_mask(padded))


def test_every_encoding_works_a_token_and_far_beyond_its_clip():
    # https://github.com/huggingface/transformers/issues/17026: length 10 + 1 and 500 with a radius of 9
    for name in ("shaw", "huang_m1", "huang_m2", "huang_m4", "deberta"):
        encoding = locant.load(name, num_heads=3, head_dim=8, model_dim=10, clip=9)
        for length in (11, 500):
            q = torch.randn(1, 3, length, 8)
            positions = Positions.arange(length)
            out = locant.attention(q, q, q, encoding.terms(positions, Layer(q, q)), positions)
            assert out.shape == (1, 3, length, 8) and out.isfinite().all()


def pairs(encoding: Encoding, positions: Positions) -> torch.Tensor:
    """The bias [1 H I J] of an encoding that is one relative bias."""
    nothing = torch.zeros(1, 1, 1, 1)
    (term,) = encoding.terms(encoding.prepare(positions), Layer(nothing, nothing))
    assert isinstance(term, RelativeBias)
    return term.pairs(positions)


def test_a_decoding_step_exports_one_row_of_bias():
    # https://github.com/huggingface/transformers/issues/10645: 1 query over 5 keys has a bias [H 1 5], the last row
    t5 = locant.load("t5", num_heads=3)
    full, step = pairs(t5, Positions.arange(5)), pairs(t5, Positions.arange(1, 5))
    assert step.shape == (1, 3, 1, 5) and torch.equal(step, full[:, :, -1:])


def test_queries_after_memory_keys_sit_behind_them():
    # https://github.com/lucidrains/x-transformers/pull/103: 4 memory keys, 3 queries, query i at 4 + i
    t5 = locant.load("t5", num_heads=3)
    assert torch.equal(pairs(t5, Positions.arange(3, 7)), pairs(t5, Positions.arange(7))[:, :, 4:])


def test_what_t5_layers_share_grows_with_its_distance_and_not_with_the_length():
    t5 = locant.load("t5", num_heads=3, num_buckets=8, max_distance=20)
    for length in (7, 500):
        positions = Positions.arange(length)
        assert t5.prepare(positions).recall(t5, lambda: None).shape == (3, 41)
        assert torch.equal(pairs(t5, positions), RelativeBias(t5.table, t5.rule).pairs(positions))
