"""The tokenizer: the same in every process, of the size asked for, cached, or read from a file."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from locant.data import Document, TokenizerConfig, build_tokenizer
from locant.data.cache import cache_dir
from locant.data.tokenizer import SPECIAL_TOKENS, load_tokenizer, parallel_tokenizers, special_id


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))


def some_text(seed: int = 0, words: int = 400) -> list[Document]:
    """Return documents of made-up words with many ties in their counts."""
    draw = np.random.default_rng(seed)
    vocabulary = ["".join(draw.choice(list("abcdefghij"), draw.integers(2, 8))) for _ in range(words)]
    return [Document(f"{n}", "\n".join(" ".join(draw.choice(vocabulary, 11)) for _ in range(13))) for n in range(5)]


SCRIPT = """
import hashlib
from tests.test_data_tokenizer import some_text
from locant.data import TokenizerConfig, build_tokenizer
tokenizer = build_tokenizer(TokenizerConfig(vocab_size=301), some_text())
print(hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


def test_training_gives_the_same_ids_in_another_process(tmp_path):
    """The trainer's hash order changes with each process: with it, this fails at once."""
    here = build_tokenizer(TokenizerConfig(vocab_size=301), some_text()).backend_tokenizer.to_str()
    environment = {**os.environ, "LOCANT_CACHE": str(tmp_path / "other")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-1] == hashlib.sha256(here.encode()).hexdigest()


def test_the_vocabulary_has_the_size_asked_for_with_special_tokens_first():
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=301), some_text())
    assert len(tokenizer) == 301
    assert tokenizer.convert_ids_to_tokens(list(range(5))) == list(SPECIAL_TOKENS.values())
    assert [special_id(tokenizer, role) for role in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert tokenizer("abba cab")["input_ids"] == tokenizer.convert_tokens_to_ids(tokenizer.tokenize("abba cab"))


def test_words_survive_a_round_trip_and_unknown_characters_are_unk():
    documents = some_text()
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=301), documents)
    line = documents[0].paragraphs[0]
    assert tokenizer.decode(tokenizer.encode(line)) == line
    assert tokenizer.tokenize("abc xyz") == [*tokenizer.tokenize("abc"), "[UNK]"]


def test_lowercase_is_an_option():
    documents = [Document("a", "Éa EA ea aE " * 9)]
    low = build_tokenizer(TokenizerConfig(vocab_size=40), documents)
    cased = build_tokenizer(TokenizerConfig(vocab_size=40, lowercase=False), documents)
    assert low.tokenize("Éa EA") == ["ea", "ea"]
    assert cased.tokenize("EA ea") == ["EA", "ea"]


def test_min_frequency_leaves_rare_pairs_apart():
    documents = [Document("a", "ab ab cd " * 2)]
    assert "cd" in build_tokenizer(TokenizerConfig(vocab_size=40, min_frequency=2), documents).get_vocab()
    assert "cd" not in build_tokenizer(TokenizerConfig(vocab_size=40, min_frequency=3), documents).get_vocab()


def test_the_cache_is_used_and_knows_text_and_settings(monkeypatch):
    config, documents = TokenizerConfig(vocab_size=301), some_text()
    first = build_tokenizer(config, documents)
    for other, text in [
        (TokenizerConfig(vocab_size=302), documents),
        (TokenizerConfig(vocab_size=301, lowercase=False), documents),
        (TokenizerConfig(vocab_size=301, min_frequency=3), documents),
        (config, some_text(1)),
        (config, documents[1:]),
    ]:
        build_tokenizer(other, text)
    assert len(list(cache_dir().iterdir())) == 6
    monkeypatch.setattr("locant.data.tokenizer._trained", None)  # calling it would fail
    assert build_tokenizer(config, documents).get_vocab() == first.get_vocab()


def test_a_damaged_cache_is_trained_again():
    config, documents = TokenizerConfig(vocab_size=301), some_text()
    first = build_tokenizer(config, documents).get_vocab()
    (path,) = cache_dir().iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    assert build_tokenizer(config, documents).get_vocab() == first


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"vocab_size": 5}, "vocab_size=5 must be above 5"),
        ({"min_frequency": 0}, "min_frequency=0 must be at least 1"),
        ({"vocab_size": 900, "path": "x"}, "vocab_size=900 and min_frequency=2 are for training, but path='x'"),
        ({"min_frequency": 7, "path": "x"}, "vocab_size=8192 and min_frequency=7 are for training, but path='x'"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"tokenizer: {message}"):
        TokenizerConfig(**settings)


def test_a_vocabulary_too_small_for_the_characters_is_refused():
    with pytest.raises(ValueError, match="vocab_size=9 cannot hold the 20 characters of the text and 5 special tokens"):
        build_tokenizer(TokenizerConfig(vocab_size=9), some_text())
    with pytest.raises(ValueError, match="tokenizer: 1 documents hold no word"):
        build_tokenizer(TokenizerConfig(), [Document("a", " \n ")])


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "Cat", "the"]


@pytest.mark.parametrize("name", ["vocab.txt", "vocab.txt.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_vocabulary_file_is_read(tmp_path, name, end):
    data = (end.join(VOCABULARY) + end).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    tokenizer = build_tokenizer(TokenizerConfig(path=str(path)), [])
    assert tokenizer("The Cats")["input_ids"] == [8, 5, 6]
    cased = build_tokenizer(TokenizerConfig(path=str(path), lowercase=False), [])
    assert cased("the Cats")["input_ids"] == [8, 7, 6]
    assert len(tokenizer) == 9


def test_a_saved_tokenizer_is_read_from_its_folder_and_from_its_file(tmp_path):
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=301), some_text())
    tokenizer.save_pretrained(tmp_path / "saved")
    for path in ("saved", "saved/tokenizer.json"):
        assert load_tokenizer(str(tmp_path / path)).get_vocab() == tokenizer.get_vocab()


def test_files_that_are_no_tokenizer_are_told(tmp_path):
    cases = {
        "a.bin": (b"x", r"a\.bin': unknown extension '\.bin'"),
        "a.json": (b"{", r"a\.json': .* cannot be read"),
        "a.txt.gz": (b"x", r"a\.txt\.gz': .* cannot be read \(Not a gzipped file"),
        "a.txt": (b"the\ncat\n[PAD]\n[UNK]\n", r"a\.txt': it has no cls_token, sep_token, mask_token"),
    }
    for name, (data, message) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt': nothing at .*nowhere\.txt"):
        load_tokenizer(str(tmp_path / "nowhere.txt"))
    with pytest.raises(ValueError, match=r"a\.json': lowercase=False is for a vocab\.txt"):
        load_tokenizer(str(tmp_path / "a.json"), lowercase=False)


def test_a_missing_special_token_is_named():
    tokenizer = build_tokenizer(TokenizerConfig(vocab_size=301), some_text())
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="tokenizer: it has no mask_token"):
        special_id(tokenizer, "mask_token")


def test_parallelism_is_on_inside_and_off_after_unless_the_user_says(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    with parallel_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "0")
    with parallel_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "0"
