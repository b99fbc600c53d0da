"""Text as unpadded windows of token ids: what every analysis of real text reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locant.analysis.model import Host


def text_windows(
    tokenizer: Any, texts: Sequence[str], length: int, *, limit: int | None = None, special: bool = True
) -> Int[Tensor, "N n"]:
    """Windows of ``length`` tokens over the texts in order, each between the tokenizer's own special tokens.

    ``limit``: at most so many windows, spread evenly over the text (over its first tokens where it is much longer).
    ``special=False``: without special tokens. Raises: ValueError where the text is shorter than
    one window, or the window leaves no room for a token.
    """
    before, after = special_tokens(tokenizer) if special else ([], [])
    room = length - len(before) - len(after)
    if room < 1:
        raise ValueError(
            f"analysis: length={length} leaves no token beside {len(before) + len(after)} special ones; "
            f"give length >= {len(before) + len(after) + 1}"
        )
    stream: list[int] = []
    for text in texts:
        stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if limit is not None and len(stream) >= 8 * limit * room:
            break
    count = len(stream) // room
    if not count:
        raise ValueError(
            f"analysis: the text has {len(stream)} tokens but one window takes {room} (length={length}); "
            "give more text, or a smaller length"
        )
    step = max(1, count // limit) if limit else 1
    chosen = list(range(0, count, step))[: limit or count]
    return torch.tensor([[*before, *stream[i * room : (i + 1) * room], *after] for i in chosen])


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    places = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
    start = places[0] if places else 0
    return list(full[:start]), list(full[start + len(bare) :])


def check_windows(who: str, host: Host, windows: Tensor) -> None:
    """Raise a ValueError for windows that are empty, too long for the model, padded, or outside its vocabulary."""
    if windows.dim() != 2 or not windows.numel():
        raise ValueError(f"{who}: the windows have shape {tuple(windows.shape)}; give [windows, tokens] of token ids")
    limit = host.trained_length
    if limit is not None and windows.shape[1] > limit:
        raise ValueError(
            f"{who}: the windows have {windows.shape[1]} tokens but the model has {limit} positions; "
            f"give length <= {limit}"
        )
    config = getattr(host.stack, "config", None)
    padding, vocabulary = (getattr(config, name, None) for name in ("pad_token_id", "vocab_size"))
    low, high = int(windows.min()), int(windows.max())
    if low < 0 or (isinstance(vocabulary, int) and high >= vocabulary):
        raise ValueError(
            f"{who}: token ids reach from {low} to {high} but the model's vocabulary has {vocabulary}; "
            "was the text cut by another model's tokenizer?"
        )
    if not isinstance(padding, int) or windows.shape[1] < 2:
        return
    padded = ((windows[:, 0] == padding) | (windows[:, -1] == padding)).nonzero().flatten()
    if len(padded):
        raise ValueError(
            f"{who}: window {int(padded[0])} begins or ends with the padding token {padding}; "
            "give full windows, pads must not enter the averages"
        )
