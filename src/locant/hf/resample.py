"""More rows for a table of positions or offsets: the rules, as functions of tensors.

``interpolate`` stretches the rows over the new length (the first and the last stay); ``tile`` starts over; ``clip``
repeats the last row; ``fit`` goes on from row to row by the orthogonal matrix O that best carries each trained row to
the next one, min_O sum_i |p_(i+1) - p_i O|^2: exact for sinusoids, and no row outgrows the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locant.encoding import Encoding
from locant.terms import Clip, Distance, Untied

Rule = Literal["interpolate", "tile", "clip", "fit"]
RULES = ("interpolate", "tile", "clip", "fit")


def check_rule(rule: str) -> None:
    """Refuse a rule that does not exist."""
    if rule not in RULES:
        raise ValueError(f"extend: unknown rule={rule!r}; choose {', '.join(map(repr, RULES))}")


def stretch(rows: Float[Tensor, "R M"], length: int, rule: str) -> Float[Tensor, "R2 M"]:
    """``length`` rows made of R trained ones, computed in float64; as many as before are the same, bit for bit.

    Raises: ValueError for fewer rows than before, or where two rows are needed and one is there.
    """
    check_rule(rule)
    count = len(rows)
    if length < count:
        raise ValueError(f"extend: {length} rows were asked for but the table has {count}; give at least {count}")
    if length == count:
        return rows.clone()
    index = torch.arange(length, device=rows.device)
    if rule == "tile":
        return rows[index % count]
    if rule == "clip":
        return rows[index.clamp(max=count - 1)]
    if count < 2:
        raise ValueError(f"extend: rule={rule!r} needs 2 rows or more but the table has {count}; use rule='clip'")
    wide = rows.double()
    if rule == "fit":
        return _continued(wide, length).to(rows.dtype)
    place = index.double() * ((count - 1) / (length - 1))
    low = place.floor().clamp(max=count - 2).long()
    weight = (place - low)[:, None]
    return ((1 - weight) * wide[low] + weight * wide[low + 1]).to(rows.dtype)


def _continued(rows: Float[Tensor, "R M"], length: int) -> Float[Tensor, "R2 M"]:
    left, _, right = torch.linalg.svd(rows[:-1].T @ rows[1:])
    turn, found = left @ right, [rows]
    last = rows[-1:]
    for _ in range(length - len(rows)):
        last = last @ turn
        found.append(last)
    return torch.cat(found)


def stretch_signed(rows: Float[Tensor, "R M"], clip: int, rule: str) -> Float[Tensor, "R2 M"]:
    """Offsets -clip .. clip made of a table of 2K+1 rows: each side on its own, offset 0 stays."""
    middle = len(rows) // 2
    if rule == "interpolate":
        right, left = (stretch(side, clip + 1, rule)[1:] for side in (rows[middle:], rows[: middle + 1].flip(0)))
    else:
        right, left = (stretch(side, clip, rule) for side in (rows[middle + 1 :], rows[:middle].flip(0)))
    return torch.cat((left.flip(0), rows[middle : middle + 1], right))


@dataclass(frozen=True)
class Layout:
    """How the rows of a table are laid out: ``kept`` rows first, then those that `stretch`es, then ``last`` ones.

    ``rows``: how many the middle part has; ``longer(rows, number, rule)`` makes a middle part of ``number`` rows.
    """

    kept: int
    rows: int
    last: int
    longer: Callable[[Tensor, int, str], Tensor]

    def extend(self, table: Float[Tensor, "R M"], rows: int, rule: str) -> Float[Tensor, "R2 M"]:
        """A table of ``rows`` rows in all."""
        first, middle, last = table.split((self.kept, self.rows, self.last))
        return torch.cat((first, self.longer(middle, rows - self.kept - self.last, rule), last))


def _signed(rows: Tensor, number: int, rule: str) -> Tensor:
    return stretch_signed(rows, number // 2, rule)


def layout_of(encoding: Encoding, rows: int) -> Layout:
    """How an encoding lays out a table of so many rows, told by its rule or its ``max_length``.

    Raises: ValueError where neither tells.
    """
    rule = getattr(encoding, "rule", None)
    rule = rule.rule if isinstance(rule, Untied) else rule
    if isinstance(rule, Clip) and rows >= 2 * rule.clip + 1:
        return Layout(0, 2 * rule.clip + 1, rows - 2 * rule.clip - 1, _signed)
    if isinstance(rule, Distance) and rows >= rule.clip + 1:
        return Layout(0, rule.clip + 1, rows - rule.clip - 1, stretch)
    if encoding.max_length is not None and rows >= encoding.max_length:
        return Layout(rows - encoding.max_length, encoding.max_length, 0, stretch)
    raise ValueError(
        f"extend: how {encoding.name} lays out its {rows} rows is not known; attach it anew with a larger max_length, "
        "perhaps with init='fit'"
    )


def resampled(encoding: Encoding, name: str, old: Tensor, shape: torch.Size, rule: str) -> Tensor:
    """A parameter of an encoding, ``old``, with more rows, as ``shape`` asks for.

    Raises: ValueError where more than the number of rows differs, or ``fit`` meets rows that are single numbers.
    """
    differ = [axis for axis, (a, b) in enumerate(zip(old.shape, shape, strict=True)) if a != b]
    if len(differ) != 1:
        raise ValueError(
            f"extend: {name} of {encoding.name} has shape {tuple(old.shape)} and would need {tuple(shape)}; only the "
            "number of rows may grow"
        )
    axis = differ[0]
    if rule == "fit" and axis == old.dim() - 1:
        raise ValueError(
            f"extend: rule='fit' turns vectors, but each row of {name} of {encoding.name} is a number; use 'clip' or "
            "'interpolate'"
        )
    layout, rows = layout_of(encoding, old.shape[axis]), shape[axis]
    if axis == 0:
        return layout.extend(old, rows, rule)
    if axis == old.dim() - 1:
        return layout.extend(old.T, rows, rule).T
    return torch.stack([layout.extend(head, rows, rule) for head in old])
