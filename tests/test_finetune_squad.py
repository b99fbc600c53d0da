"""SQuAD: files are read strictly, no answer is lost at the edge of a window, and the best span is the best of all."""

from __future__ import annotations

import copy
import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from locant.finetune.spans import Span, answers_of, best_spans
from locant.finetune.squad import Answer, Question, read_squad
from locant.finetune.windows import OUTSIDE, Window, WindowSettings, make_windows
from tests.finetune_runs import squad_body, tokenizer

RECORDS = [
    ("q0", "who rowed?", "the sea was cold", [("sea", 4), ("the sea", 0)]),
    ("q1", "what was cold?", "a boat, dark", [("dark", 8)]),
]


def write(path: Path, body: Any) -> Path:
    path.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    return path


def test_a_file_is_read_as_it_is_plain_or_compressed(tmp_path: Path) -> None:
    body = json.dumps(squad_body(RECORDS))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(body.encode()))
    found = read_squad(write(tmp_path / "a.json", body))
    assert found == read_squad(tmp_path / "b.json.gz")
    assert found[0] == Question("q0", "who rowed?", "the sea was cold", (Answer("sea", 4), Answer("the sea", 0)))
    assert [question.id for question in found] == ["q0", "q1"]


def at(body: Any, *path: Any) -> Any:
    for key in path:
        body = body[key]
    return body


