"""The conformance suite as public API: what every encoding must hold, checked on a case.

    from locant.testing import Case, check_encoding
    check_encoding(Case(id="mine", make=lambda: Mine(3), logit=lambda p, q, k, i, j, h: ..., parameters=9))

Each check is a function of one case that raises an AssertionError with the case, the check and the numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch

from locant.encoding import Encoding
from locant.testing.case import Case, Host
from locant.testing.claims import (
    check_content,
    check_layers,
    check_neutral,
    check_parameters,
    check_position,
    check_range,
    check_shift,
    check_symmetry,
)
from locant.testing.decoding import (
    check_cache,
    check_empty_rows,
    check_explicit_ids,
    check_packing,
    check_padding,
    check_shapes,
)
from locant.testing.exactness import check_backends, check_gradcheck, check_low_precision, check_oracle
from locant.testing.lifecycle import (
    check_checkpointing,
    check_compile,
    check_copies,
    check_dropout,
    check_dtype,
    check_shared_once,
    check_state_dict,
)

Check = Callable[[Case], None]
CHECKS: tuple[Check, ...] = (
    check_oracle,
    check_backends,
    check_low_precision,
    check_gradcheck,
    check_neutral,
    check_position,
    check_shift,
    check_symmetry,
    check_content,
    check_range,
    check_parameters,
    check_layers,
    check_cache,
    check_padding,
    check_packing,
    check_explicit_ids,
    check_empty_rows,
    check_shapes,
    check_state_dict,
    check_dtype,
    check_copies,
    check_dropout,
    check_shared_once,
    check_checkpointing,
)
EQUATIONS: tuple[Check, ...] = (check_oracle, check_parameters)  # what only a case with its equations can be asked


def check_encoding(
    case: Case | Encoding,
    *,
    checks: Sequence[Check] | None = None,
    num_heads: int = 3,
    head_dim: int = 8,
    model_dim: int = 10,
) -> list[str]:
    """Run the conformance suite on a case, or on an encoding object built for the given sizes.

    An object alone states no equation: the oracle and the parameter count are then left out, and a claim of ``clip``
    or ``saturate`` cannot be tried. ``check_compile`` takes seconds and is run when asked for in ``checks``.
    Returns the names of the checks that ran and held.
    Raises: AssertionError with one line for each check that failed.
    """
    if isinstance(case, Encoding):
        encoding = case
        case = Case(
            encoding.name,
            lambda: copy.deepcopy(encoding).to(torch.get_default_device()),
            num_heads=num_heads,
            head_dim=head_dim,
            model_dim=model_dim,
        )
        checks = [c for c in CHECKS if c not in EQUATIONS] if checks is None else checks
        if encoding.properties.beyond_range in ("clip", "saturate"):
            checks = [c for c in checks if c is not check_range]
    failures, held = [], []
    for check in CHECKS if checks is None else checks:
        try:
            check(case)
            held.append(check.__name__)
        except AssertionError as error:
            failures.append(str(error))
    if failures:
        raise AssertionError("\n".join(failures))
    return held


__all__ = [
    "CHECKS",
    "EQUATIONS",
    "Case",
    "Check",
    "Host",
    "check_backends",
    "check_cache",
    "check_checkpointing",
    "check_compile",
    "check_content",
    "check_copies",
    "check_dropout",
    "check_dtype",
    "check_empty_rows",
    "check_encoding",
    "check_explicit_ids",
    "check_gradcheck",
    "check_layers",
    "check_low_precision",
    "check_neutral",
    "check_oracle",
    "check_packing",
    "check_padding",
    "check_parameters",
    "check_position",
    "check_range",
    "check_shapes",
    "check_shared_once",
    "check_shift",
    "check_state_dict",
    "check_symmetry",
]
