"""locant.hf.diagnose and `locant doctor`: faults of plain and of broken models are seen, attached models pass."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.bert.modeling_bert import BertEncoder
from typer.testing import CliRunner

import locant.hf
from locant.cli import app
from locant.hf import diagnose
from locant.hf.doctor import Diagnosis
from tests.hf_models import BERT_SIZES, HEADS, ROWS, T5_SIZES, WIDTH, first, host, noisy, remark, stir, tokens

PACKED = "packed, position_ids"
FAULTS = {  # what plain transformers v5 does to positions
    "bert": {"padding on the left", PACKED, "past the limit"},
    "roberta": {"padding id in text", "position_ids from 0", PACKED, "past the limit"},
    "gpt2": {"padding on the left", PACKED, "past the limit"},
    "llama": {PACKED},
    "t5": set(),
}


def t5() -> Any:
    torch.manual_seed(0)
    return stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1).eval()


def found(diagnosis: Diagnosis, check: str) -> Any:
    (finding,) = [finding for finding in diagnosis.findings if finding.check == check]
    return finding


def faults(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.faults}


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


# --- plain and attached hosts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAULTS)
def test_a_plain_host_shows_its_faults_from_memory_and_from_its_folder(family: str, tmp_path: Path) -> None:
    model = t5() if family == "t5" else host(family)
    assert faults(diagnose(model)) == FAULTS[family]
    again = diagnose(saved(model, tmp_path / "host"))
    assert faults(again) == FAULTS[family]
    assert found(again, "weights").figure == "all loaded"


@pytest.mark.parametrize("family", FAULTS)
@pytest.mark.parametrize("name", ["shaw", pytest.param("tupe_r", marks=pytest.mark.slow)])
def test_an_attached_host_has_none(family: str, name: str) -> None:
    model = noisy(t5() if family == "t5" else host(family), name)
    diagnosis = diagnose(model)
    assert diagnosis.healthy, str(diagnosis)
    assert diagnosis.encoding == name
    assert "order matters" in {finding.check.rpartition(": ")[2] for finding in diagnosis.findings}


def test_the_checks_are_made() -> None:
    names = [finding.check for finding in diagnose(noisy(host("gpt2"), "absolute")).findings]
    assert names == [
        "constants",
        "runs",
        "order matters",
        "padding on the right",
        "padding on the left",
        "padding id in text",
        "position_ids from 0",
        PACKED,
        "packed, use_cache=False",
        "packed, document_ids",
        "cache, token by token",
        "cache, in chunks",
        "generate, padded left",
        "past the limit",
        "save and load",
        "length in use",
    ]


def test_figures_and_advice_say_what_was_seen() -> None:
    diagnosis = diagnose(host("roberta"))
    assert found(diagnosis, "position_ids from 0").figure == "this model counts from 2"
    assert "add 2, or attach" in found(diagnosis, "position_ids from 0").advice
    assert "leaks 0.4" in found(diagnosis, PACKED).figure
    assert "pass use_cache=False" in found(diagnose(host("gpt2")), PACKED).advice
    text = str(diagnosis)
    assert (
        text.startswith("RobertaModel (absolute of the host)\n") and "position_ids from 0   FAULT   this model" in text
    )


def test_the_model_under_examination_stays_as_it_is() -> None:
    model, ids = noisy(host("bert"), "shaw").train(), tokens(2, 7)
    want, state = first(model(ids)), torch.get_rng_state()
    bars, level = T.utils.logging.is_progress_bar_enabled(), T.logging.get_verbosity()
    diagnose(model)
    assert (T.utils.logging.is_progress_bar_enabled(), T.logging.get_verbosity()) == (bars, level)
    assert model.training and model.dtype == torch.float32
    assert torch.equal(first(model(ids)), want) and torch.equal(torch.get_rng_state(), state)


def test_a_model_inside_a_wrapper_is_found() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = host("bert")

        def forward(self, features: dict[str, torch.Tensor]) -> Any:
            return self.inside(**features)

    assert {"padding on the left", PACKED} <= faults(diagnose(Wrapper()))


# --- does order matter ------------------------------------------------------------------------------------------------


def test_a_bare_encoder_without_position_is_noticed() -> None:
    torch.manual_seed(0)
    encoder: Any = stir(BertEncoder(T.BertConfig(**BERT_SIZES, position_embedding_type="relative_key")), 1).eval()
    diagnosis = diagnose(encoder)
    assert "not at all: permuting changes" in found(diagnosis, "order matters").figure
    assert found(diagnosis, "config").figure.startswith("asks for 'relative_key', which transformers v5 dropped")
    assert diagnose(noisy(encoder, "shaw")).healthy


def test_an_encoding_at_its_neutral_value_does_nothing_yet_and_none_is_meant() -> None:
    neutral = found(diagnose(locant.hf.attach(host("bert"), "huang_m1")), "order matters")
    assert neutral.verdict == "FAULT" and "'huang_m1' changes nothing yet" in neutral.advice
    none = found(diagnose(locant.hf.attach(host("bert"), "none")), "order matters")
    assert (none.verdict, none.figure) == ("ok", "no position, as attached ('none')")


def test_causality_alone_is_no_encoding() -> None:
    model = host("gpt2")
    model.transformer.wpe.weight.data.zero_()
    finding = found(diagnose(model), "order matters")
    assert finding.verdict == "FAULT" and finding.figure.startswith("only through the causal mask")
    assert found(diagnose(locant.hf.attach(host("gpt2"), "none")), "order matters").verdict == "ok"


# --- hand-broken models -----------------------------------------------------------------------------------------------


class Restarting(nn.Embedding):
    """A position table that counts every call from 0."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.arange(input.shape[-1])[None])


