"""What launchers ask for by the environment: which of accelerate's FSDP configurations a run can be held under.

FSDP 2 shards parameters, gradients and optimizer over the processes; a step computes the same sums as DDP. The files
that a run leaves hold whole weights, gathered by all processes and written by the first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from accelerate import PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    convert_outputs_to_fp32,
    parse_flag_from_env,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SHARDED = "ACCELERATE_USE_FSDP"
CHECKPOINT = "pytorch_model_fsdp.bin"  # weights in a checkpoint that was written under FSDP

# (variable, key of accelerate's configuration, what it is where nothing is said, what is needed, why)
NEEDED = (
    ("FSDP_VERSION", "fsdp_version", "1", "2", "version 1 flattens parameters, so matrices and positions are one"),
    (
        "FSDP_STATE_DICT_TYPE",
        "fsdp_state_dict_type",
        "SHARDED_STATE_DICT",
        "FULL_STATE_DICT",
        "a checkpoint counts when the first process has seen all of it",
    ),
    (
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "fsdp_cpu_ram_efficient_loading",
        "true",
        "false",
        "processes but the first would begin with empty weights, and what is attached or drawn would stay so",
    ),
    (
        "FSDP_ACTIVATION_CHECKPOINTING",
        "fsdp_activation_checkpointing",
        "false",
        "false",
        "accelerate computes layers again with other dropout masks, which gives wrong gradients",
    ),
)


@runtime_checkable
class Placed(Protocol):
    """What settings say of device and arithmetic."""

    @property
    def precision(self) -> str:
        """float32, or bfloat16: autocast."""
        ...

    @property
    def device(self) -> str:
        """auto: a GPU where there is one; or cpu."""
        ...


def sharded() -> bool:
    """Whether accelerate was told to shard the model (FSDP)."""
    return bool(parse_flag_from_env(SHARDED))


def check_launch(settings: Placed, command: str) -> None:
    """Raises: ValueError where the launcher asks for what the settings contradict, or what would lose numbers."""
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if asked not in ("no", {"float32": "no", "bfloat16": "bf16"}[settings.precision]):
        raise ValueError(
            f"{command}: accelerate's configuration has mixed_precision = {asked!r}, but precision = "
            f"{settings.precision!r} in the settings, which decide; write mixed_precision: 'no' there, or set precision"
        )
    if not sharded():
        return
    for variable, key, default, needed, why in NEEDED:
        came = os.environ.get(variable, default)
        if came.lower() != needed.lower():
            raise ValueError(
                f"{command}: accelerate's configuration has {key} = {came}, needed {needed}: {why}; write "
                f"`{key}: {needed}` under fsdp_config"
            )
    if os.environ.get("FSDP_AUTO_WRAP_POLICY") == "TRANSFORMER_BASED_WRAP" and not os.environ.get(
        "FSDP_TRANSFORMER_CLS_TO_WRAP"
    ):
        raise ValueError(
            f"{command}: accelerate's configuration has TRANSFORMER_BASED_WRAP and no layer class, needed one to shard "
            "by; write fsdp_transformer_layer_cls_to_wrap, for BERT: BertLayer"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2:
        raise ValueError(
            f"{command}: accelerate asks for FSDP ({SHARDED}) with {world} process, needed 2 or more to share the "
            "model; set num_processes, or launch without FSDP"
        )
    if settings.device == "cpu" and torch.accelerator.is_available():
        raise ValueError(
            f"{command}: device = 'cpu' under FSDP on a machine with {torch.accelerator.current_accelerator()}, where "
            "torch shards onto that; hide it (CUDA_VISIBLE_DEVICES=), or drop device"
        )


def check_checkpoint(checkpoint: Path, command: str) -> None:
    """Raises: ValueError for a checkpoint that was written under FSDP where this run is not, or the other way round."""
    written = (checkpoint / CHECKPOINT).exists()
    if written != sharded():
        there, here = (("with", "without"), ("without", "with"))[not written]
        raise ValueError(
            f"{command}: {checkpoint} was written {there} FSDP, and this run is launched {here}; launch it as before, "
            "or give another --out"
        )


def shard(accelerator: Any) -> bool:
    """Holds accelerate to the FSDP that it was asked for; tells whether it was.

    On a CPU accelerate (1.15) reads the configuration and trains copies (DDP). Its policy for bfloat16, under which
    also sums and losses are rounded, gives way to autocast.
    """
    if not sharded() or accelerator.num_processes < 2:
        return False
    state = accelerator.state
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    state.fsdp_plugin.mixed_precision_policy = None
    return True


def autocast(model: nn.Module, device: torch.device) -> None:
    """Lets a model compute in bfloat16 and answer in float32, as accelerate does where it does not shard."""
    model.forward = convert_outputs_to_fp32(torch.autocast(device.type, torch.bfloat16)(model.forward))


def whole_state(model: nn.Module, keeps: bool) -> dict[str, Tensor]:
    """The state dict of a model with whole tensors, gathered where they are sharded. All processes call it.

    ``keeps``: this process gets the tensors; others get {}, and hold no more than one of them at a time.
    """
    whole: dict[int, Tensor] = {}
    state = model.state_dict(keep_vars=True)
    for value in state.values():
        if id(value) not in whole:  # what is tied stays tied
            tensor = value.detach()
            tensor = tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor
            whole[id(value)] = tensor if keeps else tensor.new_empty(0)
    return {name: whole[id(value)] for name, value in state.items()} if keeps else {}
