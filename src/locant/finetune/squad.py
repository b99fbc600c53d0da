"""SQuAD 1.1 files, and any JSON of that form: questions on paragraphs, with answers that are spans of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locant.data.files import check_characters, read_text_file


@dataclass(frozen=True)
class Answer:
    """A reference answer: ``context[start:start + len(text)]``."""

    text: str
    start: int  # in characters


@dataclass(frozen=True)
class Question:
    """One question on one paragraph."""

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]


def read_squad(path: Path) -> tuple[Question, ...]:
    """All questions of a file (.json, plain or with .gz or .xz).

    Raises: FileNotFoundError; ValueError that names the file, the record and the field; for answers that are not at
    their offset; for questions without an answer, as SQuAD 2.0 has them; for a question id that occurs twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"squad: no file {str(path)!r}; give a JSON file in the layout of SQuAD 1.1")
    try:
        body = json.loads(read_text_file(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"squad: {path} is not JSON ({error}); fetch it again") from error
    questions = tuple(_questions(path, body))
    if not questions:
        raise ValueError(f"squad: {path} holds no question, at least one was needed; give another file")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise ValueError(
                f"squad: {path}: the question id {question.id!r} occurs twice; give every question its own"
            )
        seen.add(question.id)
    return questions


def _questions(path: Path, body: Any) -> Iterator[Question]:
    for a, article in enumerate(_field(path, "the file", body, "data", list)):
        at = f"data[{a}]"
        for p, paragraph in enumerate(_field(path, at, article, "paragraphs", list)):
            here = f"{at}.paragraphs[{p}]"
            context = _text(path, here, paragraph, "context")
            for q, asked in enumerate(_field(path, here, paragraph, "qas", list)):
                yield _question(path, f"{here}.qas[{q}]", asked, context)


def _question(path: Path, where: str, asked: Any, context: str) -> Question:
    id_ = _text(path, where, asked, "id")
    question = _text(path, f"{where} ({id_})", asked, "question")
    answers = _field(path, f"{where} ({id_})", asked, "answers", list)
    if not answers:
        raise ValueError(
            f"squad: {path}: {where} ({id_}) has no answer, needed at least one as in SQuAD 1.1; leave out questions "
            "that cannot be answered (SQuAD 2.0: is_impossible)"
        )
    return Question(
        id_, question, context, tuple(_answer(path, f"{where}.answers[{n}]", a, context) for n, a in enumerate(answers))
    )


def _answer(path: Path, where: str, answer: Any, context: str) -> Answer:
    text = _text(path, where, answer, "text")
    start = _field(path, where, answer, "answer_start", int)
    there = context[start : start + len(text)] if start >= 0 else ""
    if there != text:
        found = context.find(text)
        hint = f"it occurs at {found}" if found >= 0 else "it occurs nowhere in the context"
        raise ValueError(
            f"squad: {path}: {where}: field 'answer_start' is {start}, where the context reads {there[:60]!r} and not "
            f"{text[:60]!r}; {hint}; mend the offset (in characters)"
        )
    return Answer(text, start)


def _text(path: Path, where: str, record: Any, field: str) -> str:
    text = _field(path, where, record, field, str)
    if not text.strip():
        raise ValueError(f"squad: {path}: {where}: field {field!r} is empty, needed a text; mend it or leave it out")
    check_characters(f"squad: {path}: {where}", field, text)
    return text


def _field(path: Path, where: str, record: Any, field: str, kind: type) -> Any:
    if not isinstance(record, dict):
        raise ValueError(f"squad: {path}: {where} is {type(record).__name__}, needed an object with {field!r}")
    if field not in record:
        raise ValueError(f"squad: {path}: {where}: field {field!r} is missing among {', '.join(record) or 'none'}")
    value = record[field]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"squad: {path}: {where}: field {field!r} is {type(value).__name__}, needed {kind.__name__}; mend it"
        )
    return value
