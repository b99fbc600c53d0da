"""How a check fails: an AssertionError that says which case, which check, and the numbers."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor


class Verdict:
    """The words of one check on one case."""

    def __init__(self, case: str, check: str) -> None:
        self.who = f"{case}: {check}"

    def fail(self, what: str) -> NoReturn:
        """Raise the AssertionError."""
        raise AssertionError(f"{self.who}: {what}")

    def must(self, condition: bool, what: str) -> None:
        """Fail where the condition does not hold."""
        if not condition:
            self.fail(what)

    def close(self, what: str, have: Tensor, want: Tensor, tolerance: float, floor: float = 1.0) -> None:
        """Fail where ``have`` differs from ``want`` by more than ``tolerance`` times its size (``floor`` at least)."""
        self.must(have.shape == want.shape, f"{what}: shape {tuple(have.shape)}, expected {tuple(want.shape)}")
        if not have.numel():
            return
        have, want = have.detach().double(), want.detach().double()
        allowed = tolerance * max(floor, want.abs().max().item())
        difference = (have - want).abs().nan_to_num(nan=float("inf"))
        worst = int(difference.argmax())
        if difference.flatten()[worst] > allowed:
            where = tuple(int(n) for n in torch.unravel_index(torch.tensor(worst), difference.shape))
            self.fail(
                f"{what}: largest difference {difference.max():.3g} (allowed {allowed:.3g}) at {where}: "
                f"got {have.flatten()[worst]:.9g}, expected {want.flatten()[worst]:.9g}"
            )

    def far(self, what: str, have: Tensor, other: Tensor, least: float = 1e-6) -> None:
        """Fail where two results that must differ are equal."""
        difference = (have.detach().double() - other.detach().double()).abs().max().item()
        if not difference > least:
            self.fail(f"{what}: largest difference {difference:.3g}, expected more than {least:.3g}")
