"""Attached models leave: into sentence-transformers, torch.export with any batch and length, and onnxruntime."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import sentence_transformers as S
import torch
import transformers as T
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers

import locant
from locant.hf.attachment import attachments
from tests.hf_models import BERT_SIZES, ROWS, noisy, stir
from tests.names import DECODERS, home
from tests.processes import finish, run

NAMES = locant.names()
WORDS = (
    "a red blue old new house river bridge stands near the under over sun rain falls on every wall and stone".split()
)


# --- torch.export and ONNX --------------------------------------------------------------------------------------------


def leaves(*what: str) -> None:
    finish(run("tests.exports", *what), seconds=290)


def test_an_attached_model_leaves_and_serves_unseen_lengths() -> None:
    leaves("export:llama:huang_m3", "step:core:t5")


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[0::3], NAMES[1::3], NAMES[2::3]], ids=",".join)
def test_every_encoding_exports_with_any_batch_and_length(names: list[str]) -> None:
    leaves(*(f"export:{home(name)}:{name}" for name in names))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "roberta+kept", "gpt2", "llama", "t5", "albert"])
def test_every_host_exports_with_any_batch_and_length(family: str) -> None:
    leaves(*(f"export:{family}:{name}" for name in ("huang_m4", "tisa")))


@pytest.mark.slow
def test_an_exported_decoding_step_sees_the_last_row_of_the_bias() -> None:
    leaves(*(f"step:core:{name}" for name in DECODERS))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_runs_in_onnxruntime(name: str) -> None:
    leaves(f"onnx:{home(name)}:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roberta", "t5"])
def test_other_encoders_run_in_onnxruntime(family: str) -> None:
    leaves(f"onnx:{family}:tupe_r")


# --- sentence-transformers --------------------------------------------------------------------------------------------


def saved(folder: Path, name: str) -> Path:
    """An attached BERT and a tokenizer of whole words, as save_pretrained writes them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.model_max_length = ROWS
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    noisy(stir(T.BertModel(T.BertConfig(**BERT_SIZES)), 1), name).save_pretrained(folder)
    return folder


def sentences(count: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator)) for n in lengths]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["huang_m4", "tupe_r"])
def test_a_sentence_transformer_encodes_trains_and_reloads(name: str, tmp_path: Path) -> None:
    body = Transformer(str(saved(tmp_path / "host", name)))
    model = S.SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension())], device="cpu")
    texts = sentences(7, seed=1)
    ((_, stack, attachment),) = attachments(model)
    assert attachment.stack.name == name
    alone = [model.encode([text], convert_to_tensor=True)[0] for text in texts]
    before = model.encode(texts, convert_to_tensor=True)
    assert torch.allclose(before, torch.stack(alone), atol=1e-5), "padding changes nothing"
    turned = model.encode([" ".join(text.split()[::-1]) for text in texts], convert_to_tensor=True)
    assert not torch.allclose(turned, before, atol=1e-2), "order matters"
    old = {n: p.detach().clone() for n, p in attachment.named_parameters()}
    rows = {"a": sentences(12, 2), "b": sentences(12, 3), "label": torch.linspace(0, 1, 12).tolist()}
    arguments = S.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "runs"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", seed=3,
    )  # fmt: skip
    loss = CosineSimilarityLoss(model)
    data = datasets.Dataset.from_dict(rows)
    S.SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss).train()
    assert all(not torch.equal(p, old[n]) for n, p in attachment.named_parameters())
    want = model.encode(texts, convert_to_tensor=True)
    assert not torch.allclose(want, before, atol=1e-3)
    model.save(str(tmp_path / "sentences"))
    again = S.SentenceTransformer(str(tmp_path / "sentences"), device="cpu")
    assert attachments(again)
    assert torch.allclose(again.encode(texts, convert_to_tensor=True), want, atol=1e-6)
    assert type(stack).__name__ == "BertModel"
