"""Attached models under what training does to them: checkpointing, ranks, shards, adapters, autocast, copies, meta."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as T
from torch import Tensor, nn

import locant
import locant.hf
from locant.hf.attachment import attachments
from tests.hf_models import HOSTS, VOCABULARY, attached, first, host, noisy, stir, tokens
from tests.names import DECODERS, home
from tests.processes import finish, run

NAMES = locant.names()
BART_SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=24,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=3,
    decoder_attention_heads=3,
    encoder_ffn_dim=37,
    decoder_ffn_dim=37,
    max_position_embeddings=29,
)


def both_families(slow: str) -> pytest.MarkDecorator:
    """Every encoding at home, and in another family in the slow tier."""
    pairs = [pytest.param(home(name), name) for name in NAMES]
    pairs += [pytest.param(slow, name, marks=pytest.mark.slow) for name in DECODERS if home(name) != slow]
    return pytest.mark.parametrize(("family", "name"), pairs)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(a, b, atol=tolerance, rtol=tolerance)


def gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    first(model(ids)).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- gradient checkpointing -------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*(gradient_checkpointing|use_cache).*")
@both_families("gpt2")
def test_checkpointing_gives_equal_gradients_or_says_how_it_would(family: str, name: str) -> None:
    model, ids = noisy(host(family), name).train(), tokens(2, 7)
    want = gradients(model, ids)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        try:
            got = gradients(model, ids)
        except RuntimeError as error:
            assert reentrant and ": what all layers share was computed with gradients" in str(error)
            assert "use_reentrant=False" in str(error)
            continue
        assert got.keys() == want.keys()
        assert all(close(got[n], g, 1e-6) for n, g in want.items()), reentrant


# --- autocast, copies, meta -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_computes_the_same_with_less_precision(name: str, dtype: torch.dtype) -> None:
    model, ids = noisy(host(home(name)), name), tokens(2, 7)
    want, grads = first(model(ids)), gradients(model, ids)
    with torch.autocast("cpu", dtype=dtype):
        out = first(model(ids))
    assert out.isfinite().all()
    assert (out.float() - want).norm() < 0.05 * want.norm()
    with torch.autocast("cpu", dtype=dtype):
        got = gradients(model, ids)
    assert got.keys() == grads.keys()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in got.values())
    added = [n for n in got if "locant" in n]
    assert all((got[n] - grads[n]).norm() < 0.3 * grads[n].norm() + 1e-4 for n in added)


@both_families("llama")
def test_a_copy_is_equal_and_independent(family: str, name: str) -> None:
    model, ids = noisy(host(family), name), tokens(2, 7)
    want, other = first(model(ids)), copy.deepcopy(model)
    assert torch.equal(first(other(ids)), want)
    stir(attached(other), seed=5)
    assert torch.equal(first(model(ids)), want)
    assert not list(attached(other).parameters()) or not close(first(other(ids)), want)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_built_on_meta_has_its_constants_once_it_is_filled(name: str) -> None:
    model, ids = noisy(host(home(name)), name), tokens(2, 7)
    with torch.device("meta"):
        empty = HOSTS[home(name)]()
        locant.hf.attach(empty, name)
    assert all(p.is_meta for p in empty.parameters())
    filled = empty.to_empty(device="cpu").eval()
    filled.load_state_dict(model.state_dict())
    for (_, into), (_, source) in zip(filled.named_buffers(), model.named_buffers(), strict=True):
        into.copy_(source)  # the host's own, which are not stored either
    assert torch.equal(first(filled(ids)), first(model(ids)))


def test_encodings_that_were_never_filled_are_one_error() -> None:
    with torch.device("meta"):
        empty = locant.hf.attach(HOSTS["bert"](), "shaw")
    with pytest.raises(RuntimeError, match="parameters of 'shaw' lie on meta but the input on cpu"):
        empty(tokens(2, 5))


@pytest.mark.parametrize("name", NAMES)
def test_loading_through_meta_gives_equal_outputs(name: str, tmp_path: Path) -> None:
    model, ids = noisy(host(home(name)), name), tokens(2, 7)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(first(loaded(ids)), first(model(ids)))
    assert not any(t.is_meta for t in (*loaded.parameters(), *loaded.buffers()))


# --- freezing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_with_a_frozen_host_only_the_encoding_learns(name: str) -> None:
    model, ids = noisy(host(home(name)), name).train(), tokens(2, 7)
    if not list(attached(model).parameters()):
        with pytest.raises(ValueError, match=f"freeze_host: '{name}' has no parameters"):
            locant.hf.freeze_host(model)
        return
    assert locant.hf.freeze_host(model) is model
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1.0)
    first(model(ids)).square().mean().backward()
    optimizer.step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    constant = {n for n in before if n.endswith(("mlp.2.bias", "second.bias"))}  # one number a head: softmax ignores it
    assert moved | constant == {n for n in before if "locant." in n}
    model.requires_grad_(True)
    assert gradients(model, ids).keys() >= moved


def test_freezing_reaches_both_stacks_and_needs_something_attached() -> None:
    model = noisy(T.BartModel(T.BartConfig(**BART_SIZES)), "shaw")
    locant.hf.freeze_host(model)
    learning = {n.split(".locant.")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert learning == {"encoder", "decoder"}
    with pytest.raises(ValueError, match="freeze_host: BertModel has nothing attached"):
        locant.hf.freeze_host(host("bert"))


# --- LoRA -------------------------------------------------------------------------------------------------------------

LORA = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def adapted(family: str, name: str, version: str | None = None, **options: Any) -> tuple[Any, Any]:
    """An attached model under LoRA whose adapter is not neutral, and the model below it."""
    model = noisy(host(family), name, **({} if version is None else {"version": version, "clip": 4}))
    options = {"fan_in_fan_out": family == "gpt2", **options}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=TARGETS[family], **options)).eval()
    for n, p in wrapped.named_parameters():
        if "lora_B" in n:
            nn.init.normal_(p, std=0.3)
    return wrapped, model


@LORA
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("name", ["shaw", "tupe_r", "t5", "deberta", "rope"])
def test_lora_on_top_adapts_and_merges(family: str, name: str) -> None:
    ids = tokens(2, 7)
    plain = first(noisy(host(family), name)(ids))
    wrapped, _ = adapted(family, name)
    out = first(wrapped(input_ids=ids))
    assert not close(out, plain, 1e-3)
    merged = wrapped.merge_and_unload()
    assert attachments(merged) and close(first(merged(ids)), out)


@LORA
def test_lora_reaches_the_projections_that_an_encoding_borrows() -> None:
    for family in ("bert", "gpt2"):
        wrapped, _ = adapted(family, "deberta", version="v2")
        ids = tokens(2, 7)
        out = first(wrapped(input_ids=ids))
        assert close(first(wrapped.merge_and_unload()(ids)), out), family


@LORA
def test_under_lora_the_encoding_learns_when_it_is_asked_to(tmp_path: Path) -> None:
    ids = tokens(2, 7)
    wrapped, model = adapted("bert", "shaw")
    assert not any(p.requires_grad for p in attached(model).parameters())
    for _, _, attachment in attachments(wrapped):
        attachment.requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    before = {n: p.detach().clone() for n, p in wrapped.named_parameters()}
    for _ in range(3):
        optimizer.zero_grad()
        first(wrapped(input_ids=ids)).square().mean().backward()
        optimizer.step()
    moved = {n for n, p in wrapped.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n or "locant" in n}
    want = first(wrapped(input_ids=ids))
    wrapped.save_pretrained(tmp_path / "adapter")
    locant.hf.save(model, tmp_path / "position")
    again = locant.hf.load(host("bert"), tmp_path / "position")
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert close(first(again(input_ids=ids)), want, 1e-6)


@LORA
def test_peft_may_hold_the_encoding_itself(tmp_path: Path) -> None:
    ids = tokens(2, 7)
    wrapped, _ = adapted("bert", "shaw", modules_to_save=["locant"])
    out = first(wrapped(input_ids=ids))
    assert [n for n, p in wrapped.named_parameters() if p.requires_grad and "locant" in n]
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(locant.hf.attach(host("bert"), "shaw"), tmp_path).eval()
    assert close(first(again(input_ids=ids)), out, 1e-6)


# --- several processes ------------------------------------------------------------------------------------------------

RANKS = """
import sys, torch, transformers as T
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from tests.hf_models import BERT_SIZES, host, noisy, tokens
from tests.names import home
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def build(name):
    torch.manual_seed(0)
    if "+" in name or home(name) == "bert":
        return noisy(T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)), name)
    return noisy(host(home(name)).train(), name)

