"""All protocols at once: names in the plain form, what is skipped and why, progress, text, what is refused."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
from __future__ import annotations

import json
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import locant.analysis.protocols as whole
from locant.analysis import PROTOCOLS, analyze, plain
from locant.analysis.model import read_model
from locant.analysis.windows import special_tokens, text_windows
from tests.analysis_models import FAMILIES, family
from tests.hf_models import HEADS, LAYERS, ROWS, VOCABULARY, host, noisy, tokens
from tests.unchecked import unchecked

FAST = tuple(name for name in PROTOCOLS if name != "probe")


@pytest.fixture
def tokenizer():
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, **{f"w{i}": i for i in range(4, VOCABULARY)}}
    built = Tokenizer(models.WordLevel(words, unk_token="[MASK]"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    built.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    return PreTrainedTokenizerFast(tokenizer_object=built, **names)


def text(count, seed=0):
    return " ".join(f"w{i}" for i in tokens(1, count, seed=seed)[0].tolist())


def test_a_model_with_a_table_gives_everything(tokenizer):
    seen = []
    model = family("bert-mlm")
    found = analyze(
        model, tokenizer, [text(700), text(60)], length=17, name="tiny", progress=lambda *step: seen.append(step)
    )
    assert found.skipped == {} and set(found.seconds) == set(PROTOCOLS)
    plainly = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plainly["model"] == {
        "name": "tiny",
        "family": "bert",
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": 8,
        "model_dim": 24,
        "causal": False,
        "positions": f"a learned table of {ROWS} rows",
        "trained_length": ROWS,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    raw = plainly["translation_invariance"]["position_table"]["raw"]
    assert raw["n"] == ROWS and 0 < raw["r2"] < 1 and raw["null"] == pytest.approx(24 / (24 + ROWS))
    assert {"r2_off_diagonal", "null_shuffled", "profile", "map"} <= raw.keys()
    assert {"layernorm", "layernorm_meanword"} <= plainly["translation_invariance"]["position_table"].keys()
    assert raw["first"] is None
    assert plainly["phase_shift"]["perplexity"]["kind"] == "masked"
    assert plainly["probe"]["layers"] == [0, 1, 2]
    assert len(plainly["distance"]["mean"][1][2]) == 2 * 16 + 1
    assert plainly["distance"]["windows"] == 32 and plainly["correlations"]["sentences"] == 32
    for protocol in PROTOCOLS:
        steps = [(done, total) for name, done, total in seen if name == protocol]
        assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_analyzed(name):
    found = analyze(family(name), windows=tokens(4, 12), only=FAST)
    assert found.distance is not None and found.locality is not None and found.phase_shift is not None
    with_table = name not in ("llama", "t5", "t5-full", "mistral")
    assert (found.table is not None) == (found.correlations is not None) == with_table
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_cannot_run_has_its_reason():
    found = analyze(family("llama"), windows=tokens(4, 12), only=FAST)
    assert set(found.skipped) == {"translation_invariance", "correlations", "table"}
    assert "no position vectors" in found.skipped["correlations"] and found.correlations is None
    assert found.patterns.layers == () and found.patterns.attention is not None
    without_text = analyze(host("bert"), only=FAST, length=12)
    assert {"correlations", "distance", "phase_shift"} == set(without_text.skipped)
    assert "needs text" in without_text.skipped["distance"] and without_text.patterns.attention is None
    few = analyze(host("bert"), windows=tokens(6, 12), only=("probe", "table"))
    assert few.skipped == {"probe": "needs 8 windows of text or more, got 6"}
    with pytest.raises(ValueError, match=r"none of table can run on LlamaForCausalLM\. table: LlamaModel"):
        analyze(family("llama"), only="table", length=12)


def test_only_picks_protocols_in_their_order():
    found = analyze(host("bert"), only=("table", "translation_invariance"), length=12)
    assert list(found.seconds) == ["translation_invariance", "table"] and found.locality is None
    for only, message in (
        (("tabel",), "unknown protocol 'tabel'; did you mean 'table'"),
        (("zzz",), "unknown protocol 'zzz'; choose from translation_invariance"),
        ((), r"only=\(\) leaves nothing to do"),
    ):
        with pytest.raises(ValueError, match=message):
            analyze(host("bert"), only=only)


def test_attached_models_are_named():
    found = analyze(noisy(host("bert"), "tisa"), only="translation_invariance", length=12)
    assert found.model.positions == "tisa (attached)" and found.model.trained_length is None
    assert found.translation_invariance.kernels[0].needed[0] is not None


def test_the_same_seed_gives_the_same_numbers():
    one, other = (analyze(host("bert"), windows=tokens(3, 12), only=("locality", "table"), seed=4) for _ in range(2))
    assert plain(one.locality) == plain(other.locality) and plain(one.table) == plain(other.table)


# text


def test_windows_are_full_and_between_special_tokens(tokenizer):
    found = text_windows(tokenizer, [text(20), text(13, seed=1)], 10)
    assert found.shape == (4, 10) and found[:, 0].tolist() == [1] * 4 and found[:, -1].tolist() == [2] * 4
    assert found[:, 1:-1].flatten().tolist() == [*tokens(1, 20)[0].tolist(), *tokens(1, 13, seed=1)[0].tolist()][:32]
    bare = text_windows(tokenizer, [text(20)], 10, special=False)
    assert bare.flatten().tolist() == tokens(1, 20)[0].tolist()
    assert special_tokens(tokenizer) == ([1], [2])


def test_few_windows_are_spread_over_the_text(tokenizer):
    found = text_windows(tokenizer, [text(200)], 12, limit=4)
    assert found[:, 1].tolist() == tokens(1, 200)[0][[0, 50, 100, 150]].tolist()


def test_text_that_does_not_fill_a_window_is_refused(tokenizer):
    for length, message in ((10, "the text has 5 tokens but one window takes 8"), (2, "leaves no token beside 2")):
        with pytest.raises(ValueError, match=message):
            text_windows(tokenizer, [text(5)], length)
    with pytest.raises(ValueError, match="got 1 texts but tokenizer=None"):
        analyze(host("bert"), texts=[text(50)], length=12)
    with pytest.raises(ValueError, match="the text has 3 tokens but one window takes 10"):
        analyze(host("bert"), tokenizer, [text(3)], length=12)


# bad input


@pytest.mark.parametrize("length", [0, 1, 2])
def test_one_or_two_positions_have_no_offsets_to_compare(length):
    with pytest.raises(ValueError, match=f"length={length} has no offsets to compare"):
        analyze(host("bert"), length=length)


def test_bad_input_is_refused_before_any_work():
    with pytest.raises(ValueError, match="length=128 but the model has 29 positions"):
        analyze(host("bert"))
    broken = host("bert")
    with torch.no_grad():
        broken.encoder.layer[1].output.dense.bias[3] = math.inf
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.output\.dense\.bias holds 1 of 24"):
        analyze(broken, length=12)
    with pytest.raises(ValueError, match="token ids reach from 7 to 43 but the model's vocabulary has 43"):
        analyze(host("bert"), windows=torch.tensor([[7, 8, 43, 9]]), only="distance")
    with pytest.raises(ValueError, match="Linear is of no family"):
        analyze(torch.nn.Linear(2, 2))


def test_more_memory_than_there_is_says_what_to_lower(monkeypatch):
    monkeypatch.setattr(whole, "free_memory", lambda: 50_000)
    with pytest.raises(ValueError, match=r"3 heads at length=24 .* need 0\.0 GB but 0\.0 GB are free; lower length"):
        analyze(host("bert"), length=24)
    reader = read_model(host("bert"))
    with pytest.raises(
        ValueError, match=r"\(table of 29\) need .* leave table and translation_invariance out with only="
    ):
        whole.check_memory(reader, 24, ["table", "distance"])
    whole.check_memory(reader, 24, ["distance"])
    monkeypatch.setattr(whole, "free_memory", lambda: None)
    whole.check_memory(reader, 24, whole.PROTOCOLS)


def test_free_memory_is_read_from_the_system():
    free = whole.free_memory()
    assert free is not None and 10**8 < free < 10**14


def test_only_known_things_become_plain():
    assert plain({"a": (torch.tensor([1.0, math.nan]), math.inf, None, True)}) == {"a": [[1.0, None], None, None, True]}
    with pytest.raises(TypeError, match="a complex"):
        unchecked(plain)(1j)
