"""Set B: TUPE with its whole public encoder, TISA, and the bucket tables."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import locant
from locant.encodings.tisa import Tisa
from locant.encodings.tupe import TupeA, TupeR
from locant.terms import LogBucket, Untied
from tests.golden.cases import Case, Comparison
from tests.golden.modules import bias_of
from tests.golden.parts import heads, layer_norm, linear, merge, run_attention, with_state
from tests.golden.registry import check

RENAMED = {
    "pos.weight": "table",
    "pos_ln.weight": "norm.weight",
    "pos_ln.bias": "norm.bias",
    "pos_q_linear.weight": "query_projection.weight",
    "pos_q_linear.bias": "query_projection.bias",
    "pos_k_linear.weight": "key_projection.weight",
    "pos_k_linear.bias": "key_projection.bias",
}
BUCKETS = "relative_attention_bias.weight"


def tolerance(case: Case, name: str) -> float:
    """The entry's absolute tolerance for a tensor."""
    found = [value for pattern, value in case.meta["atol"].items() if fnmatch.fnmatchcase(name, pattern)]
    assert found, f"{case.id}: the index gives no tolerance for {name!r}"
    return found[0]


# TUPE


def tupe(case: Case, parameters: Mapping[str, Tensor], untie_cls: bool, relative: bool) -> TupeA | TupeR:
    """The encoding with the public parameters, in float64."""
    meta, state = case.meta, {ours: parameters[theirs] for theirs, ours in RENAMED.items()}
    sizes: dict[str, Any] = dict(
        num_heads=meta["heads"],
        head_dim=meta["dim"] // meta["heads"],
        model_dim=meta["dim"],
        max_length=meta["max_seq_len"],
        untie_cls=untie_cls,
    )
    if not relative:
        return with_state(TupeA(**sizes).double(), **state)
    state["buckets"] = parameters[BUCKETS].T[:, : None if untie_cls else meta["rel_pos_bins"]]
    encoding = TupeR(**sizes, num_buckets=meta["rel_pos_bins"], max_distance=meta["max_rel_pos"])
    return with_state(encoding.double(), **state)


class Encoder:
    """The public encoder around locant's attention: post- or pre-norm layers, padding masked as keys only."""

    def __init__(self, case: Case, parameters: Mapping[str, Tensor], encoding: locant.Encoding) -> None:
        self.w, self.encoding, self.meta = parameters, encoding, case.meta
        self.tokens = case.tensors["tokens"].long()
        self.real = self.tokens != case.meta["pad_id"]
        self.positions = encoding.prepare(locant.Positions.arange(case.meta["n"]))
        self.weights: list[Tensor] = []

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A LayerNorm, where the public encoder has it."""
        return layer_norm(self.w, name, x, 1e-5) if f"{name}.weight" in self.w else x

    def attend(self, layer: str, x: Tensor) -> Tensor:
        """Self-attention: weights by the literal equation, output by the fast path."""
        fused = F.linear(x, self.w[f"{layer}.self_attn.in_proj_weight"], self.w[f"{layer}.self_attn.in_proj_bias"])
        q, k, v = (heads(part, self.meta["heads"]) for part in fused.chunk(3, -1))
        given: dict[str, Any] = dict(positions=self.positions, mask=self.real[:, None, None])
        self.weights.append(run_attention(self.encoding, q, k, backend="reference", **given))
        attended = run_attention(self.encoding, q, k, v, backend="auto", **given)
        return linear(self.w, f"{layer}.self_attn.out_proj", merge(attended))

    def forward(self, layer: str, x: Tensor) -> Tensor:
        """The feed-forward part."""
        return linear(self.w, f"{layer}.fc2", F.gelu(linear(self.w, f"{layer}.fc1", x)))

    def states(self) -> list[Tensor]:
        """The input, and the output of each layer."""
        x = self.norm("emb_layer_norm", F.embedding(self.tokens, self.w["embed_tokens.weight"]))
        states = [x * self.real[..., None]]
        for index in range(self.meta["layers"]):
            layer, x = f"layers.{index}", states[-1]
            for part, name in ((self.attend, "self_attn_layer_norm"), (self.forward, "final_layer_norm")):
                if self.meta["pre_norm"]:
                    x = x + part(layer, self.norm(f"{layer}.{name}", x))
                else:
                    x = self.norm(f"{layer}.{name}", x + part(layer, x))
            states.append(x)
        return states

    def found(self) -> dict[str, Tensor]:
        """By their public names; the last norm, which a pre-norm encoder has, is not in ``hidden``."""
        states = self.states()
        final = self.norm("emb_out_layer_norm", states[-1]) if self.meta["pre_norm"] else states[-1]
        named = {f"hidden.{i}": state for i, state in enumerate(states)}
        named |= {f"attn.{i}": weights for i, weights in enumerate(self.weights)}
        return {**named, "final": final, "sentence_rep": final[:, 0]}


def tupe_parameters(case: Case) -> dict[str, Tensor]:
    """Public names, float64."""
    stored = load_file(case.folder / case.meta["params"])
    names = [name for name in stored if name.startswith("param.")]
    return {name.removeprefix("param."): stored[name].double() for name in names}


@check("B", "tupe")
def check_tupe(case: Case) -> Iterator[Comparison]:
    """The bias of all layers, the ablation without the reset, the encoder's states, gradients."""
    assert case.meta["variant"] in ("TUPE-A", "TUPE-R"), f"{case.id}: unknown variant {case.meta['variant']!r}"
    parameters, relative = tupe_parameters(case), case.meta["rel_pos"]
    untied, tied = (tupe(case, parameters, untie, relative) for untie in (True, False))
    states, tied_states = (Encoder(case, parameters, encoding) for encoding in (untied, tied))
    found = {**tupe_biases(case, parameters, untied, tied), **states.found()}
    found["tie_cls.final"] = tied_states.found()["final"]
    for name in found.keys() & case.tensors.keys():
        expected = case.tensors[name]
        atol = tolerance(case, name) if expected.is_floating_point() else 0
        yield Comparison(name, found[name], expected, atol, 0)
    yield from tupe_gradients(case, untied)
    if isinstance(untied, TupeR):
        table = load_file(case.folder / case.meta["params"])["rp_bucket"]
        yield Comparison("rp_bucket", untied.rule.rows(locant.Positions.arange(len(table))), table)


