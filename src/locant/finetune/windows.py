"""Questions on long paragraphs: the paragraph is cut into windows that overlap, each read together with the question.

A window holds at most ``length`` tokens, the question and special tokens among them; neighbors share ``overlap`` tokens
of the paragraph. An answer of up to ``max_answer`` tokens is whole in at least one window, because ``overlap`` must be
that long; a longer one in the training data that no window would hold gets a window of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from locant.finetune.squad import Answer, Question

OUTSIDE = 0  # what start and end point at where the answer is not in the window: the first token


@dataclass(frozen=True)
class WindowSettings:
    """Sizes in tokens; ``overlap`` is what two neighboring windows share, not the distance between them."""

    length: int
    overlap: int
    max_question: int
    max_answer: int

    def check(self, special: int) -> None:
        """Raises: ValueError where windows would not get on, or lose answers; ``special``: tokens around a pair."""
        for name in ("length", "overlap", "max_question", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"squad: {name} = {getattr(self, name)}, needed at least 1 token")
        room = self.length - self.max_question - special
        if self.overlap >= room:
            raise ValueError(
                f"squad: overlap = {self.overlap} is not less than the {room} tokens that length = {self.length} "
                f"leaves the paragraph beside max_question = {self.max_question} and {special} special tokens, so the "
                f"next window would never get on; give overlap below {room}, or a larger length"
            )
        if self.overlap < self.max_answer:
            raise ValueError(
                f"squad: overlap = {self.overlap} is less than max_answer = {self.max_answer}, so an answer at the "
                f"edge of a window would be whole in none; give overlap of at least {self.max_answer}"
            )


@dataclass(frozen=True)
class Window:
    """One window of one question, ready for the model."""

    question: int  # its number
    input_ids: list[int]
    token_type_ids: list[int]
    offsets: list[tuple[int, int]]  # of each token in the context, in characters; (0, 0) outside it
    first: int  # the tokens of the context are those from `first` to `last`, both included
    last: int
    start: int = OUTSIDE  # tokens of the answer, where it is whole in here
    end: int = OUTSIDE


@dataclass
class Cuts:
    """What was cut or could not be used, counted for the user."""

    questions: list[str] = field(default_factory=list)  # ids of those longer than max_question
    own_window: list[str] = field(default_factory=list)  # answers longer than the overlap that got one
    long: list[str] = field(default_factory=list)  # answers that no window can hold: not trained on
    blank: list[str] = field(default_factory=list)  # answers that no token shows: not trained on

    def notices(self, settings: WindowSettings, what: str) -> list[str]:
        """A sentence for each kind that occurred."""
        told = (
            (self.questions, f"questions longer than max_question = {settings.max_question} tokens were cut"),
            (
                self.own_window,
                f"answers lay across the edges of windows (overlap = {settings.overlap}) and got their own",
            ),
            (self.long, f"answers are longer than a window of length = {settings.length} and were not trained on"),
            (self.blank, "answers have no token for this tokenizer and were not trained on"),
        )
        return [
            f"{what}: {len(ids)} {words} ({', '.join(ids[:3])}{', ...' * (len(ids) > 3)})" for ids, words in told if ids
        ]


def make_windows(
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerFast,
    settings: WindowSettings,
    *,
    training: bool,
    what: str,
) -> tuple[list[Window], list[str]]:
    """The windows of all questions in order, and notices. With ``training`` they know where the first answer is.

    Raises: ValueError for an overlap that is too large or too small; for a paragraph without a token.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    frame = Frame.of(tokenizer)
    settings.check(frame.special)
    contexts = list(dict.fromkeys(question.context for question in questions))
    encoded = dict(zip(contexts, backend.encode_batch(contexts, add_special_tokens=False), strict=True))
    asked = backend.encode_batch([question.question.strip() for question in questions], add_special_tokens=False)
    windows: list[Window] = []
    cuts = Cuts()
    for number, (question, words) in enumerate(zip(questions, asked, strict=True)):
        context = encoded[question.context]
        if not len(context):
            raise ValueError(f"{what}: the paragraph of question {question.id!r} has no token for this tokenizer")
        if len(words) > settings.max_question:
            cuts.questions.append(question.id)
        ids = words.ids[: settings.max_question]
        room = settings.length - len(ids) - frame.special
        spans = _spans(len(context), room, settings.overlap)
        answer = _tokens_of(question.answers[0], context.offsets) if training else None
        if training:
            spans = _with_answer(spans, answer, room, question.id, cuts)
        windows += [frame.window(number, ids, context, span, answer) for span in spans]
    return windows, cuts.notices(settings, what)


