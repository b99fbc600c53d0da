"""The same sentence gives the same answer, however it arrives: every encoding in five hosts, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as T
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

import locant
from tests.hf_models import T5_SIZES, first, host, noisy, stir, tokens
from tests.names import DECODER_ONLY, ENCODERS
from tests.names import DECODERS as IN_DECODERS

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

HOSTS = ("bert", "roberta", "gpt2", "llama", "t5")
DECODERS = ("gpt2", "llama", "t5")
PAD = 2  # a token like others: only the mask says that it is none
SHORT, LONG = 4, 7


class Both(torch.nn.Module):
    """T5 with the sentence in its decoder, below an encoder input that is the same for every row."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, ids: torch.Tensor, past_key_values: Any = None, **given: Any) -> Any:
        above = tokens(1, 5, seed=8).expand(ids.shape[0], -1)
        if "attention_mask" in given:
            given["decoder_attention_mask"] = given.pop("attention_mask")
        if past_key_values is not None:
            given["past_key_values"] = EncoderDecoderCache(past_key_values, DynamicCache())
        return self.model(above, decoder_input_ids=ids, **given)


def model_of(family: str, name: str, decoder: bool = False) -> Any:
    """A tiny host with an encoding whose parameters are away from neutral; a dropped one could not pass."""
    if family != "t5" or not decoder:
        return noisy(host(family), name).eval()
    torch.manual_seed(0)
    model = stir(T.T5ForConditionalGeneration(T.T5Config(**T5_SIZES)), 1)
    noisy(model.decoder if name in DECODER_ONLY else model, name)
    return Both(model).eval()


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal to 1e-5 of the largest output."""
    assert got.shape == want.shape
    off = ((got - want).abs().max() / want.abs().max().clamp(min=1.0)).item()
    assert off <= 1e-5, f"off by {off:.2g}"


def batch(left: bool) -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor, slice]]]:
    """Two sentences of unequal length in one batch, its mask, and where each sentence is in it."""
    short, long = tokens(1, SHORT, seed=1), tokens(1, LONG, seed=2)
    pads = torch.full((1, LONG - SHORT), PAD)
    ids = torch.cat((torch.cat((pads, short) if left else (short, pads), 1), long))
    where = slice(LONG - SHORT, None) if left else slice(0, SHORT)
    mask = torch.ones(2, LONG, dtype=torch.long)
    mask[0] = 0
    mask[0, where] = 1
    return ids, mask, [(short, where), (long, slice(None))]


# --- how a sentence may arrive ----------------------------------------------------------------------------------------


def padded(family: str, name: str) -> None:
    model = model_of(family, name)
    for left in (True, False):
        ids, mask, rows = batch(left)
        out = first(model(ids, attention_mask=mask))
        for row, (alone, where) in enumerate(rows):
            same(out[row : row + 1, where], first(model(alone)))


def packed(family: str, name: str) -> None:
    model, parts = model_of(family, name), [tokens(2, n, seed=n) for n in (4, 1, 6)]
    documents = torch.cat([torch.full((2, part.shape[1]), i) for i, part in enumerate(parts)], 1)
    ids = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    want = torch.cat([first(model(part)) for part in parts], 1)
    same(first(model(torch.cat(parts, 1), document_ids=documents)), want)
    same(first(model(torch.cat(parts, 1), position_ids=ids.expand(2, -1))), want)


def holes(family: str, name: str) -> None:
    model, ids = model_of(family, name), tokens(2, 9, seed=4)
    kept = torch.tensor([0, 1, 4, 5, 8])
    mask = torch.zeros(2, 9, dtype=torch.long)
    mask[:, kept] = 1
    same(first(model(ids, attention_mask=mask))[:, kept], first(model(ids[:, kept])))


def explicit_ids(family: str, name: str) -> None:
    model, ids = model_of(family, name), tokens(2, LONG, seed=5)
    want, order = first(model(ids)), torch.arange(LONG)
    same(first(model(ids, position_ids=order[None])), want)
    if family not in ("gpt2", "llama"):  # tokens that bring their places along may come in any order
        order = torch.tensor([0, 5, 1, 6, 2, 4, 3])
        same(first(model(ids[:, order], position_ids=order[None])), want[:, order])
    rows = torch.stack((torch.arange(LONG) + 3, torch.arange(LONG) * 2))
    out = first(model(ids, position_ids=rows))
    for row in range(2):
        same(out[row : row + 1], first(model(ids[row : row + 1], position_ids=rows[row : row + 1])))


def embedded(family: str, name: str) -> None:
    model = model_of(family, name)
    ids, mask, _ = batch(left=True)
    x = model.get_input_embeddings()(ids)
    same(first(model(inputs_embeds=x, attention_mask=mask)), first(model(ids, attention_mask=mask)))


def _chunks(model: Any, ids: torch.Tensor, chunk: int, cache: Any, mask: torch.Tensor) -> torch.Tensor:
    parts = []
    for start in range(0, ids.shape[1], chunk):
        end = min(start + chunk, ids.shape[1])
        given = {"attention_mask": mask[:, :end], "past_key_values": cache, "use_cache": True}
        parts.append(model(ids[:, start:end], **given).logits)
    return torch.cat(parts, 1)


def cached(family: str, name: str) -> None:
    model = model_of(family, name, decoder=True)
    ids, mask, rows = batch(left=True)
    for chunk in (1, 2, 3):
        for cache in (DynamicCache(), StaticCache(model.config.get_text_config(decoder=True), max_cache_len=LONG + 4)):
            out = _chunks(model, ids, chunk, cache, mask)
            for row, (alone, where) in enumerate(rows):
                same(out[row : row + 1, where], model(alone, use_cache=False).logits)


def _prompted(family: str, name: str) -> tuple[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A model that generates, a batch of unequal prompts, and each prompt alone."""
    model = model_of(family, name, decoder=True)
    ids, mask, rows = batch(left=True)
    return (model.model if family == "t5" else model), ids, mask, [alone for alone, _ in rows]