def tupe_biases(case: Case, parameters: Mapping[str, Tensor], untied: TupeA, tied: TupeA) -> dict[str, Tensor]:
    """Everything that is added to logits; the un-reset products include the two rows that make theta."""
    positions = locant.Positions.arange(case.meta["n"])
    ids = torch.arange(-1, case.meta["n"])  # the row before id 0 makes theta, too
    every_row = locant.Positions(ids, ids, span=len(ids), length=case.meta["n"])
    found = {
        "bias": bias_of(untied, positions),
        "tie_cls.bias": bias_of(tied, positions),
        "raw_abs_with_theta": bias_of(tupe(case, parameters, untie_cls=False, relative=False), every_row),
    }
    if isinstance(tied, TupeR):
        found["tie_cls.bucket"] = tied.rule.rows(positions)
    return found


def tupe_gradients(case: Case, encoding: TupeA | TupeR) -> Iterator[Comparison]:
    """Gradients of sum(bias * upstream), by their public names."""
    if "grad_file" not in case.meta:
        return
    stored = load_file(case.folder / case.meta["grad_file"])
    encoding.zero_grad()
    (bias_of(encoding, locant.Positions.arange(case.meta["n"])) * stored["upstream"]).sum().backward()
    ours = {f"grad.{theirs}": gradient(encoding, name) for theirs, name in RENAMED.items()}
    if isinstance(encoding, TupeR):
        ours[f"grad.{BUCKETS}"] = gradient(encoding, "buckets").T
    assert ours.keys() == stored.keys() - {"upstream"}, f"{case.id}: gradients of {sorted(stored)}"
    for name, grad in ours.items():
        yield Comparison(name, grad, stored[name], tolerance(case, name), 0)


def gradient(encoding: locant.Encoding, name: str) -> Tensor:
    """The gradient that reached a parameter."""
    grad = encoding.get_parameter(name).grad
    assert grad is not None, f"no gradient reached {name}"
    return grad


# TISA


@check("B", "tisa")
def tisa(case: Case) -> Iterator[Comparison]:
    """The public orientation through `public_state`; the same parameters read as in the paper; gradients of both."""
    public = {name: t.double() for name, t in case.part("param.").items()}
    paper = {
        "amplitude": public["kernel_amplitudes"],
        "sharpness": public["kernel_sharpness"],
        "center": public["kernel_offsets"],
    }
    n, names = case.meta["n"], {"amplitudes": "amplitude", "sharpness": "sharpness", "offsets": "center"}
    tolerances = case.meta["atol"], case.meta["rtol"]
    for orientation, state, sign in (("public", Tisa.public_state(public), -1), ("paper", paper, 1)):
        encoding = with_state(Tisa(case.meta["heads"], case.meta["kernels"]).double(), **state)
        matrix, stored = bias_of(encoding, locant.Positions.arange(n)), f"matrix_{orientation}"
        yield Comparison(stored, matrix, case.tensors[stored], *tolerances)
        (matrix * case.tensors["upstream"]).sum().backward()
        for theirs, ours in names.items():
            grad, stored = gradient(encoding, ours), f"grad_{orientation}.kernel_{theirs}"
            yield Comparison(stored, grad * (sign if ours == "center" else 1), case.tensors[stored], *tolerances)
        if orientation == "paper":
            yield Comparison("scores", encoding.scores(case.tensors["offsets"]), case.tensors["scores"], *tolerances)


# Bucket tables


@check("B", "t5_bucket")
def t5_bucket(case: Case) -> Iterator[Comparison]:
    """One table for each setting, which its name states."""
    for name, expected in case.tensors.items():
        if name == "relative_position":
            continue
        setting = re.fullmatch(r"bidirectional([01])_bins(\d+)_max(\d+)", name)
        assert setting, f"{case.id}: {name!r} names no setting"
        both, bins, far = map(int, setting.groups())
        yield Comparison(name, LogBucket(bins, far, causal=not both).row(case.tensors["relative_position"]), expected)


@check("B", "tupe_rp_bucket")
def tupe_bucket(case: Case) -> Iterator[Comparison]:
    """Buckets with rows of their own for [CLS]."""
    bins, expected = case.meta["rel_pos_bins"], case.tensors["rp_bucket_cls_untied"]
    rule = Untied(LogBucket(bins, case.meta["max_rel_pos"]), from_row=bins // 2, to_row=bins)
    yield Comparison("rp_bucket_cls_untied", rule.rows(locant.Positions.arange(len(expected))), expected)
    encoding = TupeR(num_heads=1, head_dim=2, model_dim=2, num_buckets=bins, max_distance=case.meta["max_rel_pos"])
    assert encoding.rule == rule