QA = ("data", 0, "paragraphs", 1, "qas", 0)
BAD: dict[str, tuple[tuple[Any, ...], str, Any, str]] = {  # where, which field, what comes instead (None: nothing)
    "data": ((), "data", None, r"the file: field 'data' is missing among version"),
    "data is a table": ((), "data", {}, r"the file: field 'data' is dict, needed list"),
    "paragraphs": (("data", 0), "paragraphs", None, r"data\[0\]: field 'paragraphs' is missing among title"),
    "context": (QA[:4], "context", 3, r"data\[0\].paragraphs\[1\]: field 'context' is int, needed str"),
    "question": (QA, "question", "  ", r"qas\[0\] \(q1\): field 'question' is empty"),
    "id": (QA, "id", None, r"paragraphs\[1\].qas\[0\]: field 'id' is missing among question, answers"),
    "twice": (QA, "id", "q0", r"the question id 'q0' occurs twice"),
    "no answers": (QA, "answers", [], r"qas\[0\] \(q1\) has no answer.*SQuAD 2.0"),
    "answer": (QA, "answers", ["dark"], r"answers\[0\] is str, needed an object with 'text'"),
    "start": ((*QA, "answers", 0), "answer_start", "8", r"field 'answer_start' is str, needed int"),
    "true": ((*QA, "answers", 0), "answer_start", True, r"field 'answer_start' is bool, needed int"),
    "offset": (
        (*QA, "answers", 0),
        "answer_start",
        7,
        r"'answer_start' is 7, .*reads ' dar' and not 'dark'; it occurs at 8",
    ),
    "negative": ((*QA, "answers", 0), "answer_start", -4, r"'answer_start' is -4, .*it occurs at 8"),
    "half": (QA[:4], "context", "dark \ud83d", r"paragraphs\[1\]: field 'context' holds '.+', half of a surrogate"),
    "half id": (QA, "id", "q\udc00", r"qas\[0\]: field 'id' holds '.+', half of a surrogate pair; write whole"),
    "absent": ((*QA, "answers", 0), "text", "light", r"not 'light'; it occurs nowhere in the context"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_malformed_file_is_refused_by_file_record_and_field(case: str, tmp_path: Path) -> None:
    where, field, value, words = BAD[case]
    body = copy.deepcopy(squad_body(RECORDS))
    record = at(body, *where)
    if value is None:
        del record[field]
    else:
        record[field] = value
    with pytest.raises(ValueError, match=f"squad: .*bad.json.*{words}"):
        read_squad(write(tmp_path / "bad.json", body))


def test_what_is_no_squad_file_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file '.*nowhere.json'"):
        read_squad(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"cut.json is not JSON \(.*line 1"):
        read_squad(write(tmp_path / "cut.json", json.dumps(squad_body(RECORDS))[:-9]))
    with pytest.raises(ValueError, match=r"empty.json holds no question"):
        read_squad(write(tmp_path / "empty.json", {"data": []}))
    with pytest.raises(ValueError, match=r"list.json: the file is list, needed an object with 'data'"):
        read_squad(write(tmp_path / "list.json", []))


# --- windows ---------------------------------------------------------------------------------------------------------

SIZES = WindowSettings(length=31, overlap=9, max_question=8, max_answer=7)


def windows(question: Question, settings: WindowSettings = SIZES, training: bool = True) -> list[Window]:
    return make_windows([question], tokenizer(), settings, training=training, what="here")[0]


def asked(context: str, text: str, start: int, question: str = "who") -> Question:
    assert context[start : start + len(text)] == text
    return Question("q", question, context, (Answer(text, start),))


def made_up(draw: random.Random) -> Question:
    words = ["".join(draw.choice("abcdef") for _ in range(draw.randint(1, 5))) for _ in range(draw.randint(1, 40))]
    first = draw.randrange(len(words))
    last = min(len(words) - 1, first + draw.randint(0, 12))
    start = len(" ".join([*words[:first], ""]))
    context = " ".join(words)
    text = " ".join(words[first : last + 1])
    return asked(context, text, start, " ".join(draw.choice(["who", "cold", "xy"]) for _ in range(draw.randint(1, 6))))


def seen(window: Window) -> list[tuple[int, int]]:
    return window.offsets[window.first : window.last + 1]


@pytest.mark.parametrize("training", [True, False])
def test_windows_cover_the_paragraph_overlap_as_told_and_lose_no_answer(training: bool) -> None:
    draw = random.Random(11)
    several = own = lost = 0
    for _ in range(400):
        question = made_up(draw)
        found, notices = make_windows([question], tokenizer(), SIZES, training=training, what="here")
        every = tokenizer()(question.context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert all(len(window.input_ids) <= SIZES.length for window in found)
        places = [[every.index(offset) for offset in seen(window)] for window in found]
        begin = question.answers[0].start
        end = begin + len(question.answers[0].text)
        inside = [i for i, (a, b) in enumerate(every) if a < end and b > begin]
        if any("not trained on" in notice for notice in notices):
            assert training and len(inside) > 31 - 3 - min(8, len(tokenizer().tokenize(question.question)))
            assert not found
            lost += 1
            continue
        assert {i for some in places for i in some} == set(range(len(every))), "a token is in no window"
        if "got their own" not in " ".join(notices):
            for one, other in itertools.pairwise(places):
                assert len(set(one) & set(other)) == SIZES.overlap
        else:
            own += 1
        several += len(found) > 1
        for first in range(len(every)):
            piece = set(range(first, min(first + SIZES.max_answer, len(every))))
            assert any(piece <= set(some) for some in places), "an answer of max_answer tokens is whole in no window"
        if not training:
            assert all(window.start == window.end == OUTSIDE for window in found)
            continue
        holds = [set(inside) <= set(some) for some in places]
        assert any(holds)
        for window, whole in zip(found, holds, strict=True):
            if whole:
                text = question.context[window.offsets[window.start][0] : window.offsets[window.end][1]]
                assert text == question.answers[0].text
            else:
                assert window.start == window.end == OUTSIDE
    assert several > 100
    assert (own > 5 and lost > 5) if training else own == lost == 0


def test_a_window_is_what_the_tokenizer_makes_of_a_pair() -> None:
    words = tokenizer()
    question = asked("the sea was cold", "sea", 4, "who rowed home")
    (window,) = windows(question)
    pair = words(question.question, question.context, return_offsets_mapping=True)
    assert window.input_ids == pair["input_ids"] and window.token_type_ids == pair["token_type_ids"]
    assert words.convert_ids_to_tokens(window.input_ids)[window.start : window.end + 1] == ["sea"]
    assert seen(window) == pair["offset_mapping"][5:-1]


def test_a_long_question_is_cut_with_a_notice_and_the_paragraph_is_not() -> None:
    question = asked("the sea was cold", "sea", 4, "abcdefghijk")
    (window,), notices = make_windows([question], tokenizer(), SIZES, training=True, what="training")
    assert notices == ["training: 1 questions longer than max_question = 8 tokens were cut (q)"]
    assert window.first == 1 + 8 + 1 and len(seen(window)) == 4


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (
            (31, 20, 8, 7),
            r"overlap = 20 is not less than the 20 tokens that length = 31 leaves .*give overlap below 20",
        ),
        ((31, 6, 8, 7), r"overlap = 6 is less than max_answer = 7, .*at least 7"),
        ((31, 0, 8, 7), r"overlap = 0, needed at least 1"),
        ((10, 7, 8, 7), r"overlap = 7 is not less than the -1 tokens"),
    ],
)
def test_windows_that_would_not_get_on_or_lose_answers_are_refused(sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        windows(asked("the sea", "sea", 4), WindowSettings(*sizes))


def test_an_answer_without_a_token_is_told_apart_from_a_long_one() -> None:
    questions = [asked("the \u200b sea", "\u200b", 4), asked("sea boat " * 20, ("sea boat " * 20).strip(), 0)]
    found, notices = make_windows(questions, tokenizer(), SIZES, training=True, what="here")
    assert not found and notices == [
        "here: 1 answers are longer than a window of length = 31 and were not trained on (q)",
        "here: 1 answers have no token for this tokenizer and were not trained on (q)",
    ]


def test_a_paragraph_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"here: the paragraph of question 'q' has no token"):
        windows(Question("q", "who", "\u200b", (Answer("\u200b", 0),)))


# --- spans -----------------------------------------------------------------------------------------------------------


def test_the_best_span_is_the_best_of_all_spans() -> None:
    generator = torch.Generator().manual_seed(3)
    draw = random.Random(3)
    for _ in range(60):
        count, most = draw.randint(2, 23), draw.randint(1, 9)
        start, end = torch.randn(2, 5, count, generator=generator).round(decimals=draw.choice([0, 3]))
        bounds = torch.tensor([sorted(draw.choices(range(count), k=2)) for _ in range(5)])
        for row, found in enumerate(best_spans(start, end, bounds, most)):
            first, last = bounds[row].tolist()
            spans = [
                (float(start[row, i] + end[row, j]), -i, -j)
                for i in range(first, last + 1)
                for j in range(i, min(i + most, last + 1))
            ]
            score, i, j = max(spans)
            assert (found.start, found.end) == (-i, -j) and found.score == pytest.approx(score)


def test_the_answer_is_the_text_of_the_best_window() -> None:
    question = asked("the sea was cold and the boat was dark in fish home", "boat", 25)
    found = windows(question, WindowSettings(14, 3, 4, 3))
    assert len(found) > 1 and {window.question for window in found} == {0}
    spans = {n: Span(float(n == 1), window.first, window.first + 1) for n, window in enumerate(found)}
    begin, end = found[1].offsets[found[1].first][0], found[1].offsets[found[1].first + 1][1]
    assert answers_of([question], found, spans) == {"q": question.context[begin:end]}
