"""Models made of models (CLIP, LLaVA, encoder-decoders of two): extending, saving, and parts of what was saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

import locant.hf
from locant.hf.attachment import attachments
from tests.hf_models import BERT_SIZES, LLAMA_SIZES, ROWS, first, noisy, stir, tokens

T.logging.disable_progress_bar()

TOWER: dict[str, Any] = dict(
    hidden_size=24,
    num_hidden_layers=1,
    num_attention_heads=3,
    intermediate_size=37,
    image_size=12,
    patch_size=4,
    projection_dim=24,
)
TEXT: dict[str, Any] = dict(
    vocab_size=BERT_SIZES["vocab_size"],
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=37,
    max_position_embeddings=ROWS,
    projection_dim=24,
)


def clip() -> Any:
    return T.CLIPModel(T.CLIPConfig(text_config=TEXT, vision_config=TOWER, projection_dim=24))


def llava() -> Any:
    text, vision = T.LlamaConfig(**LLAMA_SIZES), T.CLIPVisionConfig(**TOWER)
    return T.LlavaForConditionalGeneration(T.LlavaConfig(vision_config=vision, text_config=text, image_token_id=3))


def pair(layers: int = 1) -> Any:
    inner = {**BERT_SIZES, "num_hidden_layers": layers}
    decoder = T.BertLMHeadModel(T.BertConfig(**inner, is_decoder=True, add_cross_attention=True))
    return T.EncoderDecoderModel(encoder=T.BertModel(T.BertConfig(**BERT_SIZES)), decoder=decoder)


def read_text(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return first(model.text_model(ids))


def read_both(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, decoder_input_ids=ids).logits


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "clip": (clip, read_text),
    "llava": (llava, lambda model, ids: first(model(input_ids=ids))),
    "pair": (pair, read_both),
}


def built(kind: str) -> tuple[Any, Callable[[Any, torch.Tensor], torch.Tensor]]:
    torch.manual_seed(0)
    make, read = MODELS[kind]
    return stir(make(), 1).eval(), read


@pytest.mark.parametrize("kind", MODELS)
def test_a_longer_model_of_models_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, read = built(kind)
    config, ids = model.config, tokens(1, 2 * ROWS)
    before = config.to_dict()
    locant.hf.extend(model, 2 * ROWS)
    want = read(model, ids)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(read(loaded, ids), want)
    assert config.to_dict() == before, "the config that was given is another model's, too"


@pytest.mark.parametrize("kind", MODELS)
def test_an_attached_model_of_models_grows_and_comes_back(kind: str, tmp_path: Path) -> None:
    model, read = built(kind)
    noisy(model, "huang_m4", clip=7)
    locant.hf.extend(model, 2 * ROWS)
    want = read(model, tokens(1, 2 * ROWS))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert [path for path, _, _ in attachments(loaded)] == [path for path, _, _ in attachments(model)]
    assert torch.equal(read(loaded, tokens(1, 2 * ROWS)), want)


def test_configs_that_cannot_be_told_apart_are_refused() -> None:
    model, _ = built("pair")
    model.encoder.config = T.BertConfig(**BERT_SIZES)  # no longer the one in the config of the whole
    model.some_other = model.encoder
    del model.encoder
    with pytest.raises(
        ValueError, match=r"EncoderDecoderModel holds encoder, decoder, and which of them is that of some"
    ):
        locant.hf.extend(model, 2 * ROWS)
    assert model.some_other.embeddings.position_embeddings.weight.shape[0] == ROWS


def test_parts_of_a_saved_clip_load_with_what_is_theirs(tmp_path: Path) -> None:
    model, read = built("clip")
    noisy(model, "huang_m4", clip=7)
    model.save_pretrained(tmp_path / "whole")
    ids, pixels = tokens(2, 7), torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    for part in (T.CLIPTextModel, T.CLIPTextModelWithProjection):
        loaded = part.from_pretrained(tmp_path / "whole").eval()
        assert len(attachments(loaded)) == 1
        assert torch.equal(loaded(input_ids=ids).last_hidden_state, read(model, ids))
    tower = T.CLIPVisionModel.from_pretrained(tmp_path / "whole").eval()
    assert not attachments(tower) and torch.equal(first(tower(pixels)), first(model.vision_model(pixels)))
    model.text_model.save_pretrained(tmp_path / "part")
    assert torch.equal(first(T.CLIPTextModel.from_pretrained(tmp_path / "part").eval()(ids)), read(model, ids))


def test_parts_of_an_encoder_decoder_come_from_their_own_save_or_are_refused(tmp_path: Path) -> None:
    model, _ = built("pair")
    noisy(model, "huang_m4", clip=7)
    ids = tokens(2, 7)
    for name, kind in (("encoder", T.BertModel), ("decoder", T.BertLMHeadModel)):
        part = getattr(model, name)
        part.save_pretrained(tmp_path / name)
        assert torch.equal(first(kind.from_pretrained(tmp_path / name).eval()(ids)), first(part(ids)))
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"is for BertModel at encoder, BertModel at decoder\.bert but BertModel has"):
        T.BertModel.from_pretrained(tmp_path / "whole")
    torch.manual_seed(0)
    model = pair(layers=2)
    noisy(model.decoder, "huang_m4")
    model.save_pretrained(tmp_path / "half")
    with pytest.raises(
        ValueError, match=r"an encoding of BertModel at decoder\.bert, but transformers finds no weights"
    ):
        T.BertModel.from_pretrained(tmp_path / "half")
