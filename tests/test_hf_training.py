"""Attached models under the tools that train and speed up: Trainer and torch.compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file

import locant
from tests.hf_models import BERT_SIZES, attached, first, host, noisy, stir, tokens
from tests.names import home
from tests.processes import finish, run


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 7, seed=index)[0]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trainer_trains_and_resumes_an_attached_model(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        torch.manual_seed(0)
        model = noisy(stir(T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)), 1, std=0.05), "t5+shaw", clip=3)
        arguments = T.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=3,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            seed=3,
        )
        return T.Trainer(model, arguments, train_dataset=Rows())

    whole = trainer(4)
    before = {n: p.detach().clone() for n, p in whole.model.named_parameters()}
    whole.train()
    after = dict(whole.model.named_parameters())
    moved = [n for n, p in before.items() if ".locant." in n and not torch.equal(p, after[n])]
    assert len(moved) == 3, moved
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert sum("locant" in n for n in saved) == 3, "each added tensor once"
    rest = trainer(4)
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.allclose(p, after[n], atol=1e-6) for n, p in rest.model.named_parameters())


def test_a_host_from_pretrained_gets_the_same_outputs(tmp_path: Path) -> None:
    ids = tokens(2, 6)
    for family in ("bert", "gpt2"):
        host(family).save_pretrained(tmp_path / family)
    for name in locant.names():
        model = noisy(host(home(name)), name)
        loaded = noisy(type(model).from_pretrained(tmp_path / home(name)).eval(), name)
        assert not list(attached(loaded).buffers()), f"{name}: constants are computed, not stored"
        assert torch.equal(first(loaded(ids)), first(model(ids))), name


COMPILED = """
import sys, torch, locant.hf
from tests.hf_models import attached, first, host, noisy, tokens
from tests.names import home
ids, mask = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
mask[1, :2] = 0
for name in sys.argv[1:]:
    torch._dynamo.reset()
    model = noisy(host(home(name)), name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    got, want = first(compiled(ids, attention_mask=mask)), first(model(ids, attention_mask=mask))
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-5), name
    got.square().mean().backward()
    assert all(p.grad is not None for p in attached(model).parameters()), name
"""


def test_an_attached_model_compiles_without_a_graph_break() -> None:
    finish(run(COMPILED, "t5+shaw"))


@pytest.mark.slow
def test_every_encoding_compiles_without_a_graph_break() -> None:
    finish(run(COMPILED, *locant.names()), seconds=290)
