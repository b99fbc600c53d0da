"""The conformance suite can fail: each fault, planted into the package for one test, is caught by the check named."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import locant.testing as suite
from locant import Positions
from locant.backends import BACKENDS, reference, sdpa, speeds
from locant.encoding import Encoding, Sum
from locant.encodings.absolute import Absolute
from locant.encodings.deberta import Deberta
from locant.encodings.rope import Rope
from locant.encodings.shaw import Shaw
from locant.encodings.sinusoidal import Sinusoidal
from locant.encodings.tisa import Tisa
from locant.encodings.tupe import TupeA
from locant.encodings.xlnet import XLNet
from locant.terms import Clip, LogBucket, Operands, RelativeGate, RelativeKey, RelativeQuery, RelativeValue, Untied
from tests.conformance.cases import BY_ID

DOOR = importlib.import_module("locant.attention")  # the module: the package has a function of that name
Plant = Callable[[pytest.MonkeyPatch], None]


def method(owner: type, name: str, change: Callable) -> Plant:
    """A fault that wraps a method: ``change(original, self, *args)``."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def changed(self, *args, **kwargs):
            return change(original, self, *args, **kwargs)

        patch.setattr(owner, name, changed)

    return plant


def claim(owner: type[Encoding], **claims) -> Plant:
    return lambda patch: patch.setattr(owner, "properties", replace(owner.properties, **claims))


def counted_without_cache(patch: pytest.MonkeyPatch) -> None:
    original = Positions.arange.__func__

    def arange(cls, num_queries, num_keys=None, device=None):
        positions = original(cls, num_queries, num_keys, device)
        return replace(positions, query=positions.key[:num_queries], contiguous=False)

    patch.setattr(Positions, "arange", classmethod(arange))


def counted_over_padding(patch: pytest.MonkeyPatch) -> None:
    def from_mask(cls, mask, num_queries=None):
        return cls.from_ids(torch.arange(mask.shape[-1]).expand(mask.shape))

    patch.setattr(Positions, "from_mask", classmethod(from_mask))


def inverted_mask(patch: pytest.MonkeyPatch) -> None:
    original = DOOR._allowed

    def allowed(*args):
        found = original(*args)
        return found if found is None else ~found

    patch.setattr(DOOR, "_allowed", allowed)


def causal_sees_one_more(patch: pytest.MonkeyPatch) -> None:
    original = torch.Tensor.tril
    patch.setattr(torch.Tensor, "tril", lambda self, diagonal=0: original(self, diagonal + 1))


def uniform_empty_rows(patch: pytest.MonkeyPatch) -> None:
    def run(call):
        allowed = call.allowed if call.allowed is None else call.allowed | ~call.allowed.any(-1, keepdim=True)
        return reference.run(replace(call, allowed=allowed))

    patch.setitem(BACKENDS, "reference", replace(reference.BACKEND, run=run))


def undropped_values(patch: pytest.MonkeyPatch) -> None:
    def run(call):
        out = reference.run(replace(call, terms=tuple(t for t in call.terms if not isinstance(t, RelativeValue))))
        _, weights = reference.run(replace(call, dropout=0.0, return_weights=True))
        return sum((t.apply(call.operands, weights) for t in call.terms if isinstance(t, RelativeValue)), out)

    patch.setitem(BACKENDS, "reference", replace(reference.BACKEND, run=run))
    patch.setattr(speeds, "order", lambda call: ("reference",))


def rounded_bias(patch: pytest.MonkeyPatch) -> None:
    original = sdpa.bias

    def bias(call):
        found = original(call)
        return found if found is None or found.dtype == torch.float64 else found.to(torch.bfloat16).to(found.dtype)

    patch.setattr(sdpa, "bias", bias)


def remembered_scores(patch: pytest.MonkeyPatch) -> None:
    original, kept = Tisa.scores, {}
    patch.setattr(Tisa, "scores", lambda self, offset: kept.setdefault(len(offset), original(self, offset)))


def recalled_by_computing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Positions, "recall", lambda self, owner, compute: compute())


def recalled_without_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Positions, "recall", lambda self, owner, compute: self.shared.get(owner) if self.shared else compute()
    )


def unsaved_table(patch: pytest.MonkeyPatch) -> None:
    original = Shaw.__init__

    @functools.wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        table = self.table.detach()
        del self.table
        self.register_buffer("table", table, persistent=False)

    patch.setattr(Shaw, "__init__", init)


def transposed_shift(patch: pytest.MonkeyPatch) -> None:
    original = sdpa._shift
    patch.setattr(sdpa, "_shift", lambda wide, n: original(wide.flip(-1), n))


def dropped(name: str) -> Callable:
    """The term without the gradient of its table."""
    return lambda original, self, *args: original(replace(self, table=self.table.detach()), *args)


