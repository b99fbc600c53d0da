"""Checks of how a stack of layers behaves: does order matter, and do padding, packing and caches change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from locant.hf.probe import LENGTH, Probe, cache_of, distance

Verdict = Literal["ok", "FAULT", "cannot"]


@dataclass(frozen=True)
class Finding:
    """One check: its verdict, the figure it rests on, and what to do (empty where nothing need be done).

    ``figure`` is in words; distances in it are relative: the largest distance of two tokens' vectors to their length.
    """

    check: str
    verdict: Verdict
    figure: str
    advice: str = ""


def _judge(check: str, far: float, limit: float, advice: str, figure: str = "differs by") -> Finding:
    return (
        Finding(check, "ok", f"{far:.1g}") if far <= limit else Finding(check, "FAULT", f"{figure} {far:.2g}", advice)
    )


def order(probe: Probe, length: int) -> Finding:
    """Does order matter at all? Without any position, permuted tokens give the permuted output.

    In a causal model the mask alone tells deeper layers about order, so there the first layer is asked: does its last
    token notice that the tokens before it were permuted?
    """
    ids = probe.ids(length)
    turn = torch.arange(length).roll(2)
    if probe.causal:
        turn = torch.cat((torch.arange(length - 1).flip(0), torch.tensor([length - 1])))
        far = _first_layer(probe, ids, ids[:, turn])
    else:
        far = distance(probe.run(ids)[:, turn], probe.run(ids[:, turn]))
    meant = bool(probe.attached) and all(layer.name == "none" for a in probe.attached for layer in a.layers())
    if far > probe.equal / 10:
        return Finding("order matters", "ok", f"permuting changes {far:.2g}")
    if meant:
        return Finding("order matters", "ok", "no position, as attached ('none')")
    names = ", ".join(dict.fromkeys(a.stack.name for a in probe.attached))
    where = "only through the causal mask" if probe.causal else "not at all"
    advice = (
        f"{names!r} changes nothing yet: it is at its neutral value; train it"
        if names
        else "no position encoding acts; locant.hf.attach(model, name), or attach 'none' if that is meant"
    )
    return Finding("order matters", "FAULT", f"{where}: permuting changes {far:.1g}", advice)


def _first_layer(probe: Probe, ids: Tensor, permuted: Tensor) -> float:
    outputs = [probe.call(x, output_hidden_states=True)[1] for x in (ids, permuted)]
    states = [getattr(o, "decoder_hidden_states", None) or o.hidden_states for o in outputs]
    return distance(states[0][1][:, -1:], states[1][1][:, -1:])


def padding(probe: Probe, length: int, left: bool) -> Finding:
    """Does padding on one side change a real token?"""
    check = f"padding on the {'left' if left else 'right'}"
    short, whole, pad = probe.ids(length - 4, seed=1), probe.ids(length, seed=2), torch.full((1, 4), probe.padding)
    ones, zeros = torch.ones_like(short), torch.zeros_like(pad)
    row = torch.cat((pad, short) if left else (short, pad), 1)
    mask = torch.cat((torch.cat((zeros, ones) if left else (ones, zeros), 1), torch.ones_like(whole)))
    if not probe.takes("attention_mask"):
        return Finding(check, "cannot", "takes no attention_mask", "run sequences of one length together")
    out = probe.run(torch.cat((row, whole)), attention_mask=mask)
    real = out[:1, 4:] if left else out[:1, :-4]
    far = max(distance(real, probe.run(short)), distance(out[1:], probe.run(whole)))
    blind = distance(out[:1], probe.run(row)) <= probe.equal and far > probe.equal
    advice = (
        "the mask is not used at all: register a mask function with the attention function"
        if blind
        else "positions count the padding: pass position_ids counted over the mask, pad on the right, or attach"
        if left
        else "real tokens see the padding: check the attention function, or attach"
    )
    return _judge(check, far, probe.equal, advice)


def first_position(probe: Probe, length: int) -> int | None:
    """The position id that a model gives its first token (RoBERTa: pad + 1); None where no count gives its output."""
    ids = probe.ids(length)
    want, count = probe.run(ids), torch.arange(length)[None]
    for start in dict.fromkeys((0, probe.padding + 1, 1, 2)):
        if distance(probe.run(ids, position_ids=count + start), want) <= probe.equal:
            return start
    return None


def explicit(probe: Probe, length: int) -> Finding:
    """Do position_ids 0, 1, 2, ... give what the model gives without them?"""
    check = "position_ids from 0"
    if not probe.takes("position_ids"):
        return Finding(check, "cannot", "takes no position_ids", "attach, to give positions of your own")
    start = first_position(probe, length)
    if start == 0:
        return Finding(check, "ok", "equal to none given")
    if start is None:
        return Finding(check, "FAULT", "no count from 0, 1 or 2 gives its output", "do not pass position_ids to it")
    advice = f"a collator that counts from 0 gives it wrong positions: add {start}, or attach"
    return Finding(check, "FAULT", f"this model counts from {start}", advice)


def padding_id_in_text(probe: Probe, length: int) -> Finding | None:
    """Does a padding id inside the text, with a mask of ones, move the positions of what follows?"""
    start = first_position(probe, length) if probe.takes("position_ids") and probe.takes("attention_mask") else None
    if start is None or probe.bare:
        return None
    ids = probe.ids(length).clone()
    ids[:, length // 2] = probe.padding
    mask = torch.ones_like(ids)
    ruled = probe.run(ids, attention_mask=mask, position_ids=torch.arange(length)[None] + start)
    advice = "positions skip the padding id, whatever the mask says: keep it out of texts, or pass position_ids"
    return _judge("padding id in text", distance(probe.run(ids, attention_mask=mask), ruled), probe.equal, advice)


def packing(probe: Probe, length: int) -> list[Finding]:
    """Do two documents in one row, told apart by their ids, equal their own runs?"""
    if not probe.takes("position_ids"):
        return [Finding("packed documents", "cannot", "takes no position_ids", "attach, and pass document_ids")]
    first, second = probe.ids(length // 2, seed=3), probe.ids(length - length // 2, seed=4)
    ids, start = torch.cat((first, second), 1), first_position(probe, length) or 0
    counts = torch.cat((torch.arange(first.shape[1]), torch.arange(second.shape[1])))[None] + start
    want = torch.cat((probe.run(first), probe.run(second)), 1)
    ways: dict[str, dict[str, Any]] = {"packed, position_ids": {"position_ids": counts}}
    if probe.caches:
        ways["packed, use_cache=False"] = {"position_ids": counts, "use_cache": False}
    if probe.takes("document_ids"):
        ways["packed, document_ids"] = {"document_ids": torch.tensor([[0] * first.shape[1] + [1] * second.shape[1]])}
    advice = "documents see each other: one document in each row, a 4-D mask, or attach and pass document_ids"
    better = "documents see each other: pass use_cache=False"
    found = {way: distance(probe.run(ids, **given), want) for way, given in ways.items()}
    works = probe.caches and found["packed, use_cache=False"] <= probe.equal
    return [_judge(way, far, probe.equal, better if works else advice, "leaks") for way, far in found.items()]


def caching(probe: Probe, length: int) -> list[Finding]:
    """Does reading on from a cache, token by token or in chunks, equal one pass without?"""
    if not probe.caches:
        return [Finding("cache", "cannot", "keeps no cache")] if probe.causal else []
    ids = probe.ids(length, seed=5)
    want = probe.run(ids, use_cache=False)
    advice = "cached tokens get other positions than in one pass: use_cache=False, or attach"
    ways = {"cache, token by token": [1] * length, "cache, in chunks": [4, 3, 2] + [2] * length}
    return [
        _judge(way, distance(_in_chunks(probe, ids, sizes), want), probe.equal, advice) for way, sizes in ways.items()
    ]


def _in_chunks(probe: Probe, ids: Tensor, sizes: list[int]) -> Tensor:
    parts, cache, start = [], None, 0
    for size in sizes:
        if start >= ids.shape[1]:
            break
        given = {} if cache is None else {"cache": cache}
        out, whole = probe.call(ids[:, start : start + size], use_cache=True, **given)
        parts.append(out)
        cache, start = cache_of(whole), start + size
    return torch.cat(parts, 1)


def generating(model: nn.Module, probe: Probe, length: int) -> Finding | None:
    """Do prompts of unequal length, padded on the left, generate what each generates alone?"""
    can = getattr(model, "can_generate", None)
    if can is None or not can() or not probe.caches or probe.memory is not None or not probe.takes("attention_mask"):
        return None
    prompts = [probe.ids(2, seed=1), probe.ids(length - 5, seed=2)]
    widest = prompts[1].shape[1]
    gap = torch.full((1, widest - 2), probe.padding)
    batch = torch.cat((torch.cat((gap, prompts[0]), 1), prompts[1]))
    mask = torch.ones_like(batch)
    mask[0, : gap.shape[1]] = 0
    together = _generate(model, probe, batch, mask)
    far = 0.0
    for row, prompt in enumerate(prompts):
        far = max(far, distance(together[row : row + 1], _generate(model, probe, prompt, torch.ones_like(prompt))))
    advice = "generation from unequal prompts differs from one by one: generate one by one, or attach"
    return _judge("generate, padded left", far, probe.equal, advice)


@torch.no_grad()
def _generate(model: Any, probe: Probe, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of five greedy steps [B 5 V]."""
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        num_beams=1,
        pad_token_id=probe.padding,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.stack(out.logits, 1)


Check = Callable[[Probe, int], Finding | list[Finding] | None]
CHECKS: tuple[tuple[str, Check], ...] = (
    ("order matters", order),
    ("padding on the right", lambda probe, length: padding(probe, length, left=False)),
    ("padding on the left", lambda probe, length: padding(probe, length, left=True)),
    ("padding id in text", padding_id_in_text),
    ("position_ids from 0", explicit),
    ("packed documents", packing),
    ("cache", caching),
)


def probe_length(limit: int | None) -> int:
    """Tokens of a probe: `LENGTH`, or what a model with a shorter limit serves."""
    return LENGTH if limit is None else min(LENGTH, limit)
