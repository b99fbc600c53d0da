"""Sets A and C, biases of the distance and functions of the logits: KERPLE, FIRE, CoPE, DAPE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import locant
from locant.encodings.cope import Cope
from locant.encodings.kerple import Kerple
from tests.golden.cases import Case, Comparison
from tests.golden.length_study import logits_of
from tests.golden.modules import bias_of, understands
from tests.golden.registry import check

DAPE = "chuanyang-Zheng/DAPE:DAPE.py"


def lower(tensor: Tensor) -> Tensor:
    """Pairs that a causal mask leaves; above, the public biases are those of distance 0."""
    return tensor.tril()


def fire_of(weights: Mapping[str, Tensor], activation: str = "relu") -> locant.Encoding:
    """FIRE with stored weights; L is a constant of theirs."""
    width, count = weights["mlp.0.weight"].shape[0], weights["mlp.2.weight"].shape[0]
    trained = float(weights["init_L"])
    encoding = locant.load(
        "fire", num_heads=count, max_length=int(trained), causal=True, width=width, activation=activation
    )
    state = {name: t for name, t in weights.items() if name.startswith("mlp.")}
    state |= {"c": weights["c"].view(1), "multiplier": weights["L_multiplier"].view(1) * trained / int(trained)}
    encoding.load_state_dict(state)
    return encoding


def kerple_of(weights: Mapping[str, Tensor], form: str, positivity: str) -> locant.Encoding:
    """KERPLE with stored numbers, which its forward would clamp."""
    encoding = locant.load("kerple", num_heads=len(weights["bias_p"]), form=form, positivity=positivity)
    assert isinstance(encoding, Kerple)
    numbers = weights["bias_p"].flatten(), weights["bias_a"].flatten()
    if positivity == "clamp":
        encoding.load_state_dict({"r1": numbers[0], "r2": numbers[1]})
    else:
        encoding.set_rates(*(n.clamp(min=0.01) for n in numbers))
    return encoding


def kerple(case: Case, form: str) -> Iterator[Comparison]:
    """Both ways to keep the numbers positive."""
    understands(case, "heads", "length", "eps")
    assert case.config["eps"] == 0.01
    positions = locant.Positions.arange(case.config["length"])
    for positivity in ("clamp", "softplus"):
        mine = bias_of(kerple_of(case.weights, form, positivity), positions)[None]
        yield Comparison(f"bias ({positivity})", lower(mine), lower(case.outputs["bias"]))


@check(DAPE, "ParallelKerpleLog")
def kerple_log(case: Case) -> Iterator[Comparison]:
    """The logarithm."""
    yield from kerple(case, "log")


@check(DAPE, "FIRE")
def fire(case: Case) -> Iterator[Comparison]:
    """All pairs, and as the last queries see them with a cache."""
    understands(case, "heads", "length", "eps", "init_L", "mlp_width")
    encoding, length = fire_of(case.weights), case.config["length"]
    expected = case.outputs["bias"]
    yield Comparison("bias", bias_of(encoding, locant.Positions.arange(length))[None], expected)
    cached = bias_of(encoding, locant.Positions.arange(3, length))[None]
    yield Comparison("bias (cached)", cached, expected[:, :, -3:])


# CoPE


def cope_bias(table: Tensor, q: Tensor, logits: Tensor) -> Tensor:
    """What is added to the logits."""
    encoding = locant.load("cope", head_dim=table.shape[1], max_positions=len(table))
    assert isinstance(encoding, Cope)
    encoding.load_state_dict({"table": table})
    positions = locant.Positions.arange(logits.shape[-1])
    (term,) = encoding.terms(positions, locant.Layer(q, q))
    past = positions.offsets() <= 0
    finite = logits.masked_fill(~past, 0.0)
    with torch.no_grad():
        return term.fn(finite, torch.zeros(()), positions, past[None, None]) - finite  # pyright: ignore


@check("x-transformers", "CoPE")
def x_transformers_cope(case: Case) -> Iterator[Comparison]:
    """The addend, where the mask leaves it."""
    understands(case, "dim", "heads", "max_pos")
    mine = cope_bias(case.weights["pos_emb"], case.inputs["query"], case.inputs["logits_masked"])
    yield Comparison("cope_bias", lower(mine), lower(case.outputs["cope_bias"]))


# DAPE, and what it adapts to


@check("C", "dape")
def dape(case: Case) -> Iterator[Comparison]:
    """Stored logits go in as content."""
    for name, tensors in case.members.items():
        weights = {n.removeprefix("param."): t for n, t in tensors.items() if n.startswith("param.")}
        run = {"cope": public_cope, "xl_bias": transformer_xl}.get(name, mapped)
        for part, mine, expected in run(name, tensors, weights):
            yield Comparison(f"{name}/out{part}", mine, expected)


Parts = Iterator[tuple[str, Tensor, Tensor]]


def mapped(name: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Parts:
    """A static bias, with or without its adaptation."""
    scores, out = tensors["scores"], tensors["out"]
    positions, past = locant.Positions.arange(scores.shape[-1]), torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    second = name.startswith("dapev2")
    for edges in ("open", "row") if second else ("open",):
        encoding = adapted(name, weights, scores.shape[1], 3 if second else None, edges)
        unit = torch.eye(scores.shape[-1]).expand(*scores.shape[:2], -1, -1)  # q . k = the stored logit
        mine = logits_of(encoding, scores, unit, positions, 1.0, past[None, None] if second else None)
        rows = slice(None, -1 if edges == "open" and second else None)  # the last row is cut by the public code
        yield f" ({edges})", lower(mine)[:, :, rows], lower(out)[:, :, rows]


def adapted(name: str, weights: Mapping[str, Tensor], count: int, kernel: int | None, edges: Any) -> locant.Encoding:
    """The encoding that a name of the public code stands for."""
    kinds: dict[str, Any] = {
        "alibi": lambda: locant.load("alibi", num_heads=count),
        "kerple": lambda: kerple_of(weights, "log", "softplus"),
        "fire": lambda: fire_of(weights, "leaky_relu" if name.startswith("dape") else "relu"),
    }
    over = next((kind for kind in kinds if kind in name), "none")
    static = kinds[over]() if over in kinds else None
    if "mlp2.0.weight" not in weights:
        assert static is not None
        return static
    first, second = (weights[f"mlp2.{n}.weight"] for n in (0, 2))
    options: dict[str, Any] = dict(over=over, width=len(first), kernel=kernel, edges=edges)
    if over == "fire":
        options |= dict(causal=True, over_options=dict(width=weights["mlp.0.weight"].shape[0]))
    encoding = locant.load("dape", num_heads=count, **options)
    *_, network = encoding.parts()
    shapes = {"first": first, "second": second}
    state = {f"{at}.weight": w[..., 0, :] if w.dim() == 4 else w[..., None] for at, w in shapes.items()}
    state |= {f"{at}.bias": weights[f"mlp2.{n}.bias"] for at, n in (("first", 0), ("second", 2))}
    network.load_state_dict(state)
    return network if static is None else static + network


def public_cope(name: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Parts:
    """CoPE of the same repository: tables by column."""
    mine = tensors["scores"] + cope_bias(weights["pos_emb"][0].T, tensors["query"], tensors["scores"])
    yield "", lower(mine), lower(tensors["out"])


def transformer_xl(name: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Parts:
    """Transformer-XL's logits, scaled."""
    q, k = (tensors[n].permute(1, 2, 0, 3) for n in "qk")  # [T B H D]
    count, width = q.shape[1], q.shape[3]
    encoding = locant.load("xlnet", num_heads=count, head_dim=width, model_dim=weights["r_net.weight"].shape[1])
    names = {"projection": "r_net.weight", "content_bias": "r_w_bias", "position_bias": "r_r_bias"}
    encoding.load_state_dict({mine: weights[theirs] for mine, theirs in names.items()})
    mine = logits_of(encoding, q, k, locant.Positions.arange(q.shape[2]), 0.5)
    yield "", lower(mine), tensors["out"]
