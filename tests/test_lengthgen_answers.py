"""Every answer worked out anew from the prompt alone, by other means than the generator's."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest

from locant.lengthgen import PROBLEMS, SCRATCHPADS, bins, pool, problems
from locant.lengthgen.brackets import dyck_path
from locant.lengthgen.kinship import COMPOSED, WORDS, family

DRAWS = 12


def between(prompt: str, first: str, last: str) -> str:
    assert prompt.startswith(first) and prompt.endswith(last), prompt
    return prompt[len(first) : len(prompt) - len(last)].strip()


def digits(text: str) -> int:
    return int(text.replace(" ", ""))


def spelled(number: int) -> str:
    return " ".join(str(number))


# --- what each prompt asks for, as a person would work it out ---------------------------------------------------------


def copied(times: int) -> Callable[[str], str]:
    return lambda prompt: " ".join([between(prompt, "Copy: ", " [SEP] ")] * times)


def replaced(prompt: str) -> str:
    old, new, shown = re.fullmatch(r"Replace (\S+) with (\S+) in (.*) \[SEP\] ", prompt).groups()  # pyright: ignore
    assert set(shown.split()) == {old}
    return " ".join([new] * len(shown.split()))


def joined(prompt: str, head: str, *orders: int) -> str:
    symbols = between(prompt, head, " [SEP] ").split(" ")
    return " [NEXT] ".join(" ".join(symbols[::order]) for order in orders)


def third_quarter(prompt: str) -> str:
    symbols = between(prompt, "Copy: ", " [SEP] ").split(" ")
    assert len(set(symbols)) == len(symbols)
    return " ".join(s for i, s in enumerate(symbols) if len(symbols) // 2 <= i < len(symbols) * 3 // 4)


def computed(prompt: str) -> str:
    sum_ = between(prompt, "Compute ", " ? ")
    a, sign, b = re.fullmatch(r"([\d ]+) ([-+]) ([\d ]+)", sum_).groups()  # pyright: ignore
    return f"The answer is {spelled(digits(a) + digits(b) * (-1 if sign == '-' else 1))}."


def summed(prompt: str) -> str:
    return f"The answer is {sum(map(int, between(prompt, 'Compute: ', ' .[SEP] ').split(' + '))) % 10} ."


def evaluated(prompt: str) -> str:
    x, terms = re.fullmatch(r"Evaluate at x = ([-\d ]+) in (.*) \? ", prompt).groups()  # pyright: ignore
    total = 0
    for term in terms.split(" + "):
        c, d = re.fullmatch(r"([-\d ]+) \* x \*\* (\d)", term).groups()  # pyright: ignore
        power = 1
        for _ in range(int(d)):
            power *= digits(x)
        total += digits(c) * power
    return f"The answer is {total % 10}."


def even(prompt: str) -> str:
    shown = between(prompt, "Is the number of 1's even in the sequence [ ", " ] ? ")
    return f"The answer is {'Yes' if shown.count('1') % 2 == 0 else 'No'}."


def sorted_(key: Callable[[str], int]) -> Callable[[str], str]:
    def answer(prompt: str) -> str:
        items = between(prompt, "Sort the following list [ ", " ]. ").split(", ")
        if len(items) <= 5:  # by definition: the one order without a descent
            orders = {p for p in permutations(items) if all(key(a) <= key(b) for a, b in pairwise(p))}
            (found,) = orders
        else:
            found = sorted(items, key=key)
        return f"The sorted list is [ {', '.join(found)} ]."

    return answer


def followed(prompt: str) -> str:
    clauses, query = re.fullmatch(r"If (.*)\. Then, what is the value of (\w)\? ", prompt).groups()  # pyright: ignore
    stated = dict(clause.split(" = ") for clause in clauses.split(", "))
    signs, name = 1, query
    while " " in stated[name]:
        sign, name_before = stated[name].split(" ")
        signs *= -1 if sign == "-" else 1
        name = name_before
    return f"The answer is {signs * int(stated[name]):+d}."


CLOSES = {"(": ")", "[": "]", "{": "}", "<": ">"}


def expected(prompt: str) -> str:
    """What is open after each symbol: cancel neighbors until nothing cancels."""
    word, said = between(prompt, "Stack: ", " [SEP] ").split(" "), []
    for end in range(1, len(word) + 1):
        rest = "".join(word[:end])
        while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", rest)) != rest:
            rest = shorter
        assert not rest or rest[-1] in CLOSES, "a bracket closed that was not open"
        said.append(CLOSES[rest[-1]] if rest else "0")
    assert said[-1] == "0"
    return " ".join(said)


def missing(prompt: str) -> str:
    """The one kind that is open once more than it is closed."""
    word = between(prompt, "Close: ", " [SEP] ").split(" ")
    for first, last in CLOSES.items():
        kind = [1 if s == first else -1 for s in word if s in (first, last)]
        assert all(sum(kind[:end]) >= 0 for end in range(len(kind) + 1)), "closed before it was opened"
    (found,) = [last for first, last in CLOSES.items() if word.count(first) != word.count(last)]
    assert word.count(found) == len([s for s in word if CLOSES.get(s) == found]) - 1
    return found


def carried_out(prompt: str) -> str:
    """From the right: a stack of strings, as a calculator in reverse Polish notation has it."""
    stack: list[list[str]] = []
    symbols: list[str] = []
    for word in reversed(between(prompt, "Solve: ", "[SEP] ").split(" ")):
        if re.fullmatch(r"[A-Z]\d+", word):
            symbols.insert(0, word)
            continue
        if symbols:
            stack.append(symbols)
            symbols = []
        if word == ",":
            continue
        x = stack.pop()
        if word == "copy":
            out = x
        elif word == "reverse":
            out = [x[-1 - i] for i in range(len(x))]
        elif word == "shift":
            out = [x[(i + 1) % len(x)] for i in range(len(x))]
        elif word == "swap_first_last":
            out = [x[{0: len(x) - 1, len(x) - 1: 0}.get(i, i)] for i in range(len(x))]
        elif word == "repeat":
            out = [x[i % len(x)] for i in range(2 * len(x))]
        elif word == "echo":
            out = [x[min(i, len(x) - 1)] for i in range(len(x) + 1)]
        else:
            y = stack.pop()
            out = {"append": [*x, *y], "prepend": [*y, *x], "remove_first": y, "remove_second": x}[word]
        stack.append(out)
    (found,) = stack
    return " ".join(found)


class Couples:
    """What facts say of the couples that people were born to and form, without any table of relations.

    Every person has a couple of parents and is half of a couple; facts make couples equal. Whoever is spouse of one
    half is the other half, as a couple has two. Siblings and spouses are two people who are known not to be one.
    """

    def __init__(self) -> None:
        self.same: dict[object, object] = {}
        self.different: list[tuple[object, object]] = []
        self.unnamed = 0

    def find(self, node: object) -> object:
        while node in self.same:
            node = self.same[node]
        return node

    def equal(self, a: object, b: object) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.same[a] = b

    def born(self, person: object) -> object:
        return self.find(("born", self.find(("person", person))))

    def wed(self, person: object) -> object:
        return self.find(("wed", self.find(("person", person))))

    def somebody(self) -> object:
        self.unnamed += 1
        return f"somebody {self.unnamed}"

    def apart(self, *people: object) -> None:
        self.different += list(permutations(people, 2))

    def state(self, kind: str, x: object, y: object) -> None:
        z = self.somebody()
        if kind == "parent":
            self.equal(self.wed(x), self.born(y))
        elif kind == "child":
            self.state("parent", y, x)
        elif kind == "sibling":
            self.equal(self.born(x), self.born(y))
            self.apart(x, y)
        elif kind == "spouse":
            self.equal(self.wed(x), self.wed(y))
            self.apart(x, y)
        elif kind == "grandparent":
            self.state("parent", x, z)
            self.state("parent", z, y)
        elif kind == "grandchild":
            self.state("grandparent", y, x)
        elif kind == "pibling":
            self.state("sibling", x, z)
            self.state("parent", z, y)
        elif kind == "nibling":
            self.state("pibling", y, x)
        elif kind == "parent_in_law":
            self.state("parent", x, z)
            self.state("spouse", z, y)
        elif kind == "child_in_law":
            self.state("parent_in_law", y, x)
        else:
            raise AssertionError(f"{kind} may be read in two ways")

    def close(self, people: list[object]) -> None:
        """Two people who are both the other half of one couple are one person."""
        everyone = [*people, *(f"somebody {n + 1}" for n in range(self.unnamed))]
        changed = True
        while changed:
            changed = False
            for y in everyone:
                halves = {self.find(("person", x)): x for x in everyone
                          if (x, y) in self.different and self.wed(x) == self.wed(y)}  # fmt: skip
                for one, other in pairwise(list(halves.values())):
                    born, wed = (self.born(one), self.born(other)), (self.wed(one), self.wed(other))
                    self.equal(("person", one), ("person", other))
                    self.equal(*born)
                    self.equal(*wed)
                    self.equal(self.born(one), born[0])
                    self.equal(self.wed(one), wed[0])
                    changed = True

    def holds(self, kind: str, x: object, y: object, people: list[object]) -> bool:
        """Whether x is that to y, for two who are not one."""
        everyone = [*people, *(f"somebody {n + 1}" for n in range(self.unnamed))]
        if kind == "parent":
            return self.wed(x) == self.born(y)
        if kind == "sibling":
            return self.born(x) == self.born(y)
        if kind == "spouse":
            return self.wed(x) == self.wed(y)
        if kind == "sibling_in_law":
            return any(
                self.holds("spouse", z, one, people)
                and self.apart_from(z, one)
                and self.holds("sibling", z, other, people)
                and self.apart_from(z, other)
                for z in everyone
                for one, other in ((x, y), (y, x))
            )
        by = {
            "grandparent": ("parent", "parent"),
            "pibling": ("sibling", "parent"),
            "parent_in_law": ("parent", "spouse"),
        }
        if kind in by:
            first, second = by[kind]
            return any(
                self.holds(first, x, z, people)
                and self.holds(second, z, y, people)
                and (first == "parent" or self.apart_from(z, x))
                and (second == "parent" or self.apart_from(z, y))
                for z in everyone
            )
        inverse = {
            "child": "parent",
            "grandchild": "grandparent",
            "nibling": "pibling",
            "child_in_law": "parent_in_law",
        }
        return self.holds(inverse[kind], y, x, people)

    def apart_from(self, z: object, y: object) -> bool:
        same = self.find(("person", z)), self.find(("person", y))
        return any((self.find(("person", a)), self.find(("person", b))) == same for a, b in self.different)


KINDS = {word: (kind, woman) for kind, words in WORDS.items() for woman, word in enumerate(words)}
PERSON = r"(ent_\d+)"
FACT_FORMS = (
    (rf"{PERSON} is (?:the|a) (\S+) (?:of|to) {PERSON}", (1, 2, 3)),
    (rf"{PERSON} is {PERSON} 's (\S+)", (1, 3, 2)),
    (rf"{PERSON} has a (\S+) who is {PERSON}", (3, 2, 1)),
)


def read_fact(text: str) -> tuple[str, str, str]:
    """Who is what to whom."""
    for form, (x, word, y) in FACT_FORMS:
        if found := re.fullmatch(form, text):
            return found[x], found[word], found[y]
    raise AssertionError(f"no fact: {text!r}")


def related(prompt: str) -> str:
    story, asked = between(prompt, "Solve: ", "[SEP] ").split(" [query] ")
    facts = [read_fact(text) for text in story.removesuffix(" .").split(" . ")]
    y, x = re.findall(r"ent_\d+", asked)
    people = sorted({one for a, _, b in facts for one in (a, b)})
    assert len(people) == len(facts) + 1, "a chain of different people"
    world = Couples()
    world.apart(*people)
    for a, word, b in facts:
        world.state(KINDS[word][0], a, b)
    world.close(list(people))
    (woman,) = {KINDS[word][1] for a, word, _ in facts if a == x}
    kinds = [kind for kind in WORDS if world.holds(kind, x, y, list(people))]
    assert len(kinds) == 1, kinds
    return f"The answer is {x} is the {WORDS[kinds[0]][woman]} of {y}."


ANSWERS: dict[str, Callable[[str], str]] = {
    "copy_rsc": copied(1),
    "copy_rsc2x": lambda prompt: " ".join([between(prompt, "Copy: ", " [SEP] ")] * 2),
    "copy_rdc": replaced,
    "copy_cmc": copied(1),
    "copy_cmc2x": lambda prompt: joined(prompt, "Copy: ", 1, 1),
    "reverse_mc": lambda prompt: joined(prompt, "Reverse: ", -1),
    "reverse_mc2x": lambda prompt: joined(prompt, "Reverse: ", -1, -1),
    "reverse_mcrv": lambda prompt: joined(prompt, "Reverse: ", -1, 1),
    "copy_half": third_quarter,
    "count": lambda prompt: str(len(between(prompt, "Count: ", " [SEP] ").split(" ")) % 10),
    "addition": computed,
    "subtraction": computed,
    "summation": summed,
    "polynomial": evaluated,
    "parity": even,
    "sort_single": sorted_(pool(50).index),
    "sort_multi": sorted_(digits),
    "lego": followed,
    "lego_permuted": followed,
    "dyck": expected,
    "dyck_shuffle": missing,
    "kinship": related,
    "pcfg": carried_out,
}


def lengths_of(name: str) -> list:
    """Some trained and some longer lengths, the first and last among them."""
    problem = PROBLEMS[name]
    short, long = bins(problem, *problem.train), bins(problem, *problem.test, trained=problem.train[1])
    return [*short[:: max(1, len(short) // 4)], short[-1], long[0], *long[:: max(1, len(long) // 3)], long[-1]]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_answer_is_what_the_prompt_asks_for(name: str):
    rng = np.random.default_rng(17)
    for length in lengths_of(name):
        for _ in range(DRAWS):
            one = PROBLEMS[name].make(length, rng)
            assert one.target == ANSWERS[name](one.prompt), one


@pytest.mark.parametrize("name", [name for name, problem in PROBLEMS.items() if problem.scratchpad])
def test_a_scratchpad_changes_neither_prompt_nor_answer(name: str):
    for seed in range(5):
        length = lengths_of(name)[-1]
        plain, full = (
            PROBLEMS[name].make(length, np.random.default_rng(seed), SCRATCHPADS[k]) for k in ("plain", "full")
        )
        assert full.prompt == plain.prompt and full.target.endswith(f"Thus,  {plain.target}")


# --- how examples are drawn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", range(5))
def test_every_balanced_word_is_as_likely_as_every_other(pairs: int):
    rng = np.random.default_rng(3)
    words = ["".join("()"[not opens] for opens in dyck_path(pairs, rng)) for _ in range(2800)]
    counts = np.unique(words, return_counts=True)[1]
    catalan = (1, 1, 2, 5, 14)[pairs]
    assert len(counts) == catalan and abs(counts / 2800 * catalan - 1).max() < 0.25


def test_brackets_of_different_kinds_cross_in_a_shuffle_and_never_in_a_dyck_word():
    def crossing(word: list[str]) -> bool:
        rest = "".join(word)
        while (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", rest)) != rest:
            rest = shorter
        return bool(rest)

    rng = np.random.default_rng(1)
    mixed = [PROBLEMS["dyck_shuffle"].generate(9, rng)["word"] for _ in range(40)]
    nested = [PROBLEMS["dyck"].generate(9, rng)["word"] for _ in range(40)]
    assert sum(map(crossing, mixed)) > 30 and not any(map(crossing, nested))
    assert len({raw["word"][-1] for raw in (PROBLEMS["dyck_shuffle"].generate(6, rng) for _ in range(60))}) == 4


def test_differences_take_every_sign():
    rng = np.random.default_rng(2)
    found = [PROBLEMS["subtraction"].generate((1, 1), rng)["difference"] for _ in range(600)]
    assert set(found) == set(range(-9, 10))
    assert PROBLEMS["subtraction"].format({"a": 3, "b": 120}).target == "The answer is - 1 1 7."


def test_functions_of_strings_are_counted_bounded_and_all_used():
    rng, names = np.random.default_rng(5), set()
    for length in (1, 8, 9, 35):
        for _ in range(60):
            one = PROBLEMS["pcfg"].make(length, rng)
            used = re.findall(r"\b[a-z_]+\b", one.prompt.removeprefix("Solve: "))
            assert len(used) == length == one.length and 2 <= len(one.target.split()) <= 40
            names |= set(used)
    assert len(names) == 10
    few = problems(7)["pcfg"]
    symbols = {s for _ in range(80) for s in few.make(4, rng).prompt.split() if re.fullmatch(r"[A-Z]\d+,?", s)}
    assert symbols == {"A1", "B1", "C1", "D1", "E1", "F1", "G1"}


def test_the_table_of_kinship_is_what_couples_say():
    """Every entry follows from two facts, and where one relation alone follows there is an entry."""
    for first in WORDS:
        for second in WORDS:
            if "sibling_in_law" in (first, second):
                assert second not in COMPOSED.get(first, {})
                continue
            world = Couples()
            world.apart("x", "z", "y")
            world.state(first, "x", "z")
            world.state(second, "z", "y")
            world.close(["x", "z", "y"])
            possible = not world.apart_from("x", "x")  # a spouse's spouse is no third person
            found = [kind for kind in WORDS if possible and world.holds(kind, "x", "y", ["x", "z", "y"])]
            entry = COMPOSED.get(first, {}).get(second)
            assert found == ([entry] if entry else []), (first, second)


def test_a_family_has_one_word_for_any_two_and_knows_its_inverse():
    inverse = {"parent": "child", "sibling": "sibling", "spouse": "spouse", "grandparent": "grandchild"}
    inverse |= {"pibling": "nibling", "parent_in_law": "child_in_law", "sibling_in_law": "sibling_in_law"}
    inverse |= {b: a for a, b in inverse.items()}
    home = family()
    assert len({one for pair in home.kin for one in pair}) == 53 and set(home.kin.values()) == set(WORDS)
    assert all(home.kin[y, x] == inverse[kind] for (x, y), kind in home.kin.items())


@pytest.mark.parametrize("length", [2, 5, 10, 20])
def test_the_backward_proof_goes_from_the_question_down_to_the_facts(length: int):
    rng = np.random.default_rng(length)
    for _ in range(8):
        one = PROBLEMS["kinship"].make(length, rng, SCRATCHPADS["full"])
        story = one.prompt.removeprefix("Solve: ").split(" [query] ")[0]
        facts = {read_fact(text) for text in story.removesuffix(" .").split(" . ")}
        steps = re.findall(r"comp since (.+?) , and (.+?) , then (.+?)  (?:#|\.)", one.target)
        assert len(steps) == length - 1
        open_ = {read_fact(one.target.rsplit("The answer is ", 1)[1].removesuffix("."))}
        for *reasons, concluded in steps:
            assert read_fact(concluded) in open_, "each step proves what is still to be proved"
            open_ -= {read_fact(concluded)}
            open_ |= {read_fact(reason) for reason in reasons}
        assert open_ == facts


def test_answers_of_kinship_are_spread_over_the_words():
    rng = np.random.default_rng(0)
    said = [PROBLEMS["kinship"].make(6, rng).target.split(" ")[6] for _ in range(400)]
    assert set(said) == set(KINDS) and max(map(said.count, said)) < 60


@pytest.mark.parametrize("form", ["no_computation"])
def test_a_scratchpad_that_would_show_nothing_is_refused(form: str):
    with pytest.raises(ValueError, match="kinship: a scratchpad without computation was asked for"):
        PROBLEMS["kinship"].make(3, np.random.default_rng(0), SCRATCHPADS[form])
