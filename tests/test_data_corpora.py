"""Text sources: settings, limits, Hugging Face datasets, and the way from text to tokens in one call."""

from __future__ import annotations

import datasets
import numpy as np
import pytest

from locant.data import Document, TextSource, TokenizerConfig, corpora, load_corpus, read_text


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"text": ""}, "text is ''"),
        ({"text": []}, r"text is \(\)"),
        ({"text": ["a.txt", ""]}, r"text is \('a.txt', ''\)"),
        ({"limit_mb": 0.0}, "limit_mb=0.0 must be above 0"),
        ({"limit_mb": float("nan")}, "limit_mb=nan must be above 0"),
        ({"text": "a.txt", "split": "test"}, "split='test' has no meaning for 'a.txt'"),
        ({"field": "body"}, "field='body' has no meaning for 'docs'"),
        ({"text": ["docs", "a.txt"]}, r"\('docs', 'a.txt'\) mixes files"),
        ({"text": ["a.txt", "hf:x"]}, r"\('a.txt', 'hf:x'\) mixes files"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"text source: .*{message}"):
        TextSource(**settings)


def test_a_list_from_a_recipe_is_hashable():
    assert hash(TextSource(["a.txt", "b.txt"])) == hash(TextSource(("a.txt", "b.txt")))


def test_a_field_for_txt_files_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"field='body' has no meaning for txt files such as .*a\.txt"):
        read_text(TextSource(str(tmp_path), field="body"))


def test_the_limit_keeps_whole_paragraphs_from_the_start(tmp_path):
    for name, text in {
        "a.txt": "é" * 10 + "\n",
        "b.txt": "first words\nsecond words\nthird\n",
        "c.txt": "never",
    }.items():
        (tmp_path / name).write_text(text)
    texts = [d.text for d in read_text(TextSource(str(tmp_path), limit_mb=50e-6))]
    assert texts == ["é" * 10 + "\n", "first words\nsecond words"]
    assert [d.text for d in read_text(TextSource(str(tmp_path), limit_mb=15e-6))] == [
        "é" * 7
    ]  # one long paragraph is cut
    assert len(read_text(TextSource(str(tmp_path), limit_mb=1.0))) == 3


def test_a_dataset_gives_a_document_for_each_row_with_text(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"body": ["one", "", None, "two"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = read_text(TextSource("hf:some/set:small", field="body", split="train[:1%]"))
    assert documents == [Document("some/set:0", "one"), Document("some/set:3", "two")]
    read_text(TextSource("hf:some/set", field="body"))
    assert asked == [("some/set", "small", "train[:1%]"), ("some/set", None, "train")]
    with pytest.raises(ValueError, match=r"'hf:some/set': no column 'text' in \['body'\]"):
        read_text(TextSource("hf:some/set"))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_dict({"text": [""]}))
    with pytest.raises(ValueError, match="'hf:some/set': it is empty"):
        read_text(TextSource("hf:some/set"))


def test_a_dataset_that_cannot_be_loaded_is_told_with_the_reason():
    with pytest.raises(ValueError, match=r"dataset 'nobody/nothing' could not be loaded \(.+\); check its name"):
        read_text(TextSource("hf:nobody/nothing"))  # really asks the library, which is told to stay offline
    with pytest.raises(ValueError, match="'hf:': no dataset name"):
        read_text(TextSource("hf:"))


@pytest.mark.parametrize("source, package", [("hf:x", "datasets")])
def test_a_missing_package_is_named(monkeypatch, source, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=f"the package {package} is missing; pip install {package}"):
        read_text(TextSource(source))


def test_docs_is_the_default_source(monkeypatch):
    monkeypatch.setattr(corpora, "read_docs", lambda progress: [Document("stdlib/x.py", f"{progress}")])
    assert read_text(TextSource(), progress=False) == [Document("stdlib/x.py", "False")]


def test_one_call_leads_from_text_to_tokens(tmp_path):
    words = "the cat sat on a mat while seven dogs ran over many green hills".split()
    draw = np.random.default_rng(3)
    for number in range(23):
        lines = [" ".join(draw.choice(words, 9)) for _ in range(7)]
        (tmp_path / f"{number:02}.txt").write_text("\n".join(lines))
    corpus = load_corpus(TextSource(str(tmp_path)), TokenizerConfig(vocab_size=90), validation_fraction=0.2)
    again = load_corpus(TextSource(str(tmp_path)), TokenizerConfig(vocab_size=90), validation_fraction=0.2)
    assert corpus.num_documents == 23
    assert corpus.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.txt"))
    assert corpus.fingerprint == again.fingerprint
    assert np.array_equal(corpus.train.tokens, again.train.tokens)
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert 0.15 < share < 0.3
    other = load_corpus(
        TextSource(str(tmp_path)), TokenizerConfig(vocab_size=90), validation_fraction=0.2, split_seed=1
    )
    assert other.fingerprint != corpus.fingerprint
