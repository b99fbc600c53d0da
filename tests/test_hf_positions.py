"""Positions in attached models: padding on either side, packed documents, caches, generation, explicit ids."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers as T
from transformers.cache_utils import DynamicCache, StaticCache

import locant
import locant.hf
from locant.hf import entrance
from tests.hf_models import HOSTS, LLAMA_SIZES, ROWS, attached, first, host, noisy, stir, tokens
from tests.names import DECODERS, home

CAUSAL = ["gpt2", "llama"]


def padded(ids: torch.Tensor, left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = ids.shape[0]
    mask = torch.ones_like(ids)
    ids = torch.cat((torch.full((batch, left), 2), ids, torch.full((batch, right), 2)), 1)
    zeros = torch.zeros(batch, 1, dtype=torch.long)
    return ids, torch.cat((zeros.expand(-1, left), mask, zeros.expand(-1, right)), 1)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("name", ["absolute", "shaw", "tupe_r", "rope", "huang_m3"])
def test_padding_on_either_side_changes_no_real_token(family: str, name: str) -> None:
    model, ids = noisy(host(family), name), tokens(2, 7)
    want = first(model(ids))
    for left, right in ((3, 0), (0, 3), (2, 1)):
        more, mask = padded(ids, left, right)
        got = first(model(more, attention_mask=mask))[:, left : left + 7]
        assert close(got, want), (left, right)
        loose = first(model(more))[:, left : left + 7]
        assert (left == 0 and family in CAUSAL) or not close(loose, want, 1e-3), "padding had no effect"


@pytest.mark.parametrize("name", locant.names())
def test_left_padding_for_every_encoding(name: str) -> None:
    for family in (home(name), "llama") if name in DECODERS else (home(name),):
        model = noisy(host(family), name)
        short, long = tokens(1, 3, seed=1), tokens(1, 7, seed=2)
        batch = torch.cat((padded(short, 4, 0)[0], long))
        mask = torch.cat((padded(short, 4, 0)[1], torch.ones_like(long)))
        out = first(model(batch, attention_mask=mask))
        assert close(out[:1, 4:], first(model(short))) and close(out[1:], first(model(long))), family


@torch.no_grad()
@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("name", ["absolute", "shaw", "tupe_r", "none"])
@pytest.mark.parametrize("by", ["document_ids", "position_ids"])
def test_packed_documents_equal_their_own_runs(family: str, name: str, by: str) -> None:
    model = noisy(host(family), name)
    parts = [tokens(2, n, seed=n) for n in (4, 1, 6)]
    want = torch.cat([first(model(part)) for part in parts], 1)
    given = {
        "document_ids": torch.cat([torch.full((2, p.shape[1]), i) for i, p in enumerate(parts)], 1),
        "position_ids": torch.cat([torch.arange(p.shape[1]) for p in parts])[None].expand(2, -1),
    }[by]
    for backend in ("auto", "reference"):
        locant.hf.detach(model)
        noisy(model, name, backend=backend)
        assert close(first(model(torch.cat(parts, 1), **{by: given})), want), backend


def test_packed_documents_with_a_kept_table_restart_by_the_rule_of_the_host() -> None:
    for family in ("bert", "roberta", "gpt2"):
        model = host(family)
        parts = [tokens(2, n, seed=n) for n in (4, 6)]
        want = torch.cat([first(model(part)) for part in parts], 1)
        documents = torch.cat([torch.full((2, p.shape[1]), i) for i, p in enumerate(parts)], 1)
        locant.hf.attach(model, "none", keep_absolute=True)
        assert close(first(model(torch.cat(parts, 1), document_ids=documents)), want), family


def test_gaps_in_explicit_ids_do_not_separate_tokens() -> None:
    gaps = torch.tensor([[0, 1, 2, 7, 8, 9]])
    for family in ("bert", "llama", "gpt2"):
        model, ids = noisy(host(family), "shaw", clip=12), tokens(1, 6)
        long, mask = torch.cat((ids[:, :3], tokens(1, 4, 5), ids[:, 3:]), 1), torch.ones(1, 10, dtype=torch.long)
        mask[:, 3:7] = 0
        for use_cache in (False, True) if family != "bert" else (False,):
            options = {"use_cache": use_cache} if family != "bert" else {}
            got = first(model(ids, position_ids=gaps, **options))
            positions = locant.Positions.arange(10)
            want = first(model(long, attention_mask=mask, positions=positions, **options))[:, [0, 1, 2, 7, 8, 9]]
            assert close(got, want), family


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_shifting_explicit_ids_changes_only_what_is_absolute(family: str) -> None:
    ids = tokens(2, 6)
    shifted = torch.arange(6)[None] + 5
    for name, same in (("shaw", True), ("t5", True), ("rope", True), ("absolute", False), ("tupe_a", False)):
        model = noisy(host(family), name, **({"untie_cls": False} if name == "tupe_a" else {}))
        assert close(first(model(ids, position_ids=shifted)), first(model(ids)), 1e-4) == same, name


def test_rows_may_have_different_explicit_ids() -> None:
    model, ids = noisy(host("bert"), "absolute"), tokens(1, 5).expand(2, -1)
    out = first(model(ids, position_ids=torch.stack((torch.arange(5), torch.arange(5) + 3))))
    assert close(out[:1], first(model(ids[:1]))) and not close(out[1:], out[:1], 1e-3)


def test_ids_that_are_all_equal_warn() -> None:
    model = noisy(host("bert"), "absolute")
    with pytest.warns(UserWarning, match="all 5 ids are equal to 0.*token types"):
        model(tokens(2, 5), position_ids=torch.zeros(2, 5, dtype=torch.long))


def test_ids_of_the_wrong_shape_or_range_are_errors() -> None:
    model = noisy(host("bert"), "absolute")
    with pytest.raises(ValueError, match=r"position_ids have shape \(2, 4\) but 2 sequences of 5 tokens"):
        model(tokens(2, 5), position_ids=torch.arange(4).expand(2, -1))
    with pytest.raises(ValueError, match=r"document_ids have shape \(3, 5\) but 2 sequences of 5 tokens"):
        model(tokens(2, 5), document_ids=torch.zeros(3, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="the smallest id is -1"):
        model(tokens(1, 5), position_ids=torch.arange(5)[None] - 1)
    with pytest.raises(ValueError, match=f"positions reach {ROWS + 5} but the table has {ROWS} rows"):
        model(tokens(1, 5), position_ids=torch.arange(5)[None] + ROWS)


def test_masks_of_the_wrong_shape_are_errors() -> None:
    # hosts drop a mask that forbids nothing before they look at its shape, or broadcast it
    for family in ("bert", "gpt2", "llama", "t5"):
        model, ids = noisy(host(family), "shaw"), tokens(2, 5)
        for shape in ((2, 4), (2, 6)):
            for mask in (torch.ones(shape), torch.ones(shape).index_fill(1, torch.tensor([3]), 0)):
                with pytest.raises(ValueError, match=f"covers {shape[1]} tokens but 0 cached and 5 new ones"):
                    model(ids, attention_mask=mask)
        for shape in ((3, 5), (1, 5), (5,), (2, 5, 5), (3, 1, 5, 5)):
            with pytest.raises(ValueError, match=re.escape(f"attention_mask has shape {shape} but 2 sequences of 5")):
                model(ids, attention_mask=torch.ones(shape))
        assert first(model(ids, attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))).shape[:2] == (2, 5)


def test_positions_are_an_object_with_its_own_documents() -> None:
    model, ids = noisy(host("bert"), "shaw"), tokens(2, 5)
    with pytest.raises(TypeError, match=r"positions is a Tensor; give a locant\.Positions"):
        model(ids, positions=torch.arange(5))
    with pytest.raises(ValueError, match="positions and document_ids came together"):
        model(ids, positions=locant.Positions.arange(5), document_ids=torch.zeros(2, 5, dtype=torch.long))


def test_ids_past_a_kept_table_are_one_error() -> None:
    # https://github.com/huggingface/transformers/issues/125: not an index error of the host
    for family, rows in (("bert", ROWS), ("roberta", ROWS + 2), ("gpt2", ROWS)):
        model = noisy(host(family), "none", keep_absolute=True)
        last = torch.arange(5)[None] + rows - 5
        assert first(model(tokens(1, 5), position_ids=last)).isfinite().all()
        with pytest.raises(ValueError, match=f"has {rows} positions but the input reaches {rows + 1}"):
            model(tokens(1, 5), position_ids=last + 1)


# --- caches -----------------------------------------------------------------------------------------------------------


def decode(model: Any, ids: torch.Tensor, chunk: int, cache: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of a pass in chunks, with a cache."""
    parts = []
    for start in range(0, ids.shape[1], chunk):
        end = min(start + chunk, ids.shape[1])
        given = {} if mask is None else {"attention_mask": mask[:, :end]}
        parts.append(model(ids[:, start:end], past_key_values=cache, use_cache=True, **given).logits)
    return torch.cat(parts, 1)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_in_chunks_equals_the_full_pass(family: str, name: str) -> None:
    model, ids = noisy(host(family), name), tokens(2, 8)
    want = model(ids, use_cache=False).logits
    for chunk in (1, 2, 3):
        assert close(decode(model, ids, chunk, DynamicCache()), want), chunk
    assert close(decode(model, ids, 3, StaticCache(model.config, max_cache_len=13)), want)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("name", ["absolute", "shaw", "tupe_r", "rope", "t5"])
