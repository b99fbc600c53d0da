"""locant.hf.describe: which encoding is active, layer by layer."""

from __future__ import annotations

import dataclasses
import json

import pytest
from torch import nn

import locant.hf
from tests.hf_models import HEADS, LAYERS, ROWS, WIDTH, host, tokens


def test_an_attached_encoding_is_described_layer_by_layer() -> None:
    model = host("bert")
    locant.hf.attach(model, "shaw", clip=4)
    description = locant.hf.describe(model)
    (stack,) = description.stacks
    assert description.model == stack.model == "BertModel" and stack.attached and stack.family == "bert"
    assert [(d.layer, d.name, d.parameters, d.shared) for d in stack.layers] == [
        (i, "shaw", 9 * (WIDTH // HEADS), "no") for i in range(LAYERS)
    ]
    assert all((d.built_length, d.trained_length, d.max_length) == (ROWS, None, None) for d in stack.layers)
    assert str(description).splitlines()[4].split()[4:7] == [f"{ROWS}", "none", "seen"], "never trained"
    model.train()(tokens(2, 9))
    description = locant.hf.describe(model)
    assert description.stacks[0].layers[0].trained_length == 9
    assert str(description).splitlines()[4].split()[4:6] == [f"{ROWS}", "9"]
    assert stack.layers[0].beyond == "farther offsets share the last row"
    assert stack.switched_off == ("absolute (embeddings.position_embeddings)",) == stack.host
    assert stack.parameters == 2 * 9 * 8


@pytest.mark.parametrize(
    ("name", "shared", "limit", "beyond"),
    [
        ("absolute", "yes", ROWS, "an error"),
        ("t5", "yes", None, "farther offsets share the last bucket"),
        ("alibi", "yes", None, "defined at any length"),
        ("deberta", "in part", None, "farther offsets share the last row"),
        ("bert_r", "yes", ROWS, "an error; farther offsets share the last bucket"),
        ("tisa", "no", None, "defined at any length"),
    ],
)
def test_sharing_and_range_are_told(name: str, shared: str, limit: int | None, beyond: str) -> None:
    model = host("bert")
    locant.hf.attach(model, name)
    layer = locant.hf.describe(model).stacks[0].layers[1]
    assert (layer.name, layer.shared, layer.max_length, layer.beyond) == (name, shared, limit, beyond)


def test_a_table_that_is_extended_says_so() -> None:
    model = host("bert")
    locant.hf.attach(model, "absolute", extend="interpolate")
    layer = locant.hf.describe(model).stacks[0].layers[0]
    assert (layer.max_length, layer.beyond) == (None, "the table is extended (interpolate)")


def test_what_is_kept_is_not_switched_off() -> None:
    model = host("llama")
    locant.hf.attach(model, "t5", keep_absolute=True, backend="reference")
    (stack,) = locant.hf.describe(model).stacks
    assert stack.switched_off == () and stack.host == ("rotary (rotary_emb)",) and stack.backend == "reference"


@pytest.mark.parametrize(
    ("family", "name", "parameters", "built", "limit", "beyond"),
    [
        ("bert", "absolute of the host", ROWS * WIDTH, ROWS, ROWS, "an error"),
        ("roberta", "absolute of the host", (ROWS + 2) * WIDTH, ROWS, ROWS, "an error"),
        ("llama", "rotary of the host", 0, ROWS, None, "defined"),
        ("t5", "bucketed bias of the host", 32 * HEADS, 512, None, "farther offsets share the last bucket"),
    ],
)
def test_a_host_with_nothing_attached_describes_itself(
    family: str, name: str, parameters: int, built: int, limit: int | None, beyond: str
) -> None:
    (stack,) = locant.hf.describe(host(family)).stacks
    layer = stack.layers[0]
    assert not stack.attached and len(stack.layers) == LAYERS and stack.parameters == 0
    assert (layer.name, layer.parameters, layer.built_length, layer.trained_length) == (name, parameters, built, None)
    assert (layer.max_length, layer.beyond) == (limit, beyond)


def test_a_bare_encoder_has_no_positions() -> None:
    assert locant.hf.describe(host("bert").encoder).stacks[0].layers[0].name == "none"


def test_the_table_reads_well_and_the_fields_are_json() -> None:
    model = host("bert")
    locant.hf.attach(model, "tupe_r")
    text = str(locant.hf.describe(model))
    lines = text.splitlines()
    assert lines[0] == "model (BertModel, bert): attached, backend auto"
    assert lines[1] == "of the host: switched off absolute (embeddings.position_embeddings); kept nothing"
    assert lines[3].split()[:6] == ["layer", "encoding", "parameters", "shared", "built", "for"]
    assert lines[4].split()[:2] == ["0", "tupe_r"] and len(lines) == 4 + LAYERS
    assert json.loads(json.dumps(dataclasses.asdict(locant.hf.describe(model))))["model"] == "BertModel"


def test_a_model_without_attention_cannot_be_described() -> None:
    with pytest.raises(ValueError, match="Linear has no self-attention"):
        locant.hf.describe(nn.Linear(2, 2))
