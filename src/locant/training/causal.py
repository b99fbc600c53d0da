"""Training of a small GPT-2 with one position encoding: on the target of a prompt, or on every next token of a window.

The conditions are those of `locant.training.mlm`: host weights, data order and schedule follow from the seed alone, and
the vocabulary head is applied only where a token is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from locant.data.mlm import IGNORED
from locant.training.hosts import next_token_logits


@dataclass(frozen=True)
class Pairs:
    """Prompts and targets as ids, in the form of windows: ``ids[k]`` is a whole sequence, predicted from ``starts[k]``.

    Every sequence ends with ``end_id``, which is predicted too.
    """

    ids: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]  # first predicted token
    documents: None = None

    @classmethod
    def join(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], end_id: int) -> Pairs:
        """Prompt, target and end of each pair. Raises: ValueError for an empty prompt: nothing predicts its target."""
        for index, (prompt, _) in enumerate(pairs):
            if not prompt:
                raise ValueError(f"pairs: example {index} has a prompt of 0 tokens, needed 1 or more")
        ids = tuple((*prompt, *target, end_id) for prompt, target in pairs)
        return cls(ids, tuple(len(prompt) for prompt, _ in pairs))

    def __len__(self) -> int:
        return len(self.ids)


class PairCollate:
    """Examples of `Pairs` -> input_ids, labels (targets alone), attention_mask [B, n]; padded on the right."""

    def __init__(self, pairs: Pairs, pad_id: int) -> None:
        self.pairs, self.pad_id = pairs, pad_id

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        import torch

        chosen = [int(example["example_id"]) for example in examples]
        width = max(len(self.pairs.ids[k]) for k in chosen)
        ids = torch.full((len(chosen), width), self.pad_id)
        labels = torch.full((len(chosen), width), IGNORED)
        for row, k in enumerate(chosen):
            sequence, start = torch.tensor(self.pairs.ids[k]), self.pairs.starts[k]
            ids[row, : len(sequence)] = sequence
            labels[row, start : len(sequence)] = sequence[start:]
        real = torch.arange(width) < torch.tensor([len(self.pairs.ids[k]) for k in chosen])[:, None]
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": real.long(),
            "example_ids": torch.tensor(chosen),
        }


class WindowCollate:
    """Windows of equal length -> input_ids and labels [B, n]: every token but the first and last is predicted.

    The [SEP] that closes a window says where the window was cut, not what the text is: a model that is taught it learns
    to count to the trained length and to end there, in longer windows, too.
    """

    def __call__(self, examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Collates a batch."""
        import numpy as np
        import torch

        ids = torch.as_tensor(np.stack([example["input_ids"] for example in examples]).astype("int64"))
        labels = ids.clone()
        labels[:, [0, -1]] = IGNORED
        return {"input_ids": ids, "labels": labels, "example_ids": torch.tensor([e["example_id"] for e in examples])}


def make_objective(host: Any) -> Any:
    """Mean cross-entropy of the labeled tokens, as a module that the Trainer takes."""
    from torch import nn

    class CausalObjective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = host

        def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None) -> dict[str, Any]:
            logits, targets = next_token_logits(self.host, input_ids, labels, attention_mask=attention_mask)
            return {"loss": nn.functional.cross_entropy(logits.float(), targets)}

    return CausalObjective()


def generate(
    host: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, pad_id: int, end_id: int, batch_size: int = 64
) -> list[list[int]]:
    """Greedy continuations with a key-value cache, in the order of the prompts; they stop at ``end_id``."""
    from locant.training.writing import write

    return write(host, prompts, pad_id, batch_size, max_new_tokens, pad_token_id=pad_id, eos_token_id=end_id)
