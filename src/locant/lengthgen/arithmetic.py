"""Addition, subtraction, polynomials, sums and parity, with the scratchpads that the study has."""

from __future__ import annotations

import numpy as np

from locant.lengthgen.problem import ALL, COMPONENTS, FIRST, SEPARATOR, Example, Problem, Raw, Scratchpad, Step, spaced


def _target(answer: str, steps: list[Step], scratchpad: Scratchpad | None) -> str:
    return answer if scratchpad is None else scratchpad.write(steps, answer)


# --- addition ---


def addends(length: tuple[int, int], rng: np.random.Generator) -> Raw:
    """Two numbers with so many digits; the first digit of a longer number is not zero."""
    a, b = (_number(digits, rng) for digits in length)
    return {"a": a, "b": b, "sum": a + b, "cat": f"{length[0]}-by-{length[1]}"}


def _number(digits: int, rng: np.random.Generator) -> int:
    first = rng.integers(1 if digits > 1 else 0, 10)
    return int("".join(str(digit) for digit in (first, *rng.integers(0, 10, digits - 1))))


def write_addition(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`Compute 5 3 + 7 ? ` -> `The answer is 6 0.`; steps go from the last digit, with a carry."""
    a, b = raw["a"], raw["b"]
    length = (len(str(a)), len(str(b)))
    answer = f"The answer is {spaced(a + b)}."
    return Example(f"Compute {spaced(a)} + {spaced(b)} ? ", _target(answer, _columns(a, b), scratchpad), length)


def _columns(a: int, b: int) -> list[Step]:
    left, right, carry, steps = str(a), str(b), 0, []
    while left or right or carry:
        x, y = int(left[-1:] or 0), int(right[-1:] or 0)
        left, right, total = left[:-1], right[:-1], x + y + carry
        rest = (
            (" ".join(left), " ".join(right))
            if not (left or right)
            else (
                " ".join(left or "0"),
                " ".join(right or "0"),
            )
        )
        computation = f"{x} + {y} + carry = {x + y} + {carry} = {total}"
        carry = total // 10
        steps.append(Step(f"{x}, {y}", computation, str(total % 10), " + ".join(rest), f"carry: {carry}"))
    return steps


# --- subtraction ---


def subtracted(length: tuple[int, int], rng: np.random.Generator) -> Raw:
    """Two numbers as `addends` draws them; their difference may be negative."""
    a, b = (_number(digits, rng) for digits in length)
    return {"a": a, "b": b, "difference": a - b, "cat": f"{length[0]}-by-{length[1]}"}


def write_subtraction(raw: Raw) -> Example:
    """`Compute 5 3 - 7 1 ? ` -> `The answer is - 1 8.` (The study names subtraction, without a format.)"""
    a, b = raw["a"], raw["b"]
    prompt = f"Compute {spaced(a)} - {spaced(b)} ? "
    return Example(prompt, f"The answer is {spaced(a - b)}.", (len(str(a)), len(str(b))))


# --- sums ---


def digits(length: int, rng: np.random.Generator) -> Raw:
    """Digits 1 to 9, to be added."""
    values = [int(value) for value in rng.integers(1, 10, length)]
    return {"values": values, "answer": sum(values), "cat": length}


def write_sum(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`Compute: 7 + 4 .[SEP] ` -> `The answer is 1 .` (modulo 10); steps keep a running sum modulo 10."""
    values, total, steps = raw["values"], 0, []
    for i, value in enumerate(values):
        reached = value + total
        steps.append(
            Step(
                str(value),
                f"{value} + sum = {value} + {total} =",
                spaced(reached),
                " + ".join(str(rest) for rest in values[i + 1 :]),
                f"sum: {spaced(reached)} = {reached % 10}",
            )
        )
        total = reached % 10
    prompt = f"Compute: {' + '.join(str(value) for value in values)} .{SEPARATOR}"
    return Example(prompt, _target(f"The answer is {sum(values) % 10} .", steps, scratchpad), len(values))


# --- polynomials ---


def polynomial(length: int, rng: np.random.Generator) -> Raw:
    """So many terms with coefficients -3 to 3 and degrees 0 to 3, at x from -2 to 2."""
    coefficients = [int(value) for value in rng.integers(-3, 4, length)]
    degrees = [int(value) for value in rng.integers(0, 4, length)]
    x = int(rng.integers(-2, 3))
    answer = sum(c * x**d for c, d in zip(coefficients, degrees, strict=True))
    return {"coeffs": coefficients, "degrees": degrees, "x": x, "answer": answer, "cat": length}


def write_polynomial(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`Evaluate at x = - 2 in 3 * x ** 2 + ... ? ` -> the value modulo 10, never negative."""
    x, total, steps = raw["x"], 0, []
    pairs = list(zip(raw["coeffs"], raw["degrees"], strict=True))
    terms = [f"{spaced(c)} * x ** {d}" for c, d in pairs]
    for i, (c, d) in enumerate(pairs):
        value = c * x**d
        computation = f"{spaced(c)} * {spaced(x)} ** {d} = {spaced(c)} * {spaced(x**d)}"
        reached = (total + value) % 10
        variable = f"sum: {total} + {spaced(value)} = {reached}"
        steps.append(Step(terms[i], computation, spaced(value), " + ".join(terms[i + 1 :]), variable))
        total = reached
    prompt = f"Evaluate at x = {spaced(x)} in {' + '.join(terms)} ? "
    return Example(prompt, _target(f"The answer is {total}.", steps, scratchpad), len(pairs))


# --- parity ---


def bits(length: int, rng: np.random.Generator) -> Raw:
    """Zeros and ones; the answer is 1 where the ones are odd in number."""
    values = [int(value) for value in rng.integers(0, 2, length)]
    return {"values": values, "answer": sum(values) % 2, "cat": length}


def write_parity(raw: Raw, scratchpad: Scratchpad | None = None) -> Example:
    """`Is the number of 1's even in the sequence [ 0, 1 ] ? ` -> `The answer is No.`; steps keep the parity so far."""
    values, parity, steps = raw["values"], 0, []
    for i, bit in enumerate(values):
        reached, rest = parity ^ bit, ", ".join(str(value) for value in values[i + 1 :])
        computation = f"{bit} ** par = {bit} ** {parity}"
        steps.append(Step(str(bit), computation, str(reached), f"[ {rest} ]", f"par: {reached}"))
        parity = reached
    shown = ", ".join(str(value) for value in values)
    answer = f"The answer is {'No' if parity else 'Yes'}."
    prompt = f"Is the number of 1's even in the sequence [ {shown} ] ? "
    return Example(prompt, _target(answer, steps, scratchpad), len(values))


ARITHMETIC = (
    Problem("addition", addends, write_addition, "digits", (1, 8), (9, 16), scratchpad=COMPONENTS, pairs=True),
    Problem("subtraction", subtracted, write_subtraction, "digits", (1, 8), (9, 16), pairs=True, chosen=ALL),
    Problem("summation", digits, write_sum, "addends", (2, 8), (9, 16), scratchpad=COMPONENTS, chosen=FIRST),
    Problem("polynomial", polynomial, write_polynomial, "terms", (1, 8), (9, 16), scratchpad=COMPONENTS, chosen=FIRST),
    Problem("parity", bits, write_parity, "bits", (2, 8), (9, 16), scratchpad=COMPONENTS, chosen=FIRST),
)