def generated(family: str, name: str) -> None:
    model, ids, mask, prompts = _prompted(family, name)
    options: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    for kind in (None, "static"):
        given = {} if kind is None else {"cache_implementation": kind, "disable_compile": True}
        out = model.generate(
            ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **given, **options
        )
        for row, prompt in enumerate(prompts):
            sequence = out.sequences[row : row + 1]
            if family == "t5":
                full = model(prompt, decoder_input_ids=sequence[:, :-1], use_cache=False).logits
            else:
                read = torch.cat((prompt, sequence[:, LONG:]), 1)
                full = model(read, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
            same(torch.stack([step[row] for step in out.logits])[None], full)


def beams(family: str, name: str) -> None:
    model, ids, mask, prompts = _prompted(family, name)
    options: dict[str, Any] = dict(max_new_tokens=4, num_beams=3, do_sample=False, pad_token_id=0, eos_token_id=None)
    out = model.generate(ids, attention_mask=mask, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), use_cache=False, **options)
        assert torch.equal(out[row, -4:], alone[0, -4:])


ARRIVALS: dict[Callable[[str, str], None], tuple[str, ...]] = {
    padded: HOSTS,
    packed: HOSTS,
    holes: HOSTS,
    explicit_ids: HOSTS,
    embedded: HOSTS,
    cached: DECODERS,
    generated: DECODERS,
    beams: DECODERS,
}


def _decodes(arrival: Callable[[str, str], None], family: str) -> bool:
    """Whether it is a decoder that the sentence arrives at."""
    return family in ("gpt2", "llama") or ARRIVALS[arrival] == DECODERS


def cases() -> Iterator[Any]:
    """Two arrivals of every encoding by default, arrivals and hosts in turn; all other combinations are slow."""
    for turn, (arrival, hosts) in enumerate(ARRIVALS.items()):
        for number, name in enumerate(locant.names()):
            served = [host for host in hosts if name in (IN_DECODERS if _decodes(arrival, host) else ENCODERS)]
            for index, family in enumerate(served):
                chosen = (turn + number) % 4 == 0 and index == (turn + number) % len(served)
                slow = () if chosen else (pytest.mark.slow,)
                yield pytest.param(arrival, family, name, marks=slow, id=f"{arrival.__name__}-{family}-{name}")


@torch.no_grad()
@pytest.mark.parametrize(("arrival", "family", "name"), list(cases()))
def test_the_same_sentence_gives_the_same_answer(arrival: Callable[[str, str], None], family: str, name: str) -> None:
    arrival(family, name)
