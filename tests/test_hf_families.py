"""Every architecture of transformers: the committed table, the walk that makes it, and what hosts bring beside."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn
from transformers.cache_utils import DynamicCache, StaticCache

import locant
import locant.hf
from locant.hf import interface
from locant.hf.attachment import NoRotation, attachments
from locant.hf.families import find_sites
from tests import hf_architectures as tiny
from tests import hf_walk as walk
from tests.hf_models import LLAMA_SIZES, attached, first, noisy, stir, tokens

# encoders, decoders, encoder-decoders; grouped queries, windows, softcap, sinks, latent heads, unequal layers, towers,
# images, sound, hosts that hand no keywords on
DIVERSE = (
    "modernbert bart mt5 mistral gemma2 gpt_oss deepseek_v3 gemma4_text stablelm siglip_vision_model vit wav2vec2 "
    "llava whisper qwen2_vl_text jamba glm4v_vision blip_2_qformer maskformer"
).split()


def table() -> dict[str, tuple[str, list[str]]]:
    """Result and cells of every row of the committed table."""
    text = walk.TABLE.read_text(encoding="utf-8")
    found: dict[str, tuple[str, list[str]]] = {}
    for part in text.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        result = next(r for r in walk.ORDER if r == title[0].lower() + title[1:])
        if result == walk.ALONE:
            found |= {name: (result, []) for name in body.strip().rstrip(".").split(", ")}
        for line in re.findall(r"^\|(?! Architecture|---)(.*)\|$", body, flags=re.MULTILINE):
            cells = [cell.strip() for cell in line.split("|")]
            found[cells[0]] = result, cells
    return found


def skip_other_version() -> None:
    made = re.search(r"transformers ([\d.]+)", walk.TABLE.read_text(encoding="utf-8"))
    assert made is not None
    if made[1] != T.__version__:
        pytest.skip(f"docs/families.md was made with transformers {made[1]}, installed is {T.__version__}")


def test_every_architecture_of_the_installed_transformers_has_a_row() -> None:
    skip_other_version()
    assert table().keys() == tiny.architectures().keys()


def test_at_least_a_hundred_architectures_attach_and_equal_the_core() -> None:
    rows = [cells for result, cells in table().values() if result in (walk.EQUAL, walk.LIMITED)]
    assert len(rows) >= 100
    kinds = {cells[2] for cells in rows}
    assert {"encoder", "decoder", "encoder-decoder", "image encoder", "sound encoder"} <= kinds


@pytest.mark.parametrize("model_type", DIVERSE)
def test_the_walk_finds_what_the_table_says(model_type: str) -> None:
    skip_other_version()
    (finding,) = walk.walk((model_type,))
    result, cells = table()[model_type]
    assert finding.result == result
    assert [cell.strip() for cell in walk.row(finding).strip("|\n").split("|")] == [*cells]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # every architecture of transformers, one after the other
def test_the_committed_table_is_what_the_walk_finds() -> None:
    skip_other_version()
    assert walk.page(list(walk.walk())) == walk.TABLE.read_text(encoding="utf-8")


# --- the walk itself would see a fault --------------------------------------------------------------------------------


def test_the_walk_sees_a_lost_term(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = interface.attention_with_mask
    monkeypatch.setattr(
        interface, "attention_with_mask", lambda q, k, v, terms, *rest, **o: inner(q, k, v, terms[1:], *rest, **o)
    )
    (finding,) = walk.walk(("mistral",))
    assert finding.result == walk.WRONG and "is off by" in finding.notes[0]


def test_the_walk_sees_positions_that_were_not_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoRotation, "forward", lambda self, *a, **k: self._original[0](*a, **k))
    (finding,) = walk.walk(("mistral",))
    assert "order enters before the first attention, too" in finding.notes


def test_the_walk_sees_a_mask_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = interface.attention_with_mask
    monkeypatch.setattr(
        interface, "attention_with_mask", lambda q, k, v, t, p, mask, *rest, **o: inner(q, k, v, t, p, None, *rest, **o)
    )
    (finding,) = walk.walk(("bart",))
    assert any("padding moves outputs" in note for note in finding.notes)


# --- what hosts bring beside ------------------------------------------------------------------------------------------


def operands(heads: int = 3, queries: int = 5, keys: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, heads, queries, 8), torch.randn(2, heads, keys, 8), torch.randn(2, heads, keys, 8)


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("masked", [False, True])
def test_softcap_and_sinks_join_the_softmax_as_the_host_means_it(index: int | None, masked: bool) -> None:
    q, k, v = operands()
    module: Any = nn.Linear(1, 1)
    encoding = locant.load("shaw", num_heads=3, head_dim=8, clip=3, values=True)
    nn.init.normal_(encoding.value_table)  # pyright: ignore
    mask = (torch.rand(2, 1, 5, 7) > 0.3) if masked else None
    sinks, cap = torch.randn(3), 1.5
    positions = locant.Positions.arange(5, 7)
    logits = q @ k.transpose(-1, -2) * 8**-0.5
    rows = positions.offsets().clamp(-3, 3) + 3
    if index is not None:
        module.locant_index = index
        logits = logits + torch.einsum("bhid,ijd->bhij", q, encoding.table[0][rows]) * 8**-0.5  # pyright: ignore
    logits = torch.tanh(logits / cap) * cap
    logits = logits if mask is None else logits.masked_fill(~mask, -1e30)
    weights = torch.cat((logits, sinks[None, :, None, None].expand(2, -1, 5, 1)), -1).softmax(-1)[..., :-1]
    want = weights @ v
    if index is not None:
        want = want + torch.einsum("bhij,ijd->bhid", weights, encoding.value_table[0][rows])  # pyright: ignore
    route = interface.Route(positions, (encoding,), (True,), (), "auto", "sdpa", False, True)
    out, kept = interface.attention_forward(
        module,
        q,
        k,
        v,
        mask,
        locant=route if index is not None else None,
        softcap=cap,
        s_aux=sinks,
        output_attentions=True,
    )
    assert kept is not None
    assert torch.allclose(out, want.transpose(1, 2), atol=1e-5) and torch.allclose(kept, weights, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@torch.no_grad()
@pytest.mark.parametrize("name", ["huang_m4", "tisa", "rope", "t5", "tupe_r"])
def test_caches_that_drop_keys_know_whose_keys_they_kept(name: str) -> None:
    torch.manual_seed(0)
    config = T.MistralConfig(**{**LLAMA_SIZES, "head_dim": 8}, sliding_window=4)
    model, ids = noisy(stir(T.MistralForCausalLM(config), 1).eval(), name), tokens(2, 11)
    want = model(ids, use_cache=False).logits
    for chunk in (1, 3, 6):
        for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=13)):
            parts = [model(part, past_key_values=cache).logits for part in ids.split(chunk, 1)]
            assert torch.allclose(torch.cat(parts, 1), want, atol=1e-4), (chunk, type(cache).__name__)


def test_keys_that_no_window_explains_are_an_error() -> None:
    q, k, v = operands()
    module: Any = nn.Linear(1, 1)
    module.locant_index = 0
    encoding = locant.load("shaw", num_heads=3, head_dim=8, clip=3)
    route = interface.Route(locant.Positions.arange(5, 9), (encoding,), (True,), (), "auto", "sdpa", False, False)
    with pytest.raises(ValueError, match="Linear sees 7 keys but the positions cover 9"):
        interface.attention_forward(module, q, k, v, None, locant=route)


def vit(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return stir(tiny.model_class("ViTModel")(tiny.tiny_config("vit")), 1).eval()


@torch.no_grad()
def test_absolute_with_the_table_of_a_vision_host_is_the_host() -> None:
    model, pixels = vit(), torch.randn(2, 3, 16, 16)
    want, table = first(model(pixels)), model.embeddings.position_embeddings.clone()
    names = [name for name, _ in model.named_parameters()]
    locant.hf.attach(model, "absolute")
    assert not any("position_embeddings" in name for name, _ in model.named_parameters())
    assert not torch.allclose(first(model(pixels)), want, atol=1e-2)
    attached(model).layers()[0].table.data[: table.shape[1]] = table[0]
    assert torch.allclose(first(model(pixels)), want, atol=1e-5)
    locant.hf.detach(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(first(model(pixels)), want) and not list(model.buffers())


@torch.no_grad()
def test_patches_and_their_mask_have_positions() -> None:
    model, pixels = noisy(vit(), "huang_m4+absolute"), torch.randn(2, 3, 16, 16)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[:, 12:] = 0
    got = first(model(pixels, attention_mask=mask))
    other = pixels.clone()
    other[:, :, 12:, 4:] = 9.0  # the last patches, which nobody sees
    assert torch.allclose(first(model(other, attention_mask=mask))[:, :12], got[:, :12], atol=1e-5)
    moved = first(model(pixels, positions=locant.Positions.arange(17).shift(3)))
    assert not torch.allclose(moved, first(model(pixels)), atol=1e-3), "positions= did not arrive"


def test_gradient_checkpointing_of_a_vision_host_gives_equal_gradients() -> None:
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = noisy(vit(), "absolute+shaw").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(4)
        first(model(torch.randn(2, 3, 16, 16))).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    want, got = gradients(False), gradients(True)
    assert want.keys() == got.keys() and any(".table" in name for name in want)
    assert all(torch.allclose(got[name], g, atol=1e-6) for name, g in want.items())


def test_a_host_that_hands_no_keywords_on_is_served_and_left_clean() -> None:
    torch.manual_seed(0)
    model = stir(tiny.model_class("StableLmModel")(tiny.tiny_config("stablelm")), 1).eval()
    noisy(model, "huang_m4")
    assert not find_sites(locant.hf.detach(model))[0].hands_on
    noisy(model, "huang_m4")
    ids = tokens(2, 6)
    assert not torch.allclose(first(model(ids)), first(noisy(locant.hf.detach(model), "none")(ids)), atol=1e-3)
    routes = [vars(m)["locant_route"] for m in model.modules() if "locant_route" in vars(m)]
    assert len(routes) == 2 and routes == [None, None]
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RuntimeError, match=r"StableLmAttention 1 got no positions.*gradient checkpointing"):
        first(model(inputs_embeds=torch.randn(1, 4, tiny.WIDTH, requires_grad=True))).sum().backward()


def test_layers_of_unequal_width_get_encodings_of_their_own_width() -> None:
    config = tiny.tiny_config("gemma4_text")
    torch.manual_seed(0)
    model = tiny.model_class("Gemma4TextModel")(config)
    widths = [module.head_dim for _, module in find_sites(model)[0].attention]
    assert len(set(widths)) > 1
    locant.hf.attach(model, "huang_m4+t5")
    layers = attached(model).layers()
    assert [layer.parts()[0].table.shape[-1] for layer in layers] == widths
    assert len({id(layer.parts()[1]) for layer in layers}) == 1, "what needs no width is shared as ever"
    with pytest.raises(ValueError, match="huang_m4: no part takes the option 'clipp'=3"):
        locant.hf.attach(locant.hf.detach(model), "huang_m4", clipp=3)


def test_a_tower_is_left_as_it_is_and_can_be_attached_by_itself() -> None:
    torch.manual_seed(0)
    model = tiny.model_class("LlavaModel")(tiny.tiny_config("llava")).eval()
    locant.hf.attach(model, "shaw")
    assert [path for path, _, _ in attachments(model)] == ["language_model"]
    assert any("position_embedding" in name for name, _ in model.vision_tower.named_parameters())
    locant.hf.attach(model.vision_tower, "shaw")
    assert {path for path, _, _ in attachments(model)} == {"language_model", "vision_tower"}
    locant.hf.detach(model)
    assert not attachments(model)


def test_a_text_model_whose_own_attention_is_elsewhere_is_refused() -> None:
    model = tiny.model_class("GitModel")(tiny.tiny_config("git"))
    with pytest.raises(ValueError, match="GitModel has no self-attention that locant can serve"):
        locant.hf.attach(model, "shaw")


@torch.no_grad()
def test_layers_that_are_given_no_sequence_say_so() -> None:
    model = vit()
    locant.hf.attach(model, "shaw")
    model.layers[0].register_forward_pre_hook(lambda m, a: (a[0][:, None], *a[1:]), prepend=True)
    with pytest.raises(ValueError, match=r"the layers of vit were given \(2, 1, 17, 48\), but a sequence"):
        model(torch.randn(2, 3, 16, 16))


def test_a_rotary_module_that_gives_something_else_is_an_error() -> None:
    class Rotary(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(cos=x)

    with pytest.raises(TypeError, match="a rotary module gave SimpleNamespace; locant knows cosine and sine"):
        NoRotation(Rotary())(torch.zeros(1))
    angles, turned = NoRotation(nn.Identity()), torch.polar(torch.ones(3), torch.arange(3.0))
    assert not angles(torch.ones(3)).any() and torch.equal(angles(turned), torch.ones_like(turned))