def train(model, part):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        ids = tokens(4, 7, seed=step)[part]
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)

def same(got, whole):
    return all(torch.allclose(got[n], t, atol=1e-5) for n, t in whole.state_dict().items())

part = slice(2 * rank, 2 * rank + 2)
for name in sys.argv[3:]:
    want = train(whole := build(name), slice(None))
    copies = build(name)
    got = train(torch.nn.parallel.DistributedDataParallel(copies), part)
    dist.all_reduce(got)
    assert torch.allclose(got / 2, want, atol=1e-5) and same(copies.state_dict(), whole), (name, "replicas")
    shards = build(name)
    for layer in next(m for m in shards.modules() if isinstance(m, torch.nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(shards, mesh=mesh)
    got = train(shards, part)
    dist.all_reduce(got)
    state = {n: t.full_tensor() for n, t in shards.state_dict().items()}
    assert torch.allclose(got / 2, want, atol=1e-5) and same(state, whole), (name, "shards")
dist.destroy_process_group()
"""


def on_two_ranks(folder: Path, *names: str) -> None:
    finish(*(run(RANKS, str(rank), str(folder / "meet"), *names) for rank in range(2)))


def test_two_replicas_and_two_shards_train_as_one_model(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, "t5+shaw", "tupe_r")


@pytest.mark.slow
def test_two_replicas_and_two_shards_train_every_encoding_as_one_model(tmp_path: Path) -> None:
    on_two_ranks(tmp_path, *NAMES)


# --- torch.compile ----------------------------------------------------------------------------------------------------

LENGTHS = """
import sys, torch, locant.hf
from torch._dynamo.testing import CompileCounter
from tests.hf_models import attached, first, host, noisy, tokens
from tests.names import home
for name in sys.argv[1:]:
    torch._dynamo.reset()
    model, counter = noisy(host(home(name)), name), CompileCounter()
    compiled, counts = torch.compile(model, backend=counter, fullgraph=True), []
    for step, (batch, length) in enumerate([(2, 7), (3, 9), (2, 11), (4, 6), (5, 13), (3, 17), (2, 8), (6, 10)]):
        ids = tokens(batch, length, seed=step)
        documents = (torch.arange(length) >= length // 2).long().expand(batch, -1)
        got, want = first(compiled(ids, document_ids=documents)), first(model(ids, document_ids=documents))
        assert torch.allclose(got, want, atol=1e-5), (name, step)
        got.square().mean().backward()
        counts.append(counter.frame_count)
    assert counts[-1] == counts[1], (name, counts)
"""


@pytest.mark.slow
def test_compiled_code_serves_packed_batches_of_any_size_after_the_second() -> None:
    finish(run(LENGTHS, "t5+shaw"))


@pytest.mark.slow
def test_compiled_code_serves_packed_batches_of_any_size_for_every_encoding() -> None:
    finish(run(LENGTHS, *NAMES))