def test_decoding_of_left_padded_rows_equals_their_own_runs(family: str, name: str) -> None:
    model = noisy(host(family), name)
    short, long = tokens(1, 4, seed=1), tokens(1, 7, seed=2)
    batch, mask = padded(short, 3, 0)
    batch, mask = torch.cat((batch, long)), torch.cat((mask, torch.ones_like(long)))
    for chunk in (1, 3):
        for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=11)):
            out = decode(model, batch, chunk, cache, mask)
            assert close(out[:1, 3:], model(short).logits) and close(out[1:], model(long).logits)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("name", ["absolute", "shaw", "tupe_r", "rope"])
def test_generating_from_unequal_prompts_equals_one_by_one(family: str, name: str, cache: str | None) -> None:
    model = noisy(host(family), name)
    short, long = tokens(1, 3, seed=1), tokens(1, 7, seed=2)
    batch, mask = padded(short, 4, 0)
    batch, mask = torch.cat((batch, long)), torch.cat((mask, torch.ones_like(long)))
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True, output_logits=True)
    if cache is not None:
        options.update(cache_implementation=cache, disable_compile=True)
    out = model.generate(batch, attention_mask=mask, **options)
    for row, prompt in enumerate((short, long)):
        ids = torch.cat((prompt, out.sequences[row : row + 1, 7:]), 1)
        full = model(ids, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
        assert close(torch.stack([step[row] for step in out.logits])[None], full)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_beam_search_reorders_the_ids_with_the_cache() -> None:
    model = noisy(host("gpt2"), "absolute")
    batch, mask = padded(tokens(1, 3, seed=1), 4, 0)
    batch, mask = torch.cat((batch, tokens(1, 7, seed=2))), torch.cat((mask, torch.ones(1, 7, dtype=torch.long)))
    options: dict[str, Any] = dict(max_new_tokens=5, do_sample=False, num_beams=3, pad_token_id=0)
    with_cache = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(with_cache, model.generate(batch, attention_mask=mask, use_cache=False, **options))


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@torch.no_grad()
def test_ids_follow_the_rows_of_a_cache() -> None:
    model, ids = noisy(host("llama"), "shaw", clip=20), tokens(2, 6)
    own = torch.stack((torch.arange(6), torch.arange(6) * 2))
    full = model(ids, position_ids=own, use_cache=False).logits

    def step(cache: Any, rows: list[int]) -> torch.Tensor:
        last = slice(5, 6)
        return model(ids[rows, last], position_ids=own[rows, last], past_key_values=cache).logits

    def filled() -> Any:
        cache = DynamicCache()
        model(ids[:, :5], position_ids=own[:, :5], past_key_values=cache)
        return cache

    assert close(step(filled(), [0, 1]), full[:, 5:])
    cache = filled()
    cache.reorder_cache(torch.tensor([1, 0]))
    other = copy.deepcopy(cache)
    assert close(step(cache, [1, 0]), full[[1, 0], 5:])
    other.batch_select_indices(torch.tensor([1]))
    assert close(step(other, [0]), full[:1, 5:])
    cache = filled()
    cache.batch_repeat_interleave(2)
    assert close(step(cache, [0, 0, 1, 1]), full[[0, 0, 1, 1], 5:])
    cache = filled()
    model(ids[:, :1], position_ids=own[:, 5:], past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == 5
    assert close(step(cache, [0, 1]), full[:, 5:])
    cache = StaticCache(model.config, max_cache_len=9)
    model(ids[:, :5], position_ids=own[:, :5], past_key_values=cache)
    assert close(step(cache, [0, 1]), full[:, 5:])
    cache.reset()
    assert close(model(ids, past_key_values=cache).logits, model(ids, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_explicit_ids_before_a_cache_count_on_without_ids() -> None:
    model, ids = noisy(host("gpt2"), "absolute"), tokens(1, 6)
    shifted = torch.arange(6)[None] + 7
    want = model(ids, position_ids=shifted, use_cache=False).logits
    cache = DynamicCache()
    first(model(ids[:, :4], position_ids=shifted[:, :4], past_key_values=cache))
    assert close(model(ids[:, 4:], past_key_values=cache).logits, want[:, 4:])


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_a_cache_that_the_host_made_knows_its_ids() -> None:
    for family in CAUSAL:
        model, ids = noisy(host(family), "shaw", clip=20), tokens(2, 6)
        own = torch.stack((torch.arange(6) * 3, torch.arange(6) + 2))
        want = model(ids, position_ids=own, use_cache=False).logits
        begun = model(ids[:, :4], position_ids=own[:, :4], use_cache=True)
        rest = model(ids[:, 4:], position_ids=own[:, 4:], past_key_values=begun.past_key_values)
        assert close(rest.logits, want[:, 4:])


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_generating_past_the_table_is_the_same_error() -> None:
    for options in ({}, {"use_cache": False}):
        model = noisy(host("gpt2"), "absolute")
        with pytest.raises(ValueError, match=f"positions reach {ROWS + 1} but the table has {ROWS} rows"):
            model.generate(tokens(1, 20), max_new_tokens=40, do_sample=False, **options)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_errors_about_caches() -> None:
    model, cache = noisy(host("gpt2"), "shaw"), DynamicCache()
    model(tokens(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="document_ids came with a cache of 4 tokens"):
        model(tokens(1, 2), past_key_values=cache, document_ids=torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="the attention mask covers 2 tokens but 4 cached and 2 new ones"):
        model(tokens(1, 2), past_key_values=cache, attention_mask=torch.tensor([[0, 1]]))


def test_a_sliding_window_of_the_host_stays() -> None:
    torch.manual_seed(0)
    model = stir(T.MistralForCausalLM(T.MistralConfig(**{**LLAMA_SIZES, "head_dim": 8}, sliding_window=3)), 1).eval()
    noisy(model, "shaw")
    weights = model(tokens(1, 8), use_cache=False, output_attentions=True).attentions[0]
    offsets = torch.arange(8)[None] - torch.arange(8)[:, None]
    seen = (offsets <= 0) & (offsets > -3)
    assert not weights[..., ~seen].any() and weights[..., seen].all()


def test_the_fast_path_is_kept_without_left_padding() -> None:
    model, ids = noisy(host("bert"), "shaw"), tokens(2, 6)
    seen: list[bool] = []
    stack = attached(model).stack
    inner = stack.prepare
    stack.prepare = lambda p, *rest: (seen.append(p.contiguous), inner(p, *rest))[1]  # pyright: ignore
    mask = torch.ones_like(ids)
    model(ids)
    model(ids, attention_mask=mask)
    mask[1, 4:] = 0
    model(ids, attention_mask=mask)
    model(ids, position_ids=torch.arange(6)[None])
    assert seen == [True] * 4
    mask[1, 0] = 0
    model(ids, attention_mask=mask)
    model(ids, position_ids=torch.arange(6)[None] * 2)
    assert seen[4:] == [False] * 2


def test_a_row_that_is_all_padding_stays_finite() -> None:
    for name in ("shaw", "none", "huang_m3"):
        model, ids = noisy(host("bert"), name), tokens(2, 6)
        mask = torch.ones_like(ids)
        mask[1] = 0
        out = first(model(ids, attention_mask=mask))
        assert out.isfinite().all() and close(out[:1], first(model(ids[:1])))
        out.square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_additive_mask_of_the_user_is_added() -> None:
    model, ids = noisy(host("bert"), "shaw"), tokens(1, 5)
    bias = torch.zeros(1, 1, 5, 5)
    bias[..., 2] = torch.finfo(torch.float32).min
    boolean = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    boolean[..., 2] = False
    assert close(first(model(ids, attention_mask=bias)), first(model(ids, attention_mask=boolean)))
    bias[..., 3] = 1.5
    assert not close(first(model(ids, attention_mask=bias)), first(model(ids, attention_mask=boolean)), 1e-3)


def test_arrivals_without_tokens_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match="called with nothing"):
        entrance.arrival({})


def test_a_mask_of_pairs_decides_alone_who_sees_whom() -> None:
    model, ids = noisy(host("llama"), "alibi"), tokens(1, 9)
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    causal = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    apart = causal & (torch.arange(9)[:, None] // 4 == torch.arange(9)[None] // 4).clone()
    apart[..., 8, :] = causal[..., 8, :] & (torch.arange(9) >= 4)
    open_, packed = (first(model(ids, position_ids=restart, attention_mask=m)) for m in (causal, apart))
    assert (open_ - packed)[:, 4:].abs().max() > 1e-3, "ids that restart parted what the mask leaves together"
    assert torch.allclose(packed, first(model(ids, position_ids=restart)), atol=1e-5)


def test_ids_that_restart_beside_a_padding_mask_warn() -> None:
    model, ids = noisy(host("llama"), "alibi"), tokens(2, 9)
    restart = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.warns(
        UserWarning, match=r"position_ids restart at token 4 beside an attention_mask.*pass document_ids"
    ):
        model(ids, position_ids=restart, attention_mask=torch.ones_like(ids))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    model(
        ids, position_ids=torch.tensor([[1, 1, 1, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 8]]), attention_mask=mask
    )
