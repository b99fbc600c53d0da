"""locant.hf.extend, capacity and guard: rows by rule, reserved rows, buffers, configs, rotary scales, errors."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import transformers as T
from typer.testing import CliRunner

import locant
import locant.hf
from locant.cli import app
from locant.hf.lengths import by_length, extend_and_measure, load_with_head
from locant.hf.resample import RULES, stretch, stretch_signed
from tests.hf_models import BERT_SIZES, ROWS, WIDTH, attached, first, host, noisy, stir, tokens


def waves(rows: int, width: int = 8) -> torch.Tensor:
    return locant.load("sinusoidal", model_dim=width).waves(torch.arange(rows))


# --- rules ---


@pytest.mark.parametrize("rule", RULES)
def test_as_many_rows_as_before_are_the_same_bit_for_bit(rule: str) -> None:
    table = torch.randn(7, 5)
    longer = stretch(table, 7, rule)
    assert torch.equal(longer, table) and longer.data_ptr() != table.data_ptr()


@pytest.mark.parametrize("rule", ["tile", "clip", "fit"])
def test_rules_that_go_on_keep_the_trained_rows(rule: str) -> None:
    table = torch.randn(7, 5)
    assert torch.allclose(stretch(table, 17, rule)[:7], table, atol=1e-6)


def test_interpolation_is_the_loop_that_users_write() -> None:
    # https://github.com/dwzhu-pku/LongEmbed/issues/7
    table, longer = torch.randn(7, 5, dtype=torch.float64), 19
    want = torch.empty(longer, 5, dtype=torch.float64)
    for p in range(longer):
        place = p * 6 / 18
        low = min(math.floor(place), 5)
        want[p] = table[low] * (1 - (place - low)) + table[low + 1] * (place - low)
    got = stretch(table, longer, "interpolate")
    assert torch.allclose(got, want, atol=1e-12)
    assert torch.equal(got[0], table[0]) and torch.allclose(got[-1], table[-1], atol=1e-12)


def test_tiling_and_clipping_are_exact() -> None:
    table = torch.randn(5, 3)
    assert torch.equal(stretch(table, 12, "tile"), table[torch.arange(12) % 5])
    assert torch.equal(stretch(table, 12, "clip"), table[torch.arange(12).clamp(max=4)])


def test_fit_goes_on_with_a_sinusoid_exactly_and_never_grows() -> None:
    assert torch.allclose(stretch(waves(29), 60, "fit"), waves(60), atol=1e-9)
    rough = torch.randn(29, 8, dtype=torch.float64)
    assert torch.allclose(stretch(rough, 90, "fit")[29:].norm(dim=1), rough[-1].norm().expand(61), atol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_signed_tables_grow_on_both_sides_alike(rule: str) -> None:
    table = torch.randn(2 * 4 + 1, 8, dtype=torch.float64)
    longer, mirrored = stretch_signed(table, 9, rule), stretch_signed(table.flip(0), 9, rule)
    assert longer.shape == (19, 8) and torch.equal(longer[9], table[4])
    assert torch.allclose(mirrored.flip(0), longer)
    if rule != "interpolate":
        assert torch.allclose(longer[5:14], table, atol=1e-12)
    wanted = {"tile": table[4 + 1], "clip": table[4 + 4], "interpolate": None, "fit": None}[rule]
    assert wanted is None or torch.equal(longer[9 + 5], wanted)


def test_rules_refuse_what_they_cannot() -> None:
    with pytest.raises(ValueError, match=r"unknown rule='nearest'; choose 'interpolate', 'tile'"):
        stretch(torch.zeros(3, 2), 5, "nearest")
    with pytest.raises(ValueError, match=r"2 rows were asked for but the table has 3"):
        stretch(torch.zeros(3, 2), 2, "clip")
    with pytest.raises(ValueError, match=r"rule='fit' needs 2 rows or more but the table has 1"):
        stretch(torch.zeros(1, 2), 2, "fit")


# --- tables of hosts ---


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", ["bert", "electra", "albert", "distilbert", "gpt2"])
def test_a_longer_host_runs_at_once_and_follows_its_rule(family: str, rule: str) -> None:
    model = host(family)
    short, long = tokens(2, 8), tokens(2, 41, seed=1)
    want = first(model(short))
    assert locant.hf.capacity(model) == ROWS
    assert locant.hf.extend(model, 41, rule) is model
    assert locant.hf.capacity(model) == 41 and model.config.max_position_embeddings == 41
    assert torch.isfinite(first(model(long))).all()
    if rule != "interpolate":
        assert torch.allclose(first(model(short)), want, atol=1e-5)
    with pytest.raises(ValueError, match=r"has 41 positions but the input reaches 42"):
        model(tokens(1, 42))


def test_clipped_rows_equal_explicit_ids() -> None:
    model, ids = host("bert"), tokens(2, 37)
    clipped = torch.arange(37).clamp(max=ROWS - 1)[None]
    want = first(
        model(inputs_embeds=model.embeddings.word_embeddings(ids), position_ids=clipped, token_type_ids=0 * ids)
    )
    assert torch.allclose(first(locant.hf.extend(model, 37, "clip")(ids)), want, atol=1e-5)


@pytest.mark.parametrize("rule", ["tile", "interpolate", "clip", "fit"])
def test_reserved_rows_of_roberta_are_kept(rule: str) -> None:
    # https://github.com/LennartKeller/roberta2longformer/issues/2: tiling started at the reserved rows
    model = host("roberta")
    old = model.embeddings.position_embeddings.weight.detach().clone()
    assert old.shape[0] == ROWS + 2 and locant.hf.capacity(model) == ROWS
    locant.hf.extend(model, 3 * ROWS, rule)
    table = model.embeddings.position_embeddings
    new = table.weight.detach()
    assert new.shape[0] == 3 * ROWS + 2 and torch.equal(new[:2], old[:2])
    assert table.num_embeddings == 3 * ROWS + 2 and table.padding_idx == 1
    assert model.config.max_position_embeddings == 3 * ROWS + 2
    if rule == "tile":
        assert all(torch.equal(new[2 + i], old[2 + i % ROWS]) for i in range(3 * ROWS))
    assert torch.isfinite(first(model(tokens(2, 3 * ROWS)))).all()
    with pytest.raises(ValueError, match=rf"roberta has {3 * ROWS} positions but the input reaches {3 * ROWS + 1}"):
        model(tokens(1, 3 * ROWS + 1))


def test_nothing_is_shared_with_what_was_before() -> None:
    # https://github.com/allenai/longformer/issues/129: a forgotten buffer, and storage shared between copies
    config = T.BertConfig(**BERT_SIZES)
    model, other = (stir(T.BertModel(config), 1).eval() for _ in range(2))
    old = model.embeddings.position_embeddings.weight
    locant.hf.extend(model, 2 * ROWS, "tile")
    assert config.max_position_embeddings == other.config.max_position_embeddings == ROWS
    new = model.embeddings.position_embeddings.weight
    before = old.detach().clone()
    with torch.no_grad():
        new[0] += 1
    assert torch.equal(old, before) and not torch.equal(new[0], new[ROWS])
    for name in ("position_ids", "token_type_ids"):
        assert model.embeddings.get_buffer(name).shape == (1, 2 * ROWS)
    assert torch.equal(model.embeddings.position_ids[0], torch.arange(2 * ROWS))
    first(model(tokens(2, 2 * ROWS))).sum().backward()
    assert new.grad is not None and bool((new.grad.abs().sum(1) > 0).all())
    assert torch.isfinite(first(other(tokens(2, ROWS)))).all()


def test_an_extended_model_is_saved_and_loaded_by_transformers(tmp_path: Any) -> None:
    model, ids = locant.hf.extend(host("roberta"), 43), tokens(2, 43)
    model.save_pretrained(tmp_path / "long")
    again = T.RobertaModel.from_pretrained(tmp_path / "long").eval()
    assert torch.equal(first(again(ids)), first(model(ids)))
    assert locant.hf.capacity(again) == 43


def test_encoder_and_decoder_grow_together() -> None:
    sizes: dict[str, Any] = dict(
        vocab_size=43, d_model=24, encoder_layers=1, decoder_layers=1, max_position_embeddings=17
    )
    heads: dict[str, Any] = dict(
        encoder_attention_heads=3, decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20
    )
    model = T.BartModel(T.BartConfig(**sizes, **heads)).eval()
    locant.hf.extend(model, 31)
    assert model.config.max_position_embeddings == 31
    for stack in (model.encoder, model.decoder):
        assert stack.embed_positions.weight.shape[0] == 33
    assert torch.isfinite(first(model(tokens(2, 31), decoder_input_ids=tokens(2, 30)))).all()


def test_a_buffer_of_unknown_meaning_is_not_guessed() -> None:
    model = host("bert")
    model.embeddings.register_buffer("marks", torch.arange(ROWS) % 3)
    with pytest.raises(ValueError, match=rf"the buffer marks of BertEmbeddings has {ROWS} entries"):
        locant.hf.extend(model, 40)
    assert len(model.embeddings.position_embeddings.weight) == ROWS


# --- one token too many ---


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2"])
def test_a_guarded_host_refuses_the_first_token_too_many(family: str) -> None:
    # https://github.com/huggingface/transformers/issues/125, /issues/9116: shapes decide, not contents
    model = locant.hf.guard(host(family))
    want = first(model(tokens(2, ROWS)))
    assert torch.isfinite(want).all()
    ids, mask = tokens(2, ROWS + 1), torch.ones(2, ROWS + 1, dtype=torch.long)
    mask[0, ROWS - 3 :] = 0
    with pytest.raises(ValueError, match=rf"{family} has {ROWS} positions but the input reaches {ROWS + 1}; truncate"):
        model(ids, attention_mask=mask)
    again = copy.deepcopy(model)
    with pytest.raises(ValueError, match=f"reaches {ROWS + 1}"):
        again(ids)
    assert torch.equal(first(again(tokens(2, ROWS))), want)


def test_generation_stops_with_the_same_error() -> None:
    # https://github.com/huggingface/transformers/issues/530
    model = locant.hf.guard(host("gpt2"))
    with pytest.raises(ValueError, match=rf"gpt2 has {ROWS} positions but the input reaches {ROWS + 1}"):
        model.generate(tokens(1, 3), max_new_tokens=40, do_sample=False)
    longer = locant.hf.extend(model, 43)
    assert longer.generate(tokens(1, 3), max_new_tokens=40, do_sample=False).shape == (1, 43)


def test_explicit_ids_are_read_as_they_are() -> None:
    model = locant.hf.guard(host("bert"))
    with pytest.raises(ValueError, match=rf"bert has {ROWS} positions but the input reaches {ROWS + 6}"):
        model(tokens(1, 3), position_ids=torch.tensor([[0, 1, ROWS + 5]]))


def test_what_is_attached_takes_over_from_the_guard_and_gives_back() -> None:
    model = locant.hf.guard(host("bert"))
    noisy(model, "tisa")
    assert torch.isfinite(first(model(tokens(1, 2 * ROWS)))).all()
    locant.hf.detach(model)
    with pytest.raises(ValueError, match=f"reaches {2 * ROWS}"):
        model(tokens(1, 2 * ROWS))


def test_a_model_without_a_table_needs_no_guard() -> None:
    with pytest.raises(ValueError, match="T5EncoderModel has no table of positions"):
        locant.hf.guard(host("t5"))
    assert locant.hf.capacity(host("t5")) is None


# --- rotary ---


def llama_waves(model: Any) -> torch.Tensor:
    rotary = model.get_submodule("model.rotary_emb")
    return rotary.inv_freq


def test_rotary_interpolation_divides_positions_at_once() -> None:
    model, plain = host("llama"), host("llama")
    ids = tokens(2, 9)
    locant.hf.extend(model, 2 * ROWS)
    assert torch.allclose(llama_waves(model), llama_waves(plain) / 2)
    assert model.config.rope_parameters["rope_type"] == "linear" and model.config.max_position_embeddings == 2 * ROWS
    even = torch.arange(0, 18, 2)[None]
    assert torch.allclose(first(model(ids, position_ids=even)), first(plain(ids, position_ids=even // 2)), atol=1e-5)


def test_fit_keeps_the_fastest_wave_and_slows_the_slowest() -> None:
    model, plain = host("llama"), host("llama")
    locant.hf.extend(model, 4 * ROWS, "fit")
    ratio = llama_waves(plain) / llama_waves(model)
    assert torch.allclose(ratio[[0, -1]], torch.tensor([1.0, 4.0]), atol=1e-4) and bool((ratio.diff() > 0).all())


def test_theta_is_one_option_and_saved(tmp_path: Any) -> None:
    # https://github.com/AnswerDotAI/ModernBERT/issues/181
    model = locant.hf.extend(host("llama"), 2 * ROWS, theta=5e5)
    width = 2 * len(llama_waves(model))
    want = 5e5 ** (-torch.arange(0, width, 2) / width)
    assert torch.allclose(llama_waves(model), want)
    model.save_pretrained(tmp_path / "long")
    again = T.LlamaForCausalLM.from_pretrained(tmp_path / "long").eval()
    ids = tokens(1, 2 * ROWS)
    assert torch.allclose(llama_waves(again), want) and torch.equal(first(again(ids)), first(model(ids)))


@pytest.mark.parametrize("rule", ["interpolate", "fit"])
def test_rope_of_locant_is_scaled_like_that_of_the_host(rule: str) -> None:
    plain, ids = host("llama"), tokens(2, 2 * ROWS)
    ours = host("llama")
    locant.hf.attach(ours, "rope")
    for model in (plain, ours):
        locant.hf.extend(model, 2 * ROWS, rule)
    assert torch.allclose(first(ours(ids)), first(plain(ids)), atol=2e-5)


def test_rules_for_tables_mean_nothing_to_waves() -> None:
    with pytest.raises(ValueError, match=r"rule='tile' is for tables but the rotary positions of llama have none"):
        locant.hf.extend(host("llama"), 40, "tile")
    with pytest.raises(ValueError, match=r"theta=100.0 is for rotary positions but bert has a table"):
        locant.hf.extend(host("bert"), 40, theta=100.0)
    with pytest.raises(ValueError, match=r"theta=0.0 gives no wavelengths"):
        locant.hf.extend(host("llama"), 40, theta=0.0)
    with pytest.raises(ValueError, match=r"the rotary positions of llama would get 0.345 times their length"):
        locant.hf.extend(host("llama"), 10)
    twice = locant.hf.extend(host("llama"), 40)
    with pytest.raises(ValueError, match=r"set by .*'linear'.*, and only one plain wave scale"):
        locant.hf.extend(twice, 80)


# --- what locant attached ---


@pytest.mark.parametrize("name", ["huang_m4", "shaw", "huang_m3", "huang_m1", "huang_m2"])
@pytest.mark.parametrize("options", [{}, {"clip": 4}])
def test_tables_of_offsets_grow_their_radius(name: str, options: dict[str, Any]) -> None:
    model, ids = noisy(host("bert"), name, **options), tokens(2, 9)
    old = attached(model).layers()[0].rule.clip
    want, far = first(model(ids)), first(model(tokens(2, 3 * ROWS)))
    locant.hf.extend(model, 3 * ROWS, "clip")
    layers = attached(model).layers()
    assert layers[0].rule.clip == 3 * (old + 1) - 1 and len({id(layer) for layer in layers}) == 2
    assert torch.allclose(first(model(ids)), want, atol=1e-5), "clip changes nothing that was defined"
    assert torch.allclose(first(model(tokens(2, 3 * ROWS))), far, atol=1e-5)


@pytest.mark.parametrize("name", ["absolute", "tupe_a", "tupe_r", "bert_ad", "absolute+tisa"])
@pytest.mark.parametrize("rule", RULES)
def test_tables_of_positions_get_rows(name: str, rule: str) -> None:
    model, ids = noisy(host("bert"), name), tokens(2, 8)
    want = first(model(ids))
    assert locant.hf.capacity(model) == ROWS
    locant.hf.extend(model, 41, rule)
    assert locant.hf.capacity(model) == 41
    assert torch.isfinite(first(model(tokens(2, 41)))).all()
    if rule != "interpolate":
        assert torch.allclose(first(model(ids)), want, atol=1e-5)
    with pytest.raises(ValueError, match=r"positions reach 42 but the table has 41 rows"):
        model(tokens(1, 42))


def test_rows_of_special_tokens_and_the_first_row_of_tupe_stay() -> None:
    model = noisy(host("bert"), "huang_m4", untie_cls=True, clip=5)
    old = attached(model).layers()[1].table.detach().clone()
    locant.hf.extend(model, 2 * ROWS, "tile")
    new = attached(model).layers()[1].table.detach()
    assert new.shape[1] == 2 * 11 + 1 + 2 and torch.equal(new[:, -2:], old[:, -2:])
    assert torch.equal(new[:, 11], old[:, 5]) and torch.equal(new[:, 11 + 6], old[:, 5 + 1])
    model = noisy(host("bert"), "tupe_a")
    old = attached(model).layers()[0].table.detach().clone()
    locant.hf.extend(model, 2 * ROWS, "tile")
    new = attached(model).layers()[0].table.detach()
    assert torch.equal(new[0], old[0]) and torch.equal(new[1 + ROWS :], old[1:])


def test_an_extended_attachment_is_saved_and_loaded(tmp_path: Any) -> None:
    model, ids = noisy(host("bert"), "huang_m4", clip=6), tokens(2, 2 * ROWS)
    locant.hf.extend(model, 2 * ROWS, "fit")
    locant.hf.save(model, tmp_path / "long")
    again = locant.hf.load(host("bert"), tmp_path / "long")
    assert torch.equal(first(again(ids)), first(model(ids)))
    assert attached(again).layers()[0].rule.clip == 13


def test_a_kept_table_grows_with_what_is_beside_it() -> None:
    model = noisy(host("bert"), "huang_m4", keep_absolute=True)
    assert locant.hf.capacity(model) == ROWS
    locant.hf.extend(model, 37, "tile")
    assert locant.hf.capacity(model) == 37 and torch.isfinite(first(model(tokens(2, 37)))).all()
    assert attached(model).layers()[0].rule.clip == 36
    with pytest.raises(ValueError, match="has 37 positions but the input reaches 38"):
        model(tokens(2, 38))


def test_frozen_rows_stay_frozen_and_others_learn() -> None:
    model = noisy(host("bert"), "shaw")
    attached(model).layers()[0].table.requires_grad_(False)
    locant.hf.extend(model, 41)
    assert [layer.table.requires_grad for layer in attached(model).layers()] == [False, True]
    first(model(tokens(2, 9))).sum().backward()
    assert attached(model).layers()[1].table.grad.abs().sum() > 0


def test_extend_refuses_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"length=0 leaves no tokens"):
        locant.hf.extend(host("bert"), 0)
    with pytest.raises(ValueError, match=r"unknown rule='linear'; choose 'interpolate'"):
        locant.hf.extend(host("bert"), 40, "linear")
    with pytest.raises(ValueError, match=rf"bert already serves {ROWS} tokens and length=9 is less"):
        locant.hf.extend(host("bert"), 9)
    with pytest.raises(ValueError, match=rf"tupe_a already serves {ROWS} tokens and length=9 is less"):
        locant.hf.extend(noisy(host("bert"), "tupe_a"), 9)
    with pytest.raises(ValueError, match=r"nothing limits the length of BertModel \(tisa is defined at any length\)"):
        locant.hf.extend(noisy(host("bert"), "tisa"), 40)
    with pytest.raises(ValueError, match=r"nothing limits the length of T5EncoderModel \(bias is defined"):
        locant.hf.extend(host("t5"), 40)
    with pytest.raises(ValueError, match=r"rule='fit' turns vectors, but each row of table of huang_m2 is a number"):
        locant.hf.extend(noisy(host("bert"), "huang_m2"), 40, "fit")
    with pytest.raises(ValueError, match=rf"how deberta lays out its {2 * ROWS} rows is not known"):
        locant.hf.extend(noisy(host("bert"), "deberta"), 40)
    with pytest.raises(ValueError, match=r"theta=9.0 is for rotary positions but shaw has none"):
        locant.hf.extend(noisy(host("bert"), "shaw"), 40, theta=9.0)
    given = host("bert")
    locant.hf.attach(given, locant.load("absolute", model_dim=WIDTH, max_length=ROWS))
    with pytest.raises(ValueError, match=r"absolute was attached as an object, which cannot be built anew"):
        locant.hf.extend(given, 40)


def test_tables_that_are_no_rows_of_tokens_are_refused() -> None:
    sizes: dict[str, Any] = dict(hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=37)
    model = T.ViTModel(T.ViTConfig(**sizes, image_size=12, patch_size=4))
    with pytest.raises(ValueError, match=r"the positions of vit are embeddings.position_embeddings, and only one"):
        locant.hf.extend(model, 40)


def test_a_refusal_changes_nothing() -> None:
    model = noisy(host("bert"), "huang_m2", keep_absolute=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="rule='fit' turns vectors"):
        locant.hf.extend(model, 40, "fit")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert locant.hf.capacity(model) == ROWS and model.config.max_position_embeddings == ROWS


# --- by length, and the command ---


class Words:
    """A tokenizer of one word each, with the special tokens of BERT; saves and loads as one of transformers."""

    @staticmethod
    def save(folder: Any) -> None:
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(38))]
        (folder / "vocab.txt").write_text("\n".join(names) + "\n")
        T.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)


def text(words: int) -> str:
    order = torch.randint(38, (words,), generator=torch.Generator().manual_seed(0))
    return " ".join(f"w{i}" for i in order.tolist())


@pytest.fixture
def saved(tmp_path: Any) -> dict[str, Any]:
    folders = {}
    torch.manual_seed(0)
    gpt: dict[str, Any] = dict(vocab_size=43, n_embd=WIDTH, n_head=3, n_layer=1, n_positions=ROWS)
    models = {
        "mlm": T.BertForMaskedLM(T.BertConfig(**BERT_SIZES)),
        "embedding": T.BertModel(T.BertConfig(**BERT_SIZES)),
        "causal": T.GPT2LMHeadModel(T.GPT2Config(**gpt, bos_token_id=2, eos_token_id=3, pad_token_id=0)),
    }
    for kind, model in models.items():
        stir(model, 1).save_pretrained(tmp_path / kind)
        Words.save(tmp_path / kind)
        folders[kind] = tmp_path / kind
    return folders


@pytest.mark.parametrize("kind", ["mlm", "causal", "embedding"])
def test_the_command_prints_each_length_before_and_after(kind: str, saved: dict[str, Any], tmp_path: Any) -> None:
    (tmp_path / "words.txt").write_text(text(600))
    out = tmp_path / "longer"
    arguments = ["extend", str(saved[kind]), "--length", "41", "--rule", "tile", "--text", str(tmp_path / "words.txt")]
    result = CliRunner().invoke(app, [*arguments, "--windows", "3", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert f"({kind}): {ROWS} -> 41 tokens, rule tile" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:2] in ("14", "29", "35", "41")]
    assert [row[0] for row in rows] == ["14", "29", "35", "41"] and all(row[1] == "3" for row in rows)
    assert ["refused" in row for row in rows] == [False, False, True, True]
    assert all(("loss" in row) != (kind == "embedding") for row in rows)
    assert f"has {ROWS} positions but the input reaches 41" in result.stdout
    again = T.AutoModel.from_pretrained(out)
    assert locant.hf.capacity(again) == 41
    assert T.AutoTokenizer.from_pretrained(out).model_max_length == 41
    assert "exists already" in CliRunner().invoke(app, [*arguments, "--out", str(out)]).stderr


def test_losses_and_recognition_are_what_they_say(saved: dict[str, Any]) -> None:
    tokenizer, words = T.AutoTokenizer.from_pretrained(saved["causal"]), text(100)
    model, kind = load_with_head(saved["causal"])
    ids = torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"])
    (row,) = by_length(model, kind, tokenizer, words, [9], windows=2)
    losses = []
    for start in (0, 91):
        given = torch.cat((torch.tensor([2]), ids[start : start + 7], torch.tensor([3])))[None]
        losses.append(float(model(input_ids=given, labels=given).loss.detach()))
    assert row.loss == pytest.approx(sum(losses) / 2, rel=1e-5) and row.windows == 2
    model, kind = load_with_head(saved["embedding"])
    (row,) = by_length(model, kind, tokenizer, words, [9], windows=2)

    def vector(start: int) -> torch.Tensor:
        given = torch.cat((torch.tensor([2]), ids[start : start + 7], torch.tensor([3])))[None]
        return torch.nn.functional.normalize(model(given)[0].detach().mean(1), dim=-1)[0]

    here, behind = ([vector(start + step) for start in (0, 82)] for step in (0, 7))
    cosine = [[float(a @ b) for b in behind] for a in here]
    assert row.own == pytest.approx((cosine[0][0] + cosine[1][1]) / 2, abs=1e-5)
    assert row.other == pytest.approx((cosine[0][1] + cosine[1][0]) / 2, abs=1e-5)
    assert row.found == sum(cosine[i][i] > cosine[i][1 - i] for i in range(2)) / 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--length", "9"], f"bert already serves {ROWS} tokens and length=9 is less"),
        (["--length", "41", "--lengths", "9,x"], "--lengths '9,x' must be numbers above 2"),
        (["--length", "410"], "the text has 100 tokens but 820 are needed"),
        (["--length", "41", "--rule", "x"], "unknown rule='x'"),
    ],
)
def test_the_command_refuses_in_one_sentence(more: list[str], message: str, saved: Any, tmp_path: Any) -> None:
    (tmp_path / "words.txt").write_text(text(100))
    result = CliRunner().invoke(app, ["extend", str(saved["mlm"]), "--text", str(tmp_path / "words.txt"), *more])
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_json_holds_the_numbers(saved: Any, tmp_path: Any) -> None:
    (tmp_path / "words.txt").write_text(text(300))
    arguments = ["extend", str(saved["mlm"]), "--length", "41", "--text", str(tmp_path / "words.txt"), "--json"]
    report = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert report["capacity"] == ROWS and report["after"][-1]["length"] == 41 and report["after"][-1]["loss"] > 0
    assert report["before"][-1]["refused"].startswith("guard: the table of bert has 29 positions")


def test_a_saved_model_with_an_encoding_is_extended_whole(saved: Any, tmp_path: Any) -> None:
    model = noisy(T.AutoModel.from_pretrained(saved["embedding"]), "tupe_a")
    model.save_pretrained(tmp_path / "attached")
    Words.save(tmp_path / "attached")
    out = tmp_path / "longer"
    report = extend_and_measure(str(tmp_path / "attached"), 41, "tile", text(300), lengths=[9, 41], windows=2, out=out)
    assert report.before[0].own == pytest.approx(report.after[0].own, abs=1e-5)
    assert "positions reach 41 but the table has 29 rows" in (report.before[1].refused or "")
    again = T.AutoModel.from_pretrained(out).eval()
    assert locant.hf.capacity(again) == 41 and attached(again).layers()[0].table.shape[0] == 42
    locant.hf.extend(model.eval(), 41, "tile")
    assert torch.allclose(first(again(tokens(2, 41))), first(model(tokens(2, 41))), atol=1e-5)