class Wrapping(nn.Embedding):
    """A position table that starts again past its end."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input % self.num_embeddings)


def with_table(kind: Callable[..., nn.Embedding]) -> Any:
    model = host("gpt2")
    table = kind(ROWS, WIDTH)
    table.load_state_dict(model.transformer.wpe.state_dict())
    model.transformer.wpe = table
    return model


def test_positions_that_restart_with_a_cache_are_seen() -> None:
    diagnosis = diagnose(with_table(Restarting))
    assert {"cache, token by token", "cache, in chunks", "generate, padded left"} <= faults(diagnosis)
    assert "use_cache=False" in found(diagnosis, "cache, in chunks").advice


def test_positions_that_wrap_around_are_seen() -> None:
    assert found(diagnose(with_table(Wrapping)), "past the limit").figure == "30 tokens run through a table for 29"


def test_an_attention_function_without_a_mask_function_is_seen() -> None:
    AttentionInterface.register("maskless", sdpa_attention_forward)
    model = host("bert")
    model.config._attn_implementation_internal = "maskless"
    finding = found(diagnose(model), "padding on the right")
    assert finding.verdict == "FAULT" and "the mask is not used at all" in finding.advice


class Sinusoid(T.PreTrainedModel):
    """A model of one's own, whose table is a constant that is not stored."""

    config_class = T.BertConfig
    base_model_prefix = "inside"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inside = T.BertModel(config)
        self.register_buffer(
            "table", torch.sin(torch.arange(ROWS)[:, None] * 0.3 ** torch.arange(WIDTH)), persistent=False
        )
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        x = self.inside.embeddings.word_embeddings(input_ids) + self.table[: input_ids.shape[1]]
        return self.inside(inputs_embeds=x, attention_mask=attention_mask, **kwargs)

    @property
    def base_model(self) -> Any:
        return self