FAULTS: dict[str, tuple[str, str, Plant]] = {
    # fault: (case, check, what is planted)
    "the sign of the offset": ("shaw", "oracle", method(Clip, "row", lambda row, self, r: row(self, -r))),
    "the sign of the bucket": ("t5", "oracle", method(LogBucket, "row", lambda row, self, r: row(self, -r))),
    "a missing scale": ("none", "oracle", method(Operands, "scaled", lambda f, self, x, scaled: x)),
    "a term outside the scale": (
        "shaw",
        "oracle",
        method(Operands, "scaled", lambda f, self, x, s: f(self, x, s and x.dim() < 4)),
    ),
    "off by one at the clip edge": (
        "shaw",
        "oracle",
        method(Clip, "row", lambda f, self, r: f(self, r.clamp(max=self.clip - 1))),
    ),
    "an edge one too far": (
        "huang_m3",
        "range",
        method(Clip, "row", lambda f, self, r: f(self, r.clamp(1 - self.clip, self.clip - 1))),
    ),
    "the cache offset ignored": ("huang_m4", "cache", counted_without_cache),
    "the cache offset ignored, absolute": ("absolute", "cache", counted_without_cache),
    "padding counted": ("absolute", "padding", counted_over_padding),
    "padding counted, untied [CLS]": ("tupe_a", "padding", counted_over_padding),
    "documents that see each other": ("none", "packing", method(Positions, "same_document", lambda f, self: None)),
    "an inverted mask": ("none", "oracle", inverted_mask),
    "causality off by one": ("alibi", "oracle", causal_sees_one_more),
    "a row that sees nothing, uniform": ("none", "empty_rows", uniform_empty_rows),
    "a dropped gradient, keys": ("huang_m4", "gradcheck", method(RelativeKey, "apply", dropped("table"))),
    "a dropped gradient, one backend": ("huang_m4", "backends", method(RelativeQuery, "apply", dropped("table"))),
    "a dropped gradient, gate": ("huang_m3", "gradcheck", method(RelativeGate, "apply", dropped("table"))),
    "a fused path shifted the other way": ("tisa", "backends", transposed_shift),
    "values that see undropped weights": ("shaw/key_value", "dropout", undropped_values),
    "a bias in half precision": ("t5", "low_precision", rounded_bias),
    "an encoding that does nothing": ("rope", "position", method(Rope, "rotate", lambda f, self, x, ids: x)),
    "a table that clamps in silence": (
        "absolute",
        "range",
        method(Encoding, "check_length", lambda f, self, positions: None),
    ),
    "[CLS]: the column after the row": (
        "huang_m4/untied",
        "oracle",
        method(Untied, "rows", lambda f, self, p: f(self, p).where(~(p.special()[1][..., None, :]), self.to_row)),
    ),
    "u leaks into the offsets": (
        "xlnet",
        "oracle",
        method(
            XLNet,
            "terms",
            lambda f, self, *a: tuple(
                t if t.stage != "logits" or t.table.dim() == 3 else replace(t, table=0 * t.table) for t in f(self, *a)
            ),
        ),
    ),
    "the logit factor ignored": (
        "tupe_a",
        "oracle",
        method(TupeA, "__init__", lambda f, self, *a, **k: (f(self, *a, **k), setattr(self, "logit_factor", 1.0))[0]),
    ),
    "no logit factor in a sum": ("tupe_a+huang_m4", "oracle", lambda patch: patch.setattr(Sum, "logit_factor", 1.0)),
    "a frequency grid one off": (
        "sinusoidal",
        "oracle",
        method(Sinusoidal, "waves", lambda f, self, ids: f(self, ids + 1)),
    ),
    "projections that are not tied": ("deberta", "parameters", method(Deberta, "tie", lambda f, self, first: None)),
    "scores remembered by length": ("tisa", "copies", remembered_scores),
    "shared values computed in each layer": ("tupe_a", "shared_once", recalled_by_computing),
    "shared values lost by reentrant checkpointing": ("t5", "checkpointing", recalled_without_refusal),
    "a table that is not saved": ("shaw", "state_dict", unsaved_table),
    "a false claim of shift invariance": ("absolute", "shift", claim(Absolute, shift_invariant=True)),
    "a shift invariance not claimed": ("shaw", "shift", claim(Shaw, shift_invariant=False)),
    "a false claim of symmetry": ("shaw", "symmetry", claim(Shaw, symmetric=True)),
    "a symmetry not claimed": ("rope", "symmetry", claim(Rope, symmetric=False)),
    "a false claim of content": ("tisa", "content", claim(Tisa, content=True)),
    "a content not claimed": ("shaw", "content", claim(Shaw, content=False)),
    "a false neutral value": ("shaw", "neutral", method(Shaw, "neutralize", lambda f, self: None)),
    "a false claim past the range": ("tisa", "range", claim(Tisa, beyond_range="clip")),
    "a false claim of sharing": ("tisa", "parameters", claim(Tisa, layers="shared")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    case, check, plant = FAULTS[fault]
    run = getattr(suite, f"check_{check}")
    run(BY_ID[case])
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=rf"^{case.replace('+', '.')}: "):
        run(BY_ID[case])
