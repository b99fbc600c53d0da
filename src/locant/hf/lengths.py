"""What a model does at each length: its loss, or, without a language-model head, how well its embeddings recognize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from locant.hf.attachment import attachments
from locant.hf.extend import capacity, extend
from locant.hf.guard import guard
from locant.hf.reach import reach
from locant.hf.writing import replacing

MASKED = 0.15  # of the tokens, in a masked language model
IGNORED = -100


@dataclass(frozen=True)
class AtLength:
    """One length, in tokens (special ones included), and ``windows``, the number of pieces of text that were read.

    ``loss``: mean cross-entropy in nats of the masked (or next) tokens. ``found``: share of the pieces whose embedding
    is nearer to that of the text right behind it than to that of any other; ``own``, ``other``: the mean cosines with
    those. ``refused``: why the model cannot do this length.
    """

    length: int
    windows: int
    loss: float | None = None
    found: float | None = None
    own: float | None = None
    other: float | None = None
    refused: str | None = None


def load_with_head(path: str | Path) -> tuple[nn.Module, str]:
    """A model from disk or the local cache with the head it was saved with: (model, 'mlm', 'causal' or 'embedding')."""
    import transformers as T

    config: Any = T.AutoConfig.from_pretrained(path)
    architecture = next(iter(getattr(config, "architectures", None) or [""]), "")
    kind = "mlm" if "MaskedLM" in architecture else "embedding"
    kind = "causal" if architecture.endswith(("CausalLM", "LMHeadModel")) else kind
    auto = {"mlm": T.AutoModelForMaskedLM, "causal": T.AutoModelForCausalLM, "embedding": T.AutoModel}[kind]
    return auto.from_pretrained(path).eval(), kind


def by_length(
    model: nn.Module, kind: str, tokenizer: Any, text: str, lengths: Sequence[int], windows: int = 8
) -> tuple[AtLength, ...]:
    """Measure each length on (at most) the same ``windows`` starting points in a text; eval mode, no gradients.

    ``kind``: 'mlm', 'causal' or 'embedding' (the mean of the last hidden states).
    Raises: ValueError for a text that is too short for the longest length.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    longest, parts = max(lengths), 2 if kind == "embedding" else 1
    starts = _starts(len(ids), parts * longest, windows)
    model.eval()
    rows = []
    with torch.no_grad():
        for length in lengths:
            try:
                rows.append(_measure(model, kind, tokenizer, ids, starts, length))
            except ValueError as error:
                rows.append(AtLength(length, len(starts), refused=str(error)))
    return tuple(rows)


def _starts(available: int, needed: int, windows: int) -> list[int]:
    if available < needed or (windows > 1 and available < 2 * needed):
        raise ValueError(
            f"extend: the text has {available} tokens but {2 * needed} are needed to measure at this length; give a "
            "longer --text"
        )
    count = min(windows, available // needed)
    return [int(i * (available - needed) / max(count - 1, 1)) for i in range(count)]


def _measure(model: nn.Module, kind: str, tokenizer: Any, ids: Tensor, starts: list[int], length: int) -> AtLength:
    first, last = _specials(tokenizer)
    room = length - len(first) - len(last)

    def piece(start: int) -> Int[Tensor, "1 N"]:
        return torch.tensor([[*first, *ids[start : start + room].tolist(), *last]])

    if kind == "embedding":
        here = torch.cat([_embedding(model, piece(start)) for start in starts])
        behind = torch.cat([_embedding(model, piece(start + room)) for start in starts])
        return _recognized(here @ behind.T, length)
    losses = [_loss(model, kind, tokenizer, piece(start), seed) for seed, start in enumerate(starts)]
    return AtLength(length, len(starts), loss=sum(losses) / len(losses))


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and behind a text."""
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    return [], []


def _embedding(model: nn.Module, ids: Int[Tensor, "1 N"]) -> Float[Tensor, "1 M"]:
    hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]
    return F.normalize(hidden.float().mean(1), dim=-1)


def _recognized(cosine: Float[Tensor, "N N"], length: int) -> AtLength:
    count = len(cosine)
    apart = ~torch.eye(count, dtype=torch.bool)
    return AtLength(
        length,
        count,
        found=float((cosine.argmax(1) == torch.arange(count)).float().mean()),
        own=float(cosine.diagonal().mean()),
        other=float(cosine[apart].mean()) if count > 1 else None,
    )


def _loss(model: nn.Module, kind: str, tokenizer: Any, ids: Int[Tensor, "1 N"], seed: int) -> float:
    if kind == "causal":
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return float(F.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(ids.shape, generator=generator) < MASKED
    hidden[0, ids.shape[1] // 2] = True  # at least one
    masked = ids.masked_fill(hidden, tokenizer.mask_token_id)
    logits = model(input_ids=masked, attention_mask=torch.ones_like(ids)).logits
    labels = ids.masked_fill(~hidden, IGNORED)
    return float(F.cross_entropy(logits[0].float(), labels[0], ignore_index=IGNORED))


@dataclass(frozen=True)
class Extension:
    """A model made longer: what it served, what it serves, and what it does at each length before and after."""

    kind: str
    rule: str
    capacity: int | None
    length: int
    before: tuple[AtLength, ...]
    after: tuple[AtLength, ...]


def extend_and_measure(
    path: str,
    length: int,
    rule: str,
    text: str,
    *,
    theta: float | None = None,
    lengths: Sequence[int] = (),
    windows: int = 8,
    out: Path | None = None,
) -> Extension:
    """Load a model and its tokenizer, measure, `extend`, measure again, and write it to ``out`` if asked for.

    Lengths left out are half of what it serves, all of it, and the new length, with one between.
    Raises: what `extend` and `by_length` raise; ValueError where ``out`` is there already.
    """
    from transformers import AutoTokenizer

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"extend: {out} exists already; give a new or an empty folder")
    model, kind = load_with_head(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    served = capacity(model)
    known = served or reach(model).trained or length // 2
    chosen = list(lengths) or sorted({known // 2, known, (known + length) // 2, length})
    if served is not None and not attachments(model):
        guard(model)
    before = by_length(model, kind, tokenizer, text, chosen, windows)
    extend(model, length, rule, theta=theta)
    after = by_length(model, kind, tokenizer, text, chosen, windows)
    if out is not None:
        _write(model, tokenizer, length, out)
    return Extension(kind, rule if theta is None else f"theta {theta:g}", served, length, before, after)


def _write(model: Any, tokenizer: Any, length: int, out: Path) -> None:
    """The folder appears whole or not at all."""
    tokenizer.model_max_length = length
    with replacing(out) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
