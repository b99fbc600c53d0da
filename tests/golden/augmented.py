"""Set C, positions that are moved at random: the stored draws go in, the public code's embeddings come out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import locant
from locant.encodings.sinusoidal import Sinusoidal
from locant.transform import Transform
from locant.transforms.cape import Cape, CapeDraws
from locant.transforms.cape_2d import Cape2d, Cape2dDraws
from locant.transforms.shape import Shape
from tests.golden.cases import Case, Comparison
from tests.golden.length_study import logits_of
from tests.golden.registry import check

AUDIO, PLANE = 5e-4, 3e-5  # angles near 2000; powers of 10 in float32


def ready(transform: Any, training: bool) -> Any:
    """The transform in its mode."""
    assert isinstance(transform, Transform)
    return transform.train(training)


# CAPE


@check("C", "cape")
def cape(case: Case) -> Iterator[Comparison]:
    """One axis (text, sound) and two."""
    for name, tensors in case.members.items():
        settings = case.meta["cases"][name]
        yield from (plane if "2d" in name else line)(name, tensors, settings)


def line(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """One axis; rows of padding get no embedding in the public code."""
    config = dict(settings["config"])
    first = config.pop("batch_first", False)
    x = tensors["x"] if first else tensors["x"].transpose(0, 1)  # [B T D]
    batch, length, width = x.shape
    delta, positions = place(tensors, settings, batch, length)
    normalize, frequency = config.pop("normalize", False), config.pop("freq_scale", 1.0)
    whole = delta is None and normalize and "x_lengths" in tensors
    known = {"max_global_shift": "global_shift", "max_local_shift": "local_shift", "max_global_scaling": "scaling"}
    ranges = {ours: config.pop(theirs, 1.0 if ours == "scaling" else 0.0) for theirs, ours in known.items()}
    assert not config, f"cape: nobody here knows what {sorted(config)} means"
    step = settings["positions_delta"] if isinstance(settings["positions_delta"], float) else 1.0
    options: dict[str, Any] = dict(normalize=normalize, frequency=frequency, delta=step, inclusive_length=whole)
    transform: Cape = ready(locant.load("cape", **ranges, **options), settings["training"])
    zero = torch.zeros(batch, 1)
    local = tensors.get("local_shift", torch.zeros(batch, length))
    unit = step if delta is None else delta
    draws = CapeDraws(tensors.get("global_shift", zero), local * unit, tensors.get("scale", zero + 1))
    moved = transform.apply(positions, draws) if settings["training"] else transform.prepare(positions)
    encoding = locant.load("sinusoidal", model_dim=width, scale_tokens=True)
    assert isinstance(encoding, Sinusoidal)
    waves, out = encoding.waves(moved.query).float().expand(batch, -1, -1), encoding.embed(x, moved)
    real = torch.ones(batch, length, dtype=torch.bool) if positions.key_real is None else positions.key_real
    if whole:
        real = real | torch.cat((real[:, :1], real[:, :-1]), -1)
    atol = AUDIO if frequency != 1 else 1e-5
    for field, mine in (
        ("pos_emb", waves * real[..., None]),
        ("out", torch.where(real[..., None], out, x * width**0.5)),
    ):
        yield Comparison(f"{name}/{field}", mine if first else mine.transpose(0, 1), tensors[field], atol)


def place(
    tensors: Mapping[str, Tensor], settings: Mapping[str, Any], batch: int, length: int
) -> tuple[Tensor | None, locant.Positions]:
    """Positions, with a step of its own for each sequence where the public code was given one."""
    counted, lengths = locant.Positions.arange(length), tensors.get("x_lengths")
    if settings["positions_delta"] == "tensor":
        delta = tensors["positions_delta"][:, None]
        ids = torch.arange(length).float() * delta
        real = None if lengths is None else ids <= lengths[:, None]
        moved = locant.Positions.from_ids(torch.arange(length).expand(batch, -1), length=length)
        return delta, locant.Positions(ids, ids, moved.span, moved.length, key_real=real)
    if lengths is None:
        return None, counted.batched(batch)
    mask = torch.arange(length) < lengths[:, None]
    return None, locant.Positions(counted.query, counted.key, counted.span, counted.length, key_real=mask).batched(
        batch
    )


def plane(name: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """Two axes: patches [H W B D] as tokens row by row."""
    x = tensors["x"].permute(2, 0, 1, 3)
    batch, height, width, dim = x.shape
    transform: Cape2d = ready(
        locant.load("cape_2d", model_dim=dim, height=height, width=width, scale_tokens=True), settings["training"]
    )
    positions = locant.Positions.arange(height * width).batched(batch)
    draws = None
    if settings["training"]:
        shift, local = (
            torch.stack([tensors[f"{kind}_shift_{axis}"].flatten(1) for axis in "xy"], -1)
            for kind in ("global", "local")
        )
        draws = Cape2dDraws(shift, local, tensors["scale"])
    moved = positions.share(transform, draws)
    found = {"pos_emb": transform.waves(transform.place(positions, draws)).float().expand(batch, -1, -1)}
    found["out"] = transform.embed(x.flatten(1, 2), moved)
    for field, mine in found.items():
        grid = mine.unflatten(1, (height, width)).permute(1, 2, 0, 3)
        yield Comparison(f"{name}/{field}", grid, tensors[field], PLANE)


# SHAPE


@check("C", "shape")
def shape(case: Case) -> Iterator[Comparison]:
    """Shifted sinusoids; the code leaves out K itself and evaluates from K on."""
    for name, tensors in case.members.items():
        settings, x = case.meta["cases"][name], tensors["emb"].transpose(0, 1)
        batch, length, width = x.shape
        transform: Shape = ready(
            locant.load("shape", max_shift=settings["K"], inclusive=False, eval_offset="code"), settings["training"]
        )
        step = settings["step"]
        positions = locant.Positions.arange(length, (step or 0) + length).batched(batch)
        if settings["training"]:
            offset = tensors.get("offset", torch.zeros(batch, dtype=torch.long))
            moved = transform.apply(positions, offset[:, None])
        else:
            moved = transform.prepare(positions)
        out = locant.load("sinusoidal", model_dim=width, scale_tokens=True).embed(x, moved)
        yield Comparison(f"{name}/out", out.transpose(0, 1), tensors["out"], 2e-5)


# Randomized positions


@check("C", "rand")
def randomized(case: Case) -> Iterator[Comparison]:
    """Sinusoids and rotary positions at drawn ids; Transformer-XL without a draw, as the same code has it."""
    for name, tensors in case.members.items():
        run = relative if name.startswith("relative") else rotary if "rope" in name else sinusoidal
        yield Comparison(f"{name}/out", run(tensors, case.meta["cases"][name], name), tensors["out"])


def drawn(tensors: Mapping[str, Tensor], length: int, top: int) -> locant.Positions:
    """Positions at the stored draw."""
    transform = locant.load("randomized", max_position=top)
    assert isinstance(transform, Transform)
    return transform.apply(locant.Positions.arange(length), tensors["indexes"][None])


def sinusoidal(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], name: str) -> Tensor:
    """Waves of the drawn ids."""
    length, width = tensors["out"].shape
    positions = drawn(tensors, length, settings["L"])
    return locant.load("sinusoidal", model_dim=width, layout="halves").embed(torch.zeros(1, length, width), positions)[
        0
    ]


def rotary(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], name: str) -> Tensor:
    """Turned by the drawn ids, or the counted ones."""
    x = tensors["x"].transpose(1, 2)
    length = x.shape[2]
    positions = drawn(tensors, length, settings["L"]) if "indexes" in tensors else locant.Positions.arange(length)
    return locant.load("rope", head_dim=x.shape[-1], layout=ROPE_LAYOUT).query_key(x, x, positions)[0].transpose(1, 2)


ROPE_LAYOUT = "interleaved"


def relative(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], name: str) -> Tensor:
    """Transformer-XL with the wave of j - i: sines change their sign. Causal: of j - i + T - 1, whatever that means."""
    q, k = (tensors[n].transpose(1, 2) for n in "qk")
    _, heads, length, width = q.shape
    projection = tensors["w"].T.clone()
    projection[:, : heads * width // 2] *= -1
    encoding = locant.load("xlnet", num_heads=heads, head_dim=width, model_dim=heads * width)
    state = dict(content_bias=tensors["content_bias"], position_bias=tensors["relative_bias"], projection=projection)
    encoding.load_state_dict(state)
    ids = torch.arange(length)
    positions = locant.Positions.from_ids(ids, ids + (length - 1) * ("causal" in name), length=2 * length)
    logits = logits_of(encoding, q, k, positions, scale=1.0)
    return logits.tril() if "causal" in name else logits  # above, the public code stores 0
