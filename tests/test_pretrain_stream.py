"""Streamed text gives the windows that the text holds, and goes on from its place to the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locant.data import TextSource, TokenizerConfig, build_tokenizer, read_text
from locant.data.tokenizer import special_id
from locant.pretrain.recipe import PretrainText, read_recipe
from locant.pretrain.run import pretrain
from locant.pretrain.stream import Source, WindowStream
from tests.pretrain_runs import assert_same_run, lines, table, write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "words.jsonl", documents=23)


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> Any:
    return build_tokenizer(TokenizerConfig(vocab_size=60), read_text(TextSource(str(text))))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any, text: Path) -> Path:
    tokenizer.save_pretrained(text.parent / "tokenizer")
    return text.parent / "tokenizer"


def streamed(text: Path, tokenizer: Any, first: int = 2, **more: Any) -> WindowStream:
    return WindowStream(Source(PretrainText(str(text), streaming=True, **more)), first, tokenizer, 11, seed=5)


@pytest.mark.parametrize("shuffle", [1, 7])
def test_packed_windows_hold_the_text_in_turn_and_begin_again(shuffle: int, text: Path, tokenizer: Any) -> None:
    documents = [document.text for document in read_text(TextSource(str(text)))][2:]
    sep = special_id(tokenizer, "sep_token")
    flow = np.concatenate([[*tokenizer(one, add_special_tokens=False)["input_ids"], sep] for one in documents])
    count = 2 * len(flow) // 9
    stream = streamed(text, tokenizer, shuffle=shuffle)
    found = {example["example_id"]: example["input_ids"] for example in (stream[k] for k in range(count // 7 * 7))}
    assert sorted(found) == list(range(count // 7 * 7))
    joined = np.concatenate([found[k][1:-1] for k in sorted(found)])
    assert (joined == np.tile(flow, 3)[: len(joined)]).all() and len(joined) > 1.5 * len(flow)
    assert all(ids[0] == special_id(tokenizer, "cls_token") and ids[-1] == sep for ids in found.values())
    plain = [streamed(text, tokenizer, shuffle=1)[k]["example_id"] for k in range(7)]
    assert plain == list(range(7))
    assert (list(found) != sorted(found)) == (shuffle == 7)


def test_documents_kept_apart_are_told_apart(text: Path, tokenizer: Any) -> None:
    stream, sep = streamed(text, tokenizer, isolate_documents=True), special_id(tokenizer, "sep_token")
    changes = 0
    for example in (stream[k] for k in range(20)):
        ids, owner = example["input_ids"], example["document_ids"]
        inside = np.flatnonzero(np.diff(owner[1:-1])) + 1
        assert (ids[inside] == sep).all() and owner[0] == owner[1] and owner[-1] == owner[-2]
        changes += len(inside)
    assert changes > 3


def test_pieces_are_of_one_document_each(text: Path, tokenizer: Any) -> None:
    stream, sep = streamed(text, tokenizer, pack=False, shuffle=1), special_id(tokenizer, "sep_token")
    documents = [document.text for document in read_text(TextSource(str(text)))][2:]
    first = tokenizer(documents[0], add_special_tokens=False)["input_ids"]
    pieces = -(-len(first) // 9)
    assert [list(stream[k]["input_ids"][1:-1]) for k in range(pieces)] == [
        first[9 * k : 9 * k + 9] for k in range(pieces)
    ]
    assert all(stream[k]["input_ids"][-1] == sep for k in range(pieces, 60))


@pytest.mark.parametrize("pack", [True, False])
def test_a_restored_stream_goes_on_with_the_same_windows(
    pack: bool, text: Path, tokenizer: Any, tmp_path: Path
) -> None:
    whole = streamed(text, tokenizer, pack=pack, shuffle=5)
    expected = [whole[k] for k in range(90)]
    for at in (0, 4, 37, 83):  # the last ones on a second pass
        whole.save(tmp_path / "stream.json", at)
        again = streamed(text, tokenizer, pack=pack, shuffle=5)
        again.restore(tmp_path / "stream.json")
        for k in range(at, 90):
            found = again[k]
            assert found["example_id"] == expected[k]["example_id"]
            assert (found["input_ids"] == expected[k]["input_ids"]).all()


def test_a_killed_run_on_a_stream_goes_on_to_the_same_numbers(
    text: Path, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locant.training.resumable.SHOWN", 0.0)
    source = {"text": str(text), "streaming": True, "shuffle": 6}
    chosen = read_recipe({**table(text), "text": source, "tokenizer": {"path": str(vocabulary)}})
    pretrain(chosen, tmp_path / "whole")

    class Killed(BaseException):
        pass

    for step in (4, 8):

        def watch(event: dict[str, Any], step: int = step) -> None:
            if event["event"] == "step" and event["step"] == step:
                raise Killed

        with pytest.raises(Killed):
            pretrain(chosen, tmp_path / f"out{step}", watch=watch)
        torch.manual_seed(step)
        pretrain(chosen, tmp_path / f"out{step}")
        assert_same_run(tmp_path / "whole", tmp_path / f"out{step}")
    assert len(lines(tmp_path / "whole", "step")) == 9


def test_text_that_cannot_be_streamed_is_named(text: Path, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("sea")
    with pytest.raises(ValueError, match=r"streaming reads files of one format, but .jsonl, .txt came"):
        Source(PretrainText((str(text), str(tmp_path / "a.txt")), streaming=True))
    with pytest.raises(ValueError, match=r"it cannot be streamed \(no column 'body' in \['text'\]\)"):
        next(Source(PretrainText(str(text), streaming=True, field="body")).documents(0))
    source = Source(PretrainText(str(tmp_path / "a.txt"), streaming=True))
    with pytest.raises(ValueError, match=r"it has \d+ tokens, fewer than the 99 that are held out of it"):
        source.head(tokenizer, 99)
    with pytest.raises(ValueError, match=r"a.txt.*all 1 documents are held out"):
        WindowStream(source, 1, tokenizer, 11, seed=1)[0]


@pytest.mark.parametrize("pack", [True, False])
def test_blank_rows_are_no_documents(pack: bool, text: Path, tokenizer: Any, tmp_path: Path) -> None:
    lines = text.read_text().splitlines()
    blank = tmp_path / "blank.jsonl"
    blank.write_text("\n".join(f'{line}\n{{"text": "  "}}\n{{"text": null}}' for line in lines))
    plain, thinned = streamed(text, tokenizer, pack=pack), streamed(blank, tokenizer, first=6, pack=pack)
    for k in range(50):
        assert (plain[k]["input_ids"] == thinned[k]["input_ids"]).all()
    one, other = (Source(PretrainText(str(path), streaming=True)).head(tokenizer, 30) for path in (text, blank))
    assert (one[0].tokens == other[0].tokens).all() and (one[0].starts == other[0].starts).all()
    assert other[1] in range(3 * one[1] - 2, 3 * one[1] + 1)


@pytest.mark.parametrize("pack", [True, False])
def test_windows_without_a_known_word_are_passed_over_and_text_of_nothing_else_is_named(
    pack: bool, text: Path, tokenizer: Any, tmp_path: Path
) -> None:
    strange = '{"text": "' + "海 舟 冷 船 " * 11 + '"}\n'
    mixed, foreign = tmp_path / "mixed.jsonl", tmp_path / "foreign.jsonl"
    mixed.write_text("".join(line + "\n" + strange for line in text.read_text().splitlines()), encoding="utf-8")
    foreign.write_text(text.read_text().splitlines()[0] + "\n" + 3 * strange, encoding="utf-8")
    stream = streamed(mixed, tokenizer, pack=pack)
    assert not any(stream.special[stream[k]["input_ids"]].all() for k in range(60))
    with pytest.raises(ValueError, match=r"foreign.jsonl.*behind the 1 documents that are held out .* no token to"):
        streamed(foreign, tokenizer, first=1, pack=pack)[0]


@pytest.mark.parametrize("value", ["5", '["sea", "boat"]'])
def test_a_column_that_holds_no_text_is_named(value: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text(f'{{"text": {value}}}\n' * 3)
    with pytest.raises(ValueError, match=r"column 'text' of row 0 holds (int|list), a text was needed"):
        Source(PretrainText(str(path), streaming=True)).head(tokenizer, 9)
