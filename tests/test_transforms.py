"""Transforms of position ids: what is drawn, what is kept, and where they stand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import locant
import locant.hf
from locant.encodings.sinusoidal import Sinusoidal
from locant.models import ModelConfig, Transformer
from locant.positions import Positions
from locant.transforms.cape import Cape, CapeDraws
from locant.transforms.cape_2d import Cape2d
from locant.transforms.randomized import Randomized
from locant.transforms.shape import Shape
from tests.hf_models import ROWS, T5_SIZES, attached, first, host, noisy, tokens
from tests.unchecked import build, unchecked


def shape(**options: Any) -> Shape:
    built = locant.load("shape", **{"seed": 5, **options})
    assert isinstance(built, Shape)
    return built


def cape(**options: Any) -> Cape:
    built = locant.load("cape", **{"seed": 5, **options})
    assert isinstance(built, Cape)
    return built


def randomized(**options: Any) -> Randomized:
    built = locant.load("randomized", **{"seed": 5, "max_position": 64, **options})
    assert isinstance(built, Randomized)
    return built


def rows(batch: int, length: int = 7) -> Positions:
    return Positions.arange(length).batched(batch)


def with_parameters_of(model: Any, other: Any) -> Any:
    """``other`` with the parameters of ``model``, which come in the same order."""
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return other


# --- SHAPE ------------------------------------------------------------------------------------------------------------


def test_shape_draws_one_shift_for_each_sequence_uniformly_with_both_ends():
    for inclusive in (True, False):
        moved = shape(max_shift=10, inclusive=inclusive).prepare(rows(20_000))
        shift = moved.query - torch.arange(7)
        assert torch.equal(shift, shift[:, :1].expand_as(shift)) and torch.equal(moved.query, moved.key)
        counts = shift[:, 0].bincount(minlength=11).double()
        values = 10 + inclusive
        assert (counts[:values] - 20_000 / values).abs().max() < 5 * math.sqrt(20_000 / values)
        assert counts[values:].sum() == 0


def test_shape_draws_one_shift_for_each_packed_document():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 0], [3, 3, 3, 3, 3, 8, 8]])
    positions = Positions.packed(documents)
    shift = shape(max_shift=10_000).prepare(positions).key - positions.key
    for row, document in zip(shift, documents, strict=True):
        assert [row[document == d].unique().numel() for d in document.unique()] == [1, 1]
        assert row.unique().numel() == 2


def test_shape_evaluates_without_a_draw():
    positions = Positions.arange(2, 7)
    assert shape().eval().prepare(positions) is positions
    for offset, want in ((3, 3), ("code", 500)):
        moved = shape(eval_offset=offset).eval().prepare(positions)
        assert torch.equal(moved.key, torch.arange(7) + want) and torch.equal(moved.query, moved.key[-2:])
        assert moved.contiguous and moved.length == 7 + want


def test_shape_of_nothing_is_the_encoding_bit_for_bit():
    model, ids = noisy(host("bert"), "absolute").train(), tokens(2, 7)
    other = with_parameters_of(model, locant.hf.attach(host("bert"), "shape+absolute", max_shift=0).train())
    assert torch.equal(first(other(ids)), first(model(ids)))


@pytest.mark.parametrize("name", ["shaw", "t5", "alibi", "none", "kerple", "rope"])
def test_shape_leaves_relative_encodings_as_they_are(name):
    ids = tokens(3, 7)
    model = noisy(host("bert"), name).train()
    other = with_parameters_of(model, locant.hf.attach(host("bert"), f"shape+{name}", max_shift=200).train())
    assert torch.allclose(first(other(ids)), first(model(ids)), atol=1e-5)


def test_a_table_must_hold_the_shift():
    model = locant.hf.attach(host("bert").train(), "shape+absolute", max_shift=40, max_length=ROWS)
    with pytest.raises(ValueError, match=f"absolute: positions reach 47 but the table has {ROWS} rows"):
        model(tokens(2, 7))
    model.eval()(tokens(2, 7))


def test_shape_keeps_the_special_token():
    moved = shape(max_shift=9).prepare(rows(2))
    assert moved.special()[0].tolist() == [[True] + [False] * 6] * 2


# --- CAPE -------------------------------------------------------------------------------------------------------------


def test_cape_draws_from_the_published_ranges():
    transform = cape(global_shift=5.0, local_shift=0.5, scaling=1.1)
    draws = transform.sample(rows(20_000, 1), torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    for values, most in ((draws.global_shift, 5.0), (draws.local_shift, 0.5), (draws.scale.log(), math.log(1.1))):
        assert values.abs().max() <= most and values.abs().max() > 0.99 * most
        assert abs(values.mean()) < 5 * most / math.sqrt(3 * 20_000)
        assert abs(values.std() - most / math.sqrt(3)) < 0.02 * most
    mean = (1.1 - 1 / 1.1) / (2 * math.log(1.1))
    assert abs(draws.scale.mean() - mean) < 0.003
    assert draws.global_shift.shape == draws.scale.shape == (20_000, 1)


def test_cape_keeps_the_order_of_tokens():
    moved = cape(local_shift=0.5).prepare(rows(50, 30))
    assert moved.query.dtype == torch.float32 and (moved.query.diff(dim=-1) > 0).all()
    assert moved.query.abs().max() < moved.length and (moved.query[:, -1] - moved.query[:, 0]).max() <= moved.span


def test_cape_without_jitter_and_scale_keeps_all_differences_and_the_gram_matrix():
    transform = cape(global_shift=60.0, local_shift=0.0, scaling=1.0)
    moved = transform.prepare(rows(3))
    torch.testing.assert_close(
        moved.offsets(), Positions.arange(7).offsets().float().expand(3, -1, -1), atol=1e-4, rtol=0
    )
    waves = locant.load("sinusoidal", model_dim=16)
    assert isinstance(waves, Sinusoidal)
    exact = [waves.waves(ids.double()) for ids in (moved.query, torch.arange(7.0) + moved.query[:, :1].double())]
    grams = [e @ e.transpose(-1, -2) for e in (*exact, waves.waves(torch.arange(7)).expand(3, -1, -1))]
    torch.testing.assert_close(grams[1], grams[2], atol=1e-9, rtol=0)
    torch.testing.assert_close(grams[0], grams[2], atol=1e-3, rtol=0)


def test_cape_of_nothing_is_the_sinusoid():
    x = torch.randn(2, 7, 10)
    plain = locant.load("sinusoidal", model_dim=10)
    for training in (True, False):
        transform = cape(global_shift=0.0, local_shift=0.0, scaling=1.0).train(training)
        assert torch.equal(plain.embed(x, transform.prepare(rows(2))), plain.embed(x, rows(2)))
    assert cape().eval().prepare(rows(2)).query.dtype == torch.long  # nothing drawn: tables and fast paths stay


def test_cape_centers_each_sequence_on_its_real_tokens():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [1] * 6]).bool()
    transform = cape(normalize=True).eval()
    moved = transform.prepare(Positions.from_mask(mask))
    for ids, real in zip(moved.key, mask, strict=True):
        assert abs(float(ids[real].mean())) < 1e-6
    shifted = transform.prepare(Positions.from_mask(mask).shift(13))
    torch.testing.assert_close(shifted.key, moved.key)
    counted = cape(normalize=True, inclusive_length=True).eval().prepare(Positions.arange(6).batched(1))
    torch.testing.assert_close(counted.key[0], torch.arange(6) - 2.5)


def test_cape_counts_one_padded_token_as_the_public_code_does():
    mask = torch.tensor([[1, 1, 1, 0, 0, 0]]).bool()
    ids = torch.arange(6)
    positions = Positions(ids, ids, span=5, length=6, key_real=mask)
    for inclusive, mean in ((False, 1.0), (True, 1.5)):
        moved = cape(normalize=True, inclusive_length=inclusive).eval().prepare(positions)
        torch.testing.assert_close(moved.key.view(-1), (ids - mean).float())


def test_cape_centers_packed_documents_apart():
    moved = cape(normalize=True).eval().prepare(Positions.packed(torch.tensor([[0, 0, 0, 1, 1, 1, 1]])))
    torch.testing.assert_close(moved.key, torch.tensor([[-1.0, 0, 1, -1.5, -0.5, 0.5, 1.5]]))


def test_centering_with_cached_keys_is_refused():
    with pytest.raises(ValueError, match="cape: normalize=True with 4 cached keys: the mean moves"):
        cape(normalize=True).eval().prepare(Positions.arange(1, 5))
    model = locant.hf.attach(host("llama"), "cape+rope", normalize=True)
    model(tokens(2, 5))
    with pytest.raises(ValueError, match="cape: normalize=True with 5 cached keys"):
        model.generate(tokens(2, 5), max_new_tokens=3, do_sample=False)


def test_a_source_and_its_target_share_what_they_should():
    source, target = (cape(sync=True, seed=4, delta=delta) for delta in (1.0, 1.5))
    for _ in range(3):
        found = [t._drawn(rows(5)) for t in (source, target)]
        assert torch.equal(found[0].global_shift, found[1].global_shift)
        assert torch.equal(found[0].scale, found[1].scale)
        assert (found[0].local_shift - found[1].local_shift / 1.5).abs().max() > 0.1
    apart = [t._drawn(rows(5)) for t in (cape(seed=4), cape(seed=6))]
    assert not torch.equal(apart[0].global_shift, apart[1].global_shift)


def test_both_stacks_of_a_model_draw_in_step():
    model = locant.hf.attach(T.T5Model(T.T5Config(**T5_SIZES)).train(), "cape+alibi", sync=True, seed=3)
    seen: list[CapeDraws] = []
    for module in model.modules():
        if isinstance(module, Cape):
            inner = module.apply
            module.apply = lambda p, d, inner=inner: seen.append(d) or inner(p, d)  # pyright: ignore
    model(input_ids=tokens(2, 5), decoder_input_ids=tokens(2, 4))
    assert len(seen) == 2 and torch.equal(seen[0].global_shift, seen[1].global_shift)


@pytest.mark.parametrize("name", ["sinusoidal", "rope", "alibi", "kerple", "fire", "sandwich", "absolute"])
def test_cape_stands_before_what_reads_real_positions(name):
    model = noisy(host("bert"), f"cape+{name}", **({"max_length": 64} if name == "absolute" else {})).train()
    ids = tokens(2, 7)
    draws = [first(model(ids)) for _ in range(2)]
    assert all(out.isfinite().all() for out in draws) and not torch.allclose(*draws, atol=1e-6)
    assert torch.equal(first(model.eval()(ids)), first(model(ids)))


@pytest.mark.parametrize("name", ["shaw", "t5", "tisa", "tupe_r"])
def test_tables_refuse_real_positions_and_say_why(name):
    model = locant.hf.attach(host("bert").train(), f"cape+{name}")
    with pytest.raises((ValueError, RuntimeError, TypeError), match=r"float32|integer|Long|Int"):
        model(tokens(2, 7))


@pytest.mark.parametrize(
    "name, options, reach", [("shape", {"max_shift": 500}, 507), ("randomized", {"max_position": 2048}, 2048)]
)
def test_an_error_past_a_table_tells_who_moved_the_ids(name, options, reach):
    # 7 tokens would fit in 9 rows; to truncate them is no remedy
    stack = locant.stack(f"{name}+absolute", 1, num_heads=1, head_dim=2, model_dim=2, max_length=9, **options)
    said = f"absolute: positions reach {reach} but the table has 9 rows; {name} moved them: .* max_length={reach}$"
    with pytest.raises(ValueError, match=said):
        stack.prepare(Positions.arange(7), batch=2)


# --- CAPE for images --------------------------------------------------------------------------------------------------


def plane(**options: Any) -> Cape2d:
    built = locant.load("cape_2d", **{"model_dim": 8, "height": 3, "width": 4, "seed": 2, **options})
    assert isinstance(built, Cape2d)
    return built


def test_an_image_is_moved_as_a_whole_and_its_patches_by_half_a_step():
    transform = plane(scaling=1.0)
    still = plane().coordinates(rows(1, 12))
    moved = transform.place(rows(400, 12), transform._drawn(rows(400, 12))) - still
    shift = moved.mean(1, keepdim=True)
    assert shift.abs().max() < 0.85 and shift.std() > 0.2  # the mean of 12 jitters is part of it
    local = (moved - shift).abs().amax((0, 1))
    steps = transform.steps(torch.device("cpu"))
    torch.testing.assert_close(steps, torch.tensor([1.0, 2 / 3]))
    assert ((local > 0.3 * steps) & (local < 0.9 * steps)).all()


def test_an_image_is_not_moved_in_evaluation_and_its_prefix_never():
    transform, x = plane(prefix=1), torch.randn(2, 13, 8)
    transform.train()
    out = transform.embed(x, transform.prepare(rows(2, 13)))
    assert torch.equal(out[:, 0], x[:, 0])
    assert not torch.allclose(out, transform.embed(x, transform.prepare(rows(2, 13))))
    transform.eval()
    assert torch.equal(transform.embed(x, rows(2, 13)), transform.embed(x, transform.prepare(rows(2, 13))))


def test_a_vision_model_takes_it():
    config = T.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=30, image_size=12, patch_size=4
    )
    model = locant.hf.attach(T.ViTModel(config).train(), "cape_2d", height=3, width=3, prefix=1)
    image = torch.randn(2, 3, 12, 12)
    outs = [first(model(image)) for _ in range(2)]
    assert not torch.allclose(*outs, atol=1e-5)
    assert torch.equal(first(model.eval()(image)), first(model(image)))


def test_a_text_model_does_not_take_it():
    config = T.BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=30
    )
    with pytest.raises(ValueError, match="cape_2d: its ids number the patches of an image, but a text has tokens"):
        locant.hf.attach(T.BertModel(config), "cape_2d", height=3, width=3)


# --- randomized positions ---------------------------------------------------------------------------------------------


def test_randomized_ids_are_sorted_distinct_and_have_the_expected_mean():
    moved = randomized(max_position=40).prepare(rows(20_000, 6))
    assert (moved.query.diff(dim=-1) > 0).all() and moved.query.min() >= 0 and moved.query.max() < 40
    want = (torch.arange(6) + 1) * 41 / 7 - 1
    assert (moved.query.double().mean(0) - want).abs().max() < 0.3
    assert len(moved.query.unique(dim=0)) > 19_000
    assert moved.length == 40 and moved.span == 39 and not moved.contiguous


def test_all_ids_in_order_are_the_encoding_itself():
    for training in (True, False):
        moved = randomized(max_position=7).train(training).prepare(rows(3))
        assert torch.equal(moved.query, rows(3).query)


def test_one_draw_for_the_batch_where_that_is_asked_for():
    moved = randomized(per="batch").prepare(Positions.arange(7))
    assert moved.query.shape == (7,)
    assert not torch.equal(moved.query, randomized(per="batch", seed=6).prepare(Positions.arange(7)).query)


def test_a_shorter_row_is_a_draw_of_its_own_length():
    """Of T = 2 ids the largest has mean 2 (L + 1) / 3 - 1, which the first two of six have not."""
    mask = torch.zeros(20_000, 6, dtype=torch.bool)
    mask[:, :2] = True
    moved = randomized(max_position=40).prepare(Positions.from_mask(mask))
    assert abs(float(moved.query[:, 1].double().mean()) - (2 * 41 / 3 - 1)) < 0.3
    assert moved.query.max() < 40


def test_evaluation_keeps_to_one_draw_or_to_the_mean():
    transform = randomized().eval()
    assert torch.equal(transform.prepare(rows(2)).query, transform.prepare(rows(2)).query)
    even = randomized(evaluation="even", max_position=29).eval().prepare(Positions.arange(5))
    assert even.query.tolist() == [4, 9, 14, 19, 24]


def test_cached_keys_need_a_fixed_length():
    with pytest.raises(ValueError, match=r"randomized: 4 keys were read before, .* give eval_length="):
        randomized().eval().prepare(Positions.arange(1, 5))
    transform = randomized(eval_length=9).eval()
    full = transform.prepare(Positions.arange(9)).key
    for n in range(1, 10):
        step = transform.prepare(Positions.arange(1, n))
        assert torch.equal(step.key, full[:n]) and torch.equal(step.query, full[n - 1 : n])


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("randomized+alibi", {"max_position": 64, "eval_length": 20}),
        ("cape+sinusoidal", {"delta": 0.5}),
        ("cape+rope", {"frequency": 3.0}),
    ],
)
def test_a_cache_that_the_host_makes_keeps_ids_as_they_came(name, options):
    model, ids = noisy(host("gpt2"), name, **options), tokens(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    for given in ({}, {"attention_mask": mask, "position_ids": places}):
        want = model(ids, use_cache=False, **given).logits
        parts, cache = [], None
        for start, end in ((0, 4), (4, 6), (6, 7), (7, 8)):
            part = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]} if given else {}
            out = model(ids[:, start:end], past_key_values=cache, use_cache=True, **part)
            parts.append(out.logits)
            cache = out.past_key_values
        apart = (torch.cat(parts, 1) - want).abs()[mask.bool() if given else slice(None)]
        assert apart.max() < 1e-4, list(given)


def test_more_tokens_than_ids_are_refused():
    for training in (True, False):
        with pytest.raises(ValueError, match="randomized: positions reach 65 but max_position=64"):
            randomized().train(training).prepare(rows(2, 65))
    with pytest.raises(ValueError, match="randomized: positions reach 10 but eval_length=9"):
        randomized(eval_length=9).eval().prepare(rows(2, 10))
    with pytest.raises(ValueError, match=r"randomized: ids are torch.float32, but drawn ids are looked up by number"):
        randomized().eval().prepare(Positions.from_ids(torch.arange(5.0)))


# --- what all have in common ------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "shape": {"max_shift": 50},
    "cape": {},
    "randomized": {"max_position": 90},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_draws_follow_from_the_seed_and_go_on_after_a_save(name):
    def build() -> Any:
        torch.manual_seed(11)
        return locant.load(name, **OPTIONS[name])

    one, two = build(), build()
    first_draw, second = one.prepare(rows(3)).query, one.prepare(rows(3)).query
    assert not torch.equal(first_draw, second)
    assert torch.equal(two.prepare(rows(3)).query, first_draw)
    resumed = locant.load(name, **OPTIONS[name])
    resumed.load_state_dict(two.state_dict())
    assert torch.equal(resumed.prepare(rows(3)).query, second)
    torch.manual_seed(11)
    state = torch.get_rng_state()
    one.prepare(rows(3))
    assert torch.equal(torch.get_rng_state(), state), "the global generator was touched"


@pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|use_cache).*")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_layers_are_replayed_with_the_same_draw(name, reentrant):
    grads = []
    for switch in (False, True):
        torch.manual_seed(1)
        model = noisy(host("bert"), f"{name}+sinusoidal", seed=8, **OPTIONS[name]).train()
        if switch:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        first(model(tokens(2, 7))).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.allclose(grads[1][n], g, atol=1e-6) for n, g in grads[0].items())


def test_an_entrance_that_is_run_again_in_backward_is_refused():
    model = Transformer(ModelConfig(29, model_dim=24, num_heads=3, num_layers=1, encoding="shape+rope", dropout=0.0))
    out = checkpoint(model, torch.randint(29, (2, 5)), use_reentrant=False)
    assert isinstance(out, Tensor)
    with pytest.raises(RuntimeError, match="shape: the entrance of the model runs again in backward"):
        out.sum().backward()


@pytest.mark.parametrize("name", OPTIONS)
def test_training_with_cached_keys_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: draws in training mode, but 4 keys were read before"):
        locant.load(name, **OPTIONS[name]).prepare(Positions.arange(1, 5))


@pytest.mark.parametrize("name", OPTIONS)
def test_ids_without_a_batch_axis_are_refused_where_each_sequence_draws(name):
    with pytest.raises(ValueError, match=rf"{name}: draws for each sequence, but the ids have shape \(7,\)"):
        locant.load(name, **OPTIONS[name]).prepare(Positions.arange(7))
    with pytest.raises(ValueError, match="positions: ids of 2 sequences came for a batch of 3"):
        rows(2).batched(3)


@pytest.mark.parametrize("name", OPTIONS)
def test_preparing_twice_moves_once(name):
    transform = locant.load(name, **OPTIONS[name])
    once = transform.prepare(rows(2))
    assert transform.prepare(once) is once


@pytest.mark.parametrize("name", ["shape", "cape", "randomized"])
def test_a_transform_alone_is_refused(name):
    with pytest.raises(ValueError, match=f"stack: '{name}' only moves position ids, .*'{name}\\+sinusoidal'"):
        locant.stack(name, 2)
    with pytest.raises(ValueError, match=f"{name}: acts on the position ids, .* leave out share_layers=False"):
        locant.stack(f"{name}+rope", 2, share_layers=False, head_dim=8)
    assert name in locant.names("transforms") and name not in locant.names()
    with pytest.raises(ValueError, match="names: unknown folder 'tables'; choose one of 'encodings', 'transforms'"):
        unchecked(locant.names)("tables")


def test_ids_are_moved_before_anybody_reads_them():
    sizes = dict(num_heads=2, head_dim=8, model_dim=16, max_length=40)
    for name in ("tupe_a+shape", "shape+tupe_a"):
        built = locant.stack(name, 2, **sizes, eval_offset=9).eval()
        moved = built.prepare(Positions.arange(5))
        (table,) = (part for part in built.parts() if part.name == "tupe_a")
        want = table.correlation(Positions.arange(5).shift(9))  # pyright: ignore
        got = moved.recall(table, lambda: None)
        torch.testing.assert_close(got[..., 1:, 1:], want[..., 1:, 1:])


def test_a_saved_model_comes_back_with_its_transform(tmp_path):
    model = noisy(host("bert"), "shape+sinusoidal", max_shift=60, eval_offset="code").train()
    model(tokens(2, 7))
    other = locant.hf.load(host("bert"), locant.hf.save(model, tmp_path / "saved"))
    assert torch.equal(first(other.eval()(tokens(2, 7))), first(model.eval()(tokens(2, 7))))
    assert torch.equal(first(other.train()(tokens(2, 7))), first(model.train()(tokens(2, 7))))


@pytest.mark.parametrize("name", ["shape+fire", "cape+kerple", "randomized+dape"])
def test_a_transform_that_layers_with_tables_of_their_own_share_is_saved_once(name, tmp_path):
    model = noisy(host("gpt2"), name, **({"max_position": 40} if name.startswith("randomized") else {})).train()
    model(tokens(2, 7))
    assert sum("draws_state" in key for key in model.state_dict()) == 1
    model.save_pretrained(tmp_path / "whole")
    others = (
        T.GPT2LMHeadModel.from_pretrained(tmp_path / "whole"),
        locant.hf.load(host("gpt2"), locant.hf.save(model, tmp_path / "added")),
    )
    want = model.eval()(tokens(2, 7), use_cache=False).logits, model.train()(tokens(2, 7)).logits
    for other in others:
        got = other.eval()(tokens(2, 7), use_cache=False).logits, other.train()(tokens(2, 7)).logits
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        transforms = {id(part) for layer in attached(other).stack for part in layer.parts() if part.moves_ids}
        assert len(transforms) == 1


def test_padding_on_either_side_does_not_change_what_is_evaluated():
    short = tokens(1, 4)
    for name, options in (("shape+absolute", {"eval_offset": 5}), ("randomized+rope", {"max_position": 30})):
        model = noisy(host("bert"), name, **options)
        want = first(model(short))
        for left, right in ((3, 0), (0, 3), (1, 2)):
            padded = torch.nn.functional.pad(short, (left, right), value=1)
            mask = torch.nn.functional.pad(torch.ones_like(short), (left, right))
            got = first(model(padded, attention_mask=mask))[:, left : left + 4]
            assert torch.allclose(got, want, atol=1e-5), (name, left)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shape", {"max_shift": -1}, "max_shift=-1 is no number"),
        ("shape", {"eval_offset": -2}, "eval_offset=-2 is no offset"),
        ("shape", {"eval_offset": "paper"}, "eval_offset='paper' is no offset"),
        ("shape", {"eval_offset": 2.5}, "eval_offset=2.5 is no offset"),
        ("cape", {"global_shift": -1.0}, "global_shift=-1.0, local_shift=0.5"),
        ("cape", {"scaling": 0.5}, "scaling=0.5 are no ranges"),
        ("cape", {"global_shift": math.inf}, "global_shift=inf, local_shift=0.5"),
        ("cape", {"scaling": math.inf}, "scaling=inf are no ranges"),
        ("cape", {"delta": 0.0}, "delta=0.0 and frequency=1.0"),
        ("cape", {"delta": math.inf}, "delta=inf and frequency=1.0"),
        ("cape", {"inclusive_length": True}, "inclusive_length=True has no effect with normalize=False"),
        ("cape", {"sync": True}, "sync=True needs a seed"),
        ("cape_2d", {"model_dim": 9}, "model_dim=9 has no pairs"),
        ("cape_2d", {"model_dim": 2}, "model_dim=2 has no pairs"),
        ("cape_2d", {"height": 0, "model_dim": 8}, "0 x 14 patches after 0 tokens"),
        ("cape_2d", {"local_shift": -0.5, "model_dim": 8}, "local_shift=-0.5 and scaling=1.4 are no ranges"),
        ("cape_2d", {"scaling": math.inf, "model_dim": 8}, "scaling=inf are no ranges"),
        ("randomized", {"max_position": 0}, "max_position=0 leaves no ids"),
        ("randomized", {"per": "token"}, "unknown per='token'"),
        ("randomized", {"evaluation": "odd"}, "unknown evaluation='odd'"),
        ("randomized", {"eval_length": 3000}, "eval_length=3000 tokens cannot have different ids"),
    ],
)
def test_what_cannot_be_built_is_refused(name, options, message):
    with pytest.raises(ValueError, match=f"{name}: .*{message}"):
        build(name, **options)
