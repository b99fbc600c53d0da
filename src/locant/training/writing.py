"""Text that a model writes: rows in batches of like length, with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def write(
    host: Any,
    rows: Sequence[Sequence[int]],
    pad_id: int,
    batch_size: int,
    longest: int,
    beams: int = 1,
    **settings: Any,
) -> list[list[int]]:
    """Up to ``longest`` new tokens for each row, in the order of the rows, padded by ``pad_id`` once they end.

    Decoders go on from a row, padded on the left, with position ids counted over the mask, so padding shifts nothing;
    encoder-decoders read it, padded on the right. ``beams``: 1 is greedy. ``settings``: more for the host's `generate`.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    reads = bool(host.config.is_encoder_decoder)
    side = "right" if reads else "left"
    order = sorted(range(len(rows)), key=lambda k: len(rows[k]))
    device = next(host.parameters()).device
    written: list[list[int]] = [[] for _ in rows]
    host.eval()
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        ids = [torch.tensor(rows[k]) for k in chosen]
        real = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True, padding_side=side)
        batch = pad_sequence(ids, batch_first=True, padding_value=pad_id, padding_side=side)
        with torch.no_grad():
            out = host.generate(
                batch.to(device),
                attention_mask=real.to(device),
                max_new_tokens=longest,
                do_sample=False,
                num_beams=beams,
                use_cache=True,
                **settings,
            )
        first = 1 if reads else batch.shape[1]  # the start of a decoder, or the prompt
        for row, k in enumerate(chosen):
            written[k] = out[row, first:].tolist()
    return written
