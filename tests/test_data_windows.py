"""Splits share nothing, streams hold the text, windows of every length read the same stream."""

from __future__ import annotations

import numpy as np
import pytest

from locant.data import Document, TokenizerConfig, TokenStream, build_tokenizer, encode, make_windows, split_documents
from locant.data.cache import cache_dir
from tests.test_data_tokenizer import some_text

CLS, SEP = 2, 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer():
    return build_tokenizer(TokenizerConfig(vocab_size=301), some_text())


def stream_of(*lengths: int) -> TokenStream:
    """Return a stream of the ids 10, 11, 12, ... in documents of these lengths."""
    return TokenStream(np.arange(10, 10 + sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths]))


# Splits


def many(sizes: list[int]) -> list[Document]:
    return [Document(f"d{n}", "x" * size) for n, size in enumerate(sizes)]


@pytest.mark.parametrize("fraction", [0.05, 0.3])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_split_is_by_document_disjoint_complete_and_near_the_fraction(fraction, seed):
    documents = many(np.random.default_rng(5).integers(50, 5000, 97).tolist())
    train, validation = split_documents(documents, fraction, seed)
    assert not {d.name for d in train} & {d.name for d in validation}
    assert sorted([*train, *validation], key=documents.index) == documents
    share = sum(len(d.text) for d in validation) / sum(len(d.text) for d in documents)
    assert fraction / 2 <= share <= fraction * 1.5
    assert (train, validation) == split_documents(documents, fraction, seed)
    assert validation != split_documents(documents, fraction, seed + 10)[1]


def test_one_huge_document_never_validates_whole():
    documents = many([100] * 40 + [100_000])
    _, validation = split_documents(documents, 0.03, 0)
    assert "d40" not in {d.name for d in validation}


@pytest.mark.parametrize("fraction", [0.1, 0.45])
def test_a_single_document_is_cut_into_two_blocks_of_paragraphs(fraction):
    lines = [f"paragraph {n} " + "x" * (n % 7) for n in range(200)]
    ((train,), (validation,)) = split_documents([Document("a", "\n\n".join(lines))], fraction)
    assert [*train.paragraphs, *validation.paragraphs] == [line.strip() for line in lines]
    assert abs(len(validation.text) / len("\n".join(lines)) - fraction) < 0.02
    assert (train.name, validation.name) == ("a (training part)", "a (validation part)")


def test_a_single_paragraph_is_cut_between_words():
    words = [f"w{n}" for n in range(100)]
    ((train,), (validation,)) = split_documents([Document("a", " ".join(words))], 0.1)
    assert train.text.split() + validation.text.split() == words
    assert len(validation.text.split()) in (10, 11)


def test_what_cannot_be_split_is_refused():
    for fraction in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match=f"fraction={fraction} must lie between 0 and 1"):
            split_documents(many([5, 5]), fraction)
    with pytest.raises(ValueError, match=r"1 documents of 4 characters cannot be cut at 0\.05"):
        split_documents([Document("a", "word")])
    with pytest.raises(ValueError, match=r"0 documents of 0 characters cannot be cut"):
        split_documents([])


# Streams


def test_a_stream_holds_the_tokens_of_each_document(tokenizer):
    documents = [*some_text(), Document("empty", "\n"), *some_text(1)]
    stream = encode(documents, tokenizer)
    assert stream.tokens.dtype == np.uint16
    assert len(stream.starts) == len(documents) + 1
    for index, document in enumerate(documents):
        expected = [i for p in document.paragraphs for i in tokenizer.encode(p, add_special_tokens=False)]
        assert stream.tokens[stream.starts[index] : stream.starts[index + 1]].tolist() == expected
    assert len(stream) == stream.starts[-1]


def test_batches_of_any_size_give_the_same_stream(tokenizer, monkeypatch):
    from locant.data import windows

    expected = encode(some_text(), tokenizer)
    monkeypatch.setattr(windows, "_BATCH_CHARACTERS", 100)
    stream = windows.tokenize(some_text(), tokenizer, progress=False)
    assert np.array_equal(stream.tokens, expected.tokens)
    assert np.array_equal(stream.starts, expected.starts)


