"""What launchers ask for: refused where it contradicts the settings, or where a run would lose numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from locant.finetune.load import DataChoice
from locant.finetune.run import finetune
from locant.finetune.settings import FinetuneSettings, ModelChoice
from locant.training.launch import (
    CHECKPOINT,
    autocast,
    check_checkpoint,
    check_launch,
    shard,
    whole_state,
)

GOOD = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer",
    "WORLD_SIZE": "2",
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a launch that is served."""
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("FSDP_ACTIVATION_CHECKPOINTING", raising=False)
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("FSDP_VERSION", "1", "has fsdp_version = 1, needed 2: .* write `fsdp_version: 2` under fsdp_config"),
        ("FSDP_VERSION", None, "has fsdp_version = 1, needed 2"),
        ("FSDP_STATE_DICT_TYPE", None, "has fsdp_state_dict_type = SHARDED_STATE_DICT, needed FULL_STATE_DICT"),
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", None, "has fsdp_cpu_ram_efficient_loading = true, needed false: processes"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "has fsdp_activation_checkpointing = true, needed false: accelerate"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", None, "has TRANSFORMER_BASED_WRAP and no layer class, .* for BERT: BertLayer"),
        ("WORLD_SIZE", "1", r"asks for FSDP \(ACCELERATE_USE_FSDP\) with 1 process, needed 2 or more"),
    ],
)
def test_what_a_sharded_run_cannot_be_held_under_is_refused(
    name: str, value: str | None, words: str, asked: pytest.MonkeyPatch
) -> None:
    check_launch(FinetuneSettings(device="cpu"), "finetune")
    asked.delenv(name) if value is None else asked.setenv(name, value)
    with pytest.raises(ValueError, match=f"finetune: accelerate.* {words}"):
        check_launch(FinetuneSettings(device="cpu"), "finetune")
    asked.delenv("ACCELERATE_USE_FSDP")
    check_launch(FinetuneSettings(device="cpu"), "finetune")


def test_a_cpu_beside_a_gpu_is_refused_where_torch_would_shard_onto_that(asked: pytest.MonkeyPatch) -> None:
    asked.setattr("torch.accelerator.is_available", lambda: True)
    asked.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    check_launch(FinetuneSettings(), "pretrain")
    with pytest.raises(ValueError, match=r"pretrain: device = 'cpu' under FSDP on a machine with cuda, where torch"):
        check_launch(FinetuneSettings(device="cpu"), "pretrain")


def test_a_launcher_does_not_change_the_precision_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    check_launch(FinetuneSettings(precision="bfloat16"), "pretrain")
    with pytest.raises(ValueError, match=r"has mixed_precision = 'bf16', but precision = 'float32' in the settings"):
        finetune("glue/rte", ModelChoice("none"), DataChoice(()), FinetuneSettings())
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ValueError, match=r"pretrain: .* mixed_precision = 'fp16', but precision = 'bfloat16'"):
        check_launch(FinetuneSettings(precision="bfloat16"), "pretrain")


def test_a_checkpoint_of_the_other_kind_of_launch_is_refused(tmp_path: Path, asked: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} was written without FSDP, and .* launched with; launch"):
        check_checkpoint(tmp_path, "pretrain")
    (tmp_path / CHECKPOINT).touch()
    check_checkpoint(tmp_path, "pretrain")
    asked.setenv("ACCELERATE_USE_FSDP", "false")
    with pytest.raises(ValueError, match=f"{tmp_path} was written with FSDP, and .* launched without; launch"):
        check_checkpoint(tmp_path, "pretrain")


def test_accelerate_is_held_to_what_it_was_asked(asked: pytest.MonkeyPatch) -> None:
    policy = SimpleNamespace(mixed_precision_policy="rounds sums")
    state = SimpleNamespace(distributed_type=DistributedType.FSDP, fsdp_plugin=policy)
    accelerator: Any = SimpleNamespace(num_processes=2, state=state)
    assert shard(accelerator) and policy.mixed_precision_policy is None
    assert not shard(SimpleNamespace(num_processes=1, state=state))
    asked.delenv("ACCELERATE_USE_FSDP")
    assert not shard(accelerator)


def test_a_sharded_model_computes_in_bfloat16_and_answers_in_float32() -> None:
    torch.manual_seed(0)
    model, given = nn.Linear(7, 5), torch.randn(3, 7)
    exact = model(given)
    autocast(model, torch.device("cpu"))
    assert model(given).dtype == torch.float32
    assert torch.equal(model(given), model(given).bfloat16().float()) and not torch.equal(model(given), exact)


def test_whole_weights_keep_what_is_tied_and_go_to_one_process() -> None:
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    state = whole_state(model, keeps=True)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert state["0.weight"] is state["2.weight"] and not state["0.weight"].requires_grad
    assert whole_state(model, keeps=False) == {}