def _spans(count: int, room: int, overlap: int) -> list[tuple[int, int]]:
    """Half-open spans of tokens that cover ``count`` tokens, each ``room`` long (the last may be shorter)."""
    spans = [(0, min(room, count))]
    while spans[-1][1] < count:
        begin = spans[-1][1] - overlap
        spans.append((begin, min(begin + room, count)))
    return spans


def _tokens_of(answer: Answer, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """First and last token that share a character with an answer."""
    end = answer.start + len(answer.text)
    touched = [i for i, (a, b) in enumerate(offsets) if a < end and b > answer.start and b > a]
    return (touched[0], touched[-1]) if touched else None


def _with_answer(
    spans: list[tuple[int, int]], answer: tuple[int, int] | None, room: int, id_: str, cuts: Cuts
) -> list[tuple[int, int]]:
    if answer is None:
        cuts.blank.append(id_)
        return []
    if answer[1] - answer[0] >= room:
        cuts.long.append(id_)
        return []
    if any(begin <= answer[0] and answer[1] < end for begin, end in spans):
        return spans
    cuts.own_window.append(id_)
    return sorted([*spans, (answer[0], min(answer[0] + room, spans[-1][1]))])


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts before, between and behind two texts, and the type of every part."""

    before: list[int]
    between: list[int]
    behind: list[int]
    types: tuple[int, int, int, int, int]  # of before, the first text, between, the second text, behind

    @property
    def special(self) -> int:
        """Tokens around a pair."""
        return len(self.before) + len(self.between) + len(self.behind)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Frame:
        """Read off a pair of short texts."""
        pair = tokenizer.backend_tokenizer.encode("a", "a")
        texts = [i for i, sequence in enumerate(pair.sequence_ids) if sequence is not None]
        first = [i for i in texts if pair.sequence_ids[i] == 0]
        second = [i for i in texts if pair.sequence_ids[i] == 1]
        parts = (0, first[0]), (first[0], first[-1] + 1), (first[-1] + 1, second[0]), (second[0], second[-1] + 1)
        spans = (*parts, (second[-1] + 1, len(pair)))
        types = [pair.type_ids[a] if a < b else 0 for a, b in spans]
        before, _, between, _, behind = (pair.ids[a:b] for a, b in spans)
        return cls(before, between, behind, (types[0], types[1], types[2], types[3], types[4]))

    def window(
        self,
        number: int,
        words: Sequence[int],
        context: Encoding,
        span: tuple[int, int],
        answer: tuple[int, int] | None,
    ) -> Window:
        """The window of a question that shows the tokens of the context in a half-open span."""
        part = context.ids[span[0] : span[1]]
        pieces = self.before, list(words), self.between, part, self.behind
        first = sum(len(piece) for piece in pieces[:3])
        ids = [token for piece in pieces for token in piece]
        types = [kind for piece, kind in zip(pieces, self.types, strict=True) for _ in piece]
        offsets = [(0, 0)] * first + context.offsets[span[0] : span[1]] + [(0, 0)] * len(self.behind)
        start = end = OUTSIDE
        if answer is not None and span[0] <= answer[0] and answer[1] < span[1]:
            start, end = (first + place - span[0] for place in answer)
        return Window(number, ids, types, offsets, first, first + len(part) - 1, start, end)
