"""For serving: the parts of attached encodings that read no content become constants."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locant.encoding import Encoding, Layer, Paper, Stack, Sum
from locant.hf.attachment import attachments
from locant.positions import Positions
from locant.terms import Operands, PairBias, Term

Model = TypeVar("Model", bound=nn.Module)
REMEDY = "it was folded for serving, so do this before folding; detach, and attach or load it again"


class Folded(Encoding):
    """A constant bias for each head and pair of position ids below ``max_length``; nothing in it learns.

    Shapes: bias (outside the scale of the logits), scaled_bias (inside) [H, n, n] or None, both buffers.
    Acts on: logits, content-free.     Past n: an error.     Cost: reading it; H n^2 numbers.
    Raises: ValueError past n, TypeError for real-valued ids.
    """

    def __init__(self, part: Encoding, length: int) -> None:
        super().__init__()
        self.name, self.paper, self.logit_factor = f"{part.name} (folded)", part.paper, part.logit_factor
        self.properties = replace(part.properties, beyond_range="raise", neutral=None)
        self.max_length = self.folded_length = length
        device = next((t.device for t in (*part.parameters(), *part.buffers())), None)
        outside, inside = biases(part, Positions.arange(length, device=device))
        self.register_buffer("bias", outside)
        self.register_buffer("scaled_bias", inside)

    paper: Paper  # pyright: ignore[reportIncompatibleVariableOverride]

    def check_length(self, positions: Positions) -> None:
        """Raise a ValueError where the positions reach past the constant."""
        if positions.length > self.folded_length:
            raise ValueError(
                f"{self.name}: positions reach {positions.length} but it was folded for {self.folded_length}; truncate "
                f"to {self.folded_length} tokens, or attach it again and call locant.hf.fold(model, {positions.length})"
            )

    def pairs(self, bias: Float[Tensor, "H N N"], positions: Positions) -> Float[Tensor, "... I J"]:
        """The bias of the pairs at hand."""
        if positions.continuous:
            raise TypeError(
                f"{self.name}: ids are {positions.query.dtype}, but a folded bias is known for integers only; do not "
                "fold this model"
            )
        if positions.query_special is not None or positions.key_special is not None:
            raise ValueError(
                f"{self.name}: positions name their special tokens, but the bias was folded with the token of id 0 as "
                "the special one; do not fold this model"
            )
        self.check_length(positions)
        if positions.contiguous and positions.key.dim() == 1:  # queries are the last of the keys 0 .. J-1
            keys = positions.num_keys
            if positions.length == keys:
                return bias[:, keys - positions.num_queries : keys, :keys]
        query, key = positions.query, positions.key
        if query.dim() == key.dim() == 1:
            return bias[:, query[:, None], key[None, :]]
        return bias[:, query[..., :, None], key[..., None, :]].movedim(0, 1)

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """The constant, as one term (or two, where one stands inside the scale)."""
        found = ((self.bias, False), (self.scaled_bias, True))
        return tuple(PairBias(self.pairs(b, positions), scaled) for b, scaled in found if isinstance(b, Tensor))


def biases(part: Encoding, positions: Positions) -> tuple[Tensor | None, Tensor | None]:
    """(outside, inside the scale): what a content-free part adds to the logits of every pair, [H I J] or None."""
    zeros = [torch.zeros(1, 1, n, 1, device=positions.key.device) for n in (positions.num_queries, positions.num_keys)]
    sums: dict[bool, Tensor] = {}
    with torch.no_grad():
        positions = part.prepare(positions)
        operands = Operands(zeros[0].double(), zeros[1].double(), zeros[1].double(), positions, 1.0)
        for term in part.terms(positions, Layer(zeros[0], zeros[1])):
            scaled = bool(term.scaled)  # pyright: ignore[reportAttributeAccessIssue]
            addend = term.apply(operands)  # pyright: ignore[reportAttributeAccessIssue]
            sums[scaled] = sums.get(scaled, 0) + addend
    wanted = next((p.dtype for p in part.parameters()), torch.get_default_dtype())
    outside, inside = (sums[s][0].to(wanted) if s in sums else None for s in (False, True))
    return outside, inside


def foldable(part: Encoding) -> bool:
    """Whether a part adds to the logits, nothing else, and does so without reading content."""
    if part.properties.content or "terms" not in part.sites or not set(part.sites) <= {"prepare", "terms"}:
        return False
    device = next((t.device for t in (*part.parameters(), *part.buffers())), None)
    zeros = torch.zeros(1, 1, 2, 1, device=device)
    with torch.no_grad():
        terms = part.terms(part.prepare(Positions.arange(2, device=device)), Layer(zeros, zeros))
    return all(term.stage == "logits" for term in terms)


def fold(model: Model, length: int) -> Model:
    """Turn what is attached and reads no content into constants for input up to ``length``, in place, for serving.

    Bias tables, kernels, slopes and position correlations (T5, TISA, ALiBi, TUPE, ...) become one constant tensor
    [H, length, length] for each layer, computed once where layers share it; outputs stay equal. Parts that read queries
    or keys, or act on the input, stay as they are. The folded parts no longer learn and `save` refuses them; save
    first. `detach` still gives the host back.
    Raises: ValueError where nothing is attached or nothing can be folded, or for a length past a part's table.
    """
    if length < 1:
        raise ValueError(f"fold: length={length} leaves no tokens; give length >= 1")
    found = attachments(model)
    parts = [part for _, _, attachment in found for part in attachment.stack.parts()]
    if not any(foldable(part) for part in parts):
        names = ", ".join(dict.fromkeys(part.name for part in parts)) or "nothing is attached"
        raise ValueError(f"fold: {type(model).__name__} has no content-free bias to fold ({names}); use it as it is")
    stacks = [_folded(attachment.stack, length) for _, _, attachment in found]
    for (_, _, attachment), stack in zip(found, stacks, strict=True):
        attachment.serve(stack)
        attachment.spec = replace(attachment.spec, encoding=None, remedy=REMEDY)
    return model


def _folded(stack: Stack, length: int) -> Stack:
    """The stack with constants in it; what was one object for several layers is one again."""
    constants = {part: Folded(part, length) if foldable(part) else part for part in stack.parts()}
    layers = {}
    for layer in dict.fromkeys(stack):
        fresh = [constants[part] for part in layer.parts()]
        unchanged = all(new is old for new, old in zip(fresh, layer.parts(), strict=True))
        layers[layer] = layer if unchanged else fresh[0] if len(fresh) == 1 else Sum(*fresh)
        layers[layer].train(layer.training)
    return Stack([layers[layer] for layer in stack])