def test_special_tokens_written_in_the_text_stay_text():
    documents = [Document("a", "the [MASK] token, the [PAD] token " * 9)]
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=60), documents)
    stream = encode(documents, tokenizer)
    assert stream.tokens.min() > 4
    assert str(tokenizer.decode(stream.tokens.tolist())).startswith("the [ mask ] token, the [ pad ] token")
    assert tokenizer("[MASK]")["input_ids"] == [4]  # the tokenizer itself is as it was


def test_the_cache_is_used_and_knows_text_and_tokenizer(tokenizer, monkeypatch):
    from locant.data import windows

    first = encode(some_text(), tokenizer)
    count = len(list(cache_dir().glob("tokens-*")))
    other = build_tokenizer(TokenizerConfig(vocab_size=150), some_text())
    assert len(encode(some_text(), other)) > len(first)
    encode(some_text(1), tokenizer)
    assert (count, len(list(cache_dir().glob("tokens-*")))) == (1, 3)
    monkeypatch.setattr(windows, "tokenize", None)  # calling it would fail
    again = encode(some_text(), tokenizer)
    assert np.array_equal(again.tokens, first.tokens)
    assert np.array_equal(again.starts, first.starts)
    assert again.tokens.dtype == np.uint16


def test_a_damaged_stream_istokenize_again(tokenizer):
    first = encode(some_text(), tokenizer)
    (path,) = cache_dir().glob("tokens-*")
    path.write_bytes(path.read_bytes()[:-100])
    assert np.array_equal(encode(some_text(), tokenizer).tokens, first.tokens)


# Windows


@pytest.mark.parametrize("length", [4, 7, 32, 61])
def test_windows_hold_the_stream_between_cls_and_sep(tokenizer, length):
    stream = stream_of(60, 1, 72)
    windows = make_windows(stream, length, tokenizer)
    flow = [*range(10, 70), SEP, 70, SEP, *range(71, 143)]
    assert windows.ids.shape == (len(flow) // (length - 2), length)
    assert (windows.ids[:, 0] == CLS).all() and (windows.ids[:, -1] == SEP).all()
    inner = windows.ids[:, 1:-1].ravel().tolist()
    assert inner == flow[: len(inner)] and len(flow) - len(inner) < length - 2
    assert windows.documents is None
    assert (windows.length, len(windows)) == windows.ids.shape[::-1]
    assert windows.ids.dtype == np.uint16


def test_isolated_windows_say_whose_each_token_is(tokenizer):
    windows = make_windows(stream_of(4, 1, 6), 7, tokenizer, isolate=True)
    assert windows.ids.tolist() == [[CLS, 10, 11, 12, 13, SEP, SEP], [CLS, 14, SEP, 15, 16, 17, SEP]]
    assert windows.documents is not None
    assert windows.documents.tolist() == [[0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 2, 2, 2, 2]]


def test_real_text_comes_back_out_of_windows(tokenizer):
    documents = some_text()[:1]
    windows = make_windows(encode(documents, tokenizer), 32, tokenizer)
    text = tokenizer.decode(windows.ids[:, 1:-1].ravel().tolist())
    assert " ".join(documents[0].paragraphs).startswith(text) and len(text) > 500


def test_text_shorter_than_one_window_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the validation text has 31 tokens, but one window of length=34 needs 32"):
        make_windows(stream_of(12, 18), 34, tokenizer, what="validation text")
    assert len(make_windows(stream_of(12, 18), 33, tokenizer)) == 1
    with pytest.raises(ValueError, match="length=2 leaves no room"):
        make_windows(stream_of(9), 2, tokenizer)


@pytest.mark.parametrize("isolate", [False, True])
def test_windows_of_words_that_the_tokenizer_does_not_know_are_left_out(tokenizer, isolate):
    unknown = tokenizer.unk_token_id
    tokens = np.array([10, 11, 12, *[unknown] * 5, 13, unknown, 14], dtype=np.uint16)
    windows = make_windows(TokenStream(tokens, np.array([0, 7, 11])), 5, tokenizer, isolate=isolate)
    assert windows.ids[:, 1:-1].tolist() == [[10, 11, 12], [13, unknown, 14]]
    if isolate:
        assert windows.documents is not None
        assert windows.documents.tolist() == [[0] * 5, [1] * 5]
    with pytest.raises(ValueError, match="the held text has 7 tokens and none to predict"):
        make_windows(TokenStream(np.full(7, unknown, np.uint16), np.array([0, 7])), 5, tokenizer, what="held text")