def test_a_constant_that_loading_fills_with_garbage_is_seen(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = stir(Sinusoid(T.BertConfig(**BERT_SIZES)), 1).eval()
    good = diagnose(model)
    assert found(good, "constants").verdict == "ok"
    assert found(good, "save and load").verdict == "FAULT"
    loaded = Sinusoid.from_pretrained(saved(model, tmp_path / "own"))
    assert "constants" in faults(diagnose(loaded))
    loaded.table.fill_(0.125)
    finding = found(diagnose(loaded), "constants")
    assert finding.figure == "not what Sinusoid builds: buffer table" and "_init_weights" in finding.advice


def test_tensors_on_meta_and_numbers_that_are_none_are_seen() -> None:
    model = host("bert")
    model.encoder.slopes = torch.ones(3, device="meta")
    diagnosis = diagnose(model)
    assert found(diagnosis, "constants").figure == "on the meta device: attribute encoder.slopes"
    assert [finding.check for finding in diagnosis.findings] == ["constants", "length in use"]
    for value, name in ((float("nan"), "parameter embeddings.LayerNorm.bias"), (float("inf"), "parameter embeddings.")):
        model = host("bert")
        model.embeddings.LayerNorm.bias.data[3] = value
        diagnosis = diagnose(model)
        assert name in found(diagnosis, "constants").figure
        assert found(diagnosis, "runs").verdict == "FAULT"


def test_half_precision_that_overflows_is_seen() -> None:
    model = host("bert")
    model.encoder.layer[1].intermediate.dense.bias.data.fill_(4000.0)
    model.encoder.layer[1].output.dense.weight.data.fill_(1.0)
    model = model.half()
    finding = found(diagnose(model), "runs")
    assert (finding.verdict, finding.figure) == ("FAULT", "outputs of 11 tokens are not finite in float16")
    assert model.dtype == torch.float16


def test_a_model_that_fails_is_a_finding() -> None:
    model = host("bert")
    model.encoder.layer[0].attention.self.query = nn.Linear(WIDTH, WIDTH + 1)
    finding = found(diagnose(model), "runs")
    assert finding.verdict == "FAULT" and "RuntimeError" in finding.figure


# --- lengths ----------------------------------------------------------------------------------------------------------


def test_the_length_in_use_is_held_against_table_and_training(tmp_path: Path) -> None:
    folder = saved(host("roberta"), tmp_path / "roberta")
    assert found(diagnose(folder), "length in use").figure == "none stated; trained for 29, limit 29"
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": ROWS + 2}))
    finding = found(diagnose(folder), "length in use")
    assert finding.verdict == "FAULT"
    assert finding.figure == "31 tokenizer_config.json (model_max_length), but it serves 29"
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    finding = found(diagnose(folder), "length in use")
    assert finding.verdict == "ok" and finding.figure.startswith("20 sentence_bert_config.json")
    relative = locant.hf.attach(host("bert"), "shaw")
    assert found(diagnose(relative, length=29), "length in use").verdict == "ok"
    finding = found(diagnose(relative, length=64), "length in use")
    assert (finding.verdict, finding.figure) == ("FAULT", "64 asked for, but trained for 29")


def test_the_length_of_training_is_recorded_with_what_is_attached(tmp_path: Path) -> None:
    model = locant.hf.attach(host("bert"), "shaw").train()
    model(tokens(2, 9))
    folder = saved(model, tmp_path / "trained")
    assert found(diagnose(folder, length=9), "length in use").verdict == "ok"
    assert found(diagnose(folder, length=10), "length in use").figure == "10 asked for, but trained for 9"


def test_one_token_too_many_is_one_clear_error_where_locant_is_attached() -> None:
    assert found(diagnose(locant.hf.guard(host("gpt2"))), "past the limit").figure == "token 30 is refused"
    kept = diagnose(noisy(host("roberta"), "shaw", keep_absolute=True))
    assert (found(kept, "past the limit").verdict, found(kept, "past the limit").figure) == (
        "ok",
        "token 30 is refused",
    )
    clipped = diagnose(noisy(host("bert"), "absolute", extend="clip"))
    assert found(clipped, "past the limit").figure == "defined at any length"
    short = diagnose(noisy(host("bert"), "absolute", max_length=6))
    assert found(short, "behavior").figure == "serves 6 tokens, a probe needs 8"


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_version_four_with_relative_keys_is_explained(tmp_path: Path) -> None:
    folder = saved(host("bert"), tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"encoder.layer.{layer}.attention.self.distance_embedding.weight"
        tensors[name] = torch.randn(2 * ROWS - 1, WIDTH // HEADS)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key_query"}))
    diagnosis = diagnose(folder)
    finding = found(diagnosis, "folder")
    assert finding.verdict == "FAULT" and "relative_key_query of bert (2 tables)" in finding.figure
    assert "locant.hf.from_legacy" in finding.advice
    assert diagnosis.encoding == "absolute of the host" and PACKED in faults(diagnosis), "what plain v5 makes of it"
    assert diagnose(locant.hf.from_legacy(folder)).healthy


def test_a_folder_with_an_encoding_says_that_it_needs_locant(tmp_path: Path) -> None:
    folder = saved(noisy(host("bert"), "shaw"), tmp_path / "attached")
    diagnosis = diagnose(folder)
    assert diagnosis.healthy, str(diagnosis)
    assert diagnosis.encoding == "shaw"
    assert found(diagnosis, "folder").figure == "shaw attached; without locant.hf imported it loads as a plain host"
    config = json.loads((folder / "config.json").read_text())
    del config["locant"]
    (folder / "config.json").write_text(json.dumps(config))
    diagnosis = diagnose(folder)
    assert [finding.check for finding in diagnosis.findings] == ["folder"] and not diagnosis.healthy
    assert "half-converted: 2 tensors of an attached encoding" in found(diagnosis, "folder").figure


def test_a_file_that_is_cut_off_is_a_finding_and_none_an_error(tmp_path: Path) -> None:
    folder = saved(host("bert"), tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    diagnosis = diagnose(folder)
    assert [finding.check for finding in diagnosis.findings] == ["folder"] and not diagnosis.healthy
    assert "model.safetensors is cut off" in found(diagnosis, "folder").figure
    assert str(diagnosis).splitlines()[0].endswith("model (not loaded)")
    file.unlink()
    with pytest.raises(ValueError, match=r"no model could be loaded from .* holds none of model\.safetensors"):
        diagnose(folder)


def test_weights_that_are_missing_or_left_over_are_told(tmp_path: Path) -> None:
    folder = saved(host("bert"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["cls.bias"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    finding = found(diagnose(folder), "weights")
    assert (finding.verdict, finding.figure) == ("ok", "all loaded (1 in the files are not used, such as cls.bias)")
    del tensors["embeddings.position_embeddings.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    finding = found(diagnose(folder), "weights")
    assert finding.verdict == "FAULT" and "1 not in the files, drawn anew (embeddings.position_emb" in finding.figure


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds thesis\.tex, needed a config\.json"):
        diagnose(tmp_path)
    with pytest.raises(ValueError, match="away' is no folder, needed that of a saved model"):
        diagnose(tmp_path / "away")
    with pytest.raises(ValueError, match="no folder 'org/never-cached' here, and no model of that name"):
        diagnose("org/never-cached")
    with pytest.raises(ValueError, match="diagnose: Linear takes input, needed input_ids"):
        diagnose(nn.Linear(3, 5))

    class Widthless(nn.Module):
        def forward(self, hidden_states: Any) -> Any:
            return hidden_states

    with pytest.raises(ValueError, match="diagnose: Widthless has no linear layer that tells its width"):
        diagnose(Widthless())


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json_and_ends_with_a_code(tmp_path: Path) -> None:
    good, bad = saved(t5(), tmp_path / "t5"), saved(host("roberta"), tmp_path / "roberta")
    run = CliRunner().invoke(app, ["doctor", str(good)], env={"COLUMNS": "140"})
    assert run.exit_code == 0, run.output
    assert "no fault" in run.output and "T5ForConditionalGeneration, bucketed bias of the host" in run.output
    run = CliRunner().invoke(app, ["doctor", str(bad)], env={"COLUMNS": "140"})
    assert run.exit_code == 1
    assert "this model counts from 2" in run.output and "4 faults" in run.output
    assert len(run.output.splitlines()) < 40, "one screen"
    run = CliRunner().invoke(app, ["doctor", str(bad), "--json", "--length", "64"])
    facts = json.loads(run.stdout)
    assert run.exit_code == 1 and facts["healthy"] is False and facts["model"] == "RobertaModel"
    assert {"check", "verdict", "figure", "advice"} == set(facts["findings"][0])
    assert "64 asked for, but it serves 29" in {finding["figure"] for finding in facts["findings"]}
    run = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert run.exit_code == 2 and "needed a config.json" in run.stderr


@pytest.mark.parametrize(
    ("change", "check", "told"),
    [
        (
            lambda r, t: t.pop("locant.encodings.1.table"),
            "weights",
            r"not loaded: .*shape None for 'encodings\.1\.table'",
        ),
        (
            lambda r, t: r["stacks"][0].update(encoding="shawl"),
            "folder",
            r"cannot be built here: unknown encoding 'shawl'",
        ),
        (lambda r, t: r["stacks"][0].update(options=3), "folder", r"stacks\[0\]\.options = 3, needed options by name"),
        (
            lambda r, t: r["stacks"][0].update(options={"clip": []}),
            "folder",
            r"cannot be built here: .*clip=\[\] is a list",
        ),
        (lambda r, t: r.update(stacks=[]), "folder", r"has stacks = \[\], needed a list with one entry for each stack"),
        (lambda r, t: t.update({"pooler.dense.weight": torch.ones(3, 5)}), "weights", r"not loaded: .*mismatch"),
    ],
)
def test_what_keeps_a_folder_from_loading_is_a_finding(change: Any, check: str, told: str, tmp_path: Path) -> None:
    folder = saved(noisy(host("bert"), "shaw"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config["locant"], tensors)
    (folder / "config.json").write_text(json.dumps(config))
    remark(folder, tensors)
    run = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    assert run.exit_code == 1, run.output
    (finding,) = [f for f in json.loads(run.stdout)["findings"] if f["verdict"] == "FAULT"]
    assert finding["check"] == check and re.search(told, finding["figure"]), finding
    assert CliRunner().invoke(app, ["doctor", str(folder)]).exit_code == 1


def test_a_broken_file_beside_a_model_does_not_stop_the_examination(tmp_path: Path) -> None:
    folder = saved(host("bert"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{")
    finding = found(diagnose(folder), "length in use")
    assert finding.verdict == "cannot" and "tokenizer_config.json is cut off or not JSON" in finding.figure
