"""The built-in text: only prose out of docstrings, each paragraph once, in one order, cached."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from locant.data import cache, docstrings
from locant.data.docstrings import collect_docstrings, prose_paragraphs, read_docs

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SOME_MODULES = [
    (f"python/{name}", STDLIB / name) for name in ("textwrap.py", "heapq.py", "json/decoder.py", "tarfile.py")
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_CACHE", str(tmp_path / "cache"))


PROSE = "This is a sentence that is long enough to be kept as prose."


@pytest.mark.parametrize(
    "docstring, paragraphs",
    [
        (f"{PROSE}\n\n    >>> a = 1\n    1\n\nIt goes on here after the example has ended.", 2),
        (f"{PROSE}\n\n```python\nthe code of the example is in here\n\nand is it also here\n```\n", 1),
        (
            f"{PROSE}\n\n.. code-block:: python\n\n    this is the code of the example\n\n    so is this a part\n",
            1,
        ),
        (f"{PROSE} For example::\n\n    this is the code of the example\n\nBut this is part of the text again.\n", 2),
        (f"{PROSE}\n\n.. note::\n    A note is part of the text and is kept.\n", 2),
        (f"{PROSE}\n\nA heading of the text that is\n-----------------------------\n", 1),
        (f"{PROSE}\n\n| a | the table of the text | b |\n|---|---|---|\n", 1),
        (f"{PROSE}\n\nArgs:\n    size (`int`, *optional*): The size of the window in the text.\n", 2),
        (f"{PROSE}\n\nx = [a for a in b if c(a) == {{}}] # is the code\n", 1),
        (f"{PROSE}\n\nDies ist ein deutscher Satz ohne jedes englische Wort darin.\n", 1),
        (f"{PROSE}\n\nToo short.\n", 1),
        (f"{PROSE}\n\n这是 a sentence of the text in which 汉字 are to be found 汉字汉字.\n", 1),
    ],
    ids=lambda value: None if isinstance(value, int) else value[len(PROSE) : len(PROSE) + 30].strip(),
)
def test_prose_is_kept_and_the_rest_goes(docstring, paragraphs):
    found = prose_paragraphs(docstring)
    assert len(found) == paragraphs, found
    assert found[0].startswith(PROSE)


def test_markup_is_taken_off_inside_a_paragraph():
    text = (
        "See :class:`~torch.nn.Module`, ``x``, `y`, [the guide](https://a.b/c) and **this** for all of\n  the details."
    )
    assert prose_paragraphs(text) == ["See torch.nn.Module, x, y, the guide and this for all of the details."]


def test_an_argument_gives_its_description():
    text = "Args:\n    size (`int`, *optional*, defaults to `(3, 4)`):\n        The size of the window in the text.\n"
    assert prose_paragraphs(text) == ["The size of the window in the text."]
    numpy_style = "Parameters\n----------\nsize : int, optional\n    The size of the window in the text.\n"
    assert prose_paragraphs(numpy_style) == ["The size of the window in the text."]


SOURCE = '''"""The module has a docstring with words in it."""
raise SystemExit("this file must never be run, it is only to be read")
text = """This is a string of the program and not a docstring."""
class A:
    """The class has a docstring with words in it."""
    def method(self):
        """The method has a docstring with words in it."""
        """This second string is not a docstring of the method."""
    async def later(self):
        """The coroutine has a docstring with words in it."""
add_docstr(abs, r"""The function in C has a docstring with words in it.""".format(a=1))
add_newdoc("np", "abs", """The other function has a docstring with words in it.""")
print("""This is an argument of print and not a docstring.""")
'''


def test_docstrings_and_nothing_else_are_read_without_running_the_file(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(SOURCE)
    (document,) = collect_docstrings([("pkg/a.py", path)])
    owners = ["module", "class", "method", "coroutine", "function in C", "other function"]
    assert document.paragraphs == [f"The {owner} has a docstring with words in it." for owner in owners]
    assert document.name == "pkg/a.py"


def test_paragraphs_that_differ_in_names_only_count_once_over_all_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f'"""Construct the {name.upper()}Model with 12 layers out of a config."""')
    (tmp_path / "broken.py").write_text('"""This file is not Python at all."""\ndef (:')
    files = [(name, tmp_path / f"{name}.py") for name in ("broken", "b", "a")]
    assert [(d.name, d.text) for d in collect_docstrings(files)] == [
        ("b", "Construct the BModel with 12 layers out of a config.")
    ]


def test_real_modules_give_english_prose_in_the_same_order_each_time():
    documents = collect_docstrings(SOME_MODULES)
    assert [d.name for d in documents] == [name for name, _ in SOME_MODULES]
    assert documents == collect_docstrings(SOME_MODULES)
    paragraphs = [paragraph for document in documents for paragraph in document.paragraphs]
    assert len(paragraphs) == len(set(paragraphs)) > 100
    assert not any(">>>" in p or "\t" in p or not p.isascii() for p in paragraphs)
    assert any("JSON" in paragraph for paragraph in documents[2].paragraphs)


@pytest.fixture
def few_files(monkeypatch):
    calls = []

    def files():
        calls.append(1)
        return iter(SOME_MODULES[:2])

    monkeypatch.setattr(docstrings, "_docs_files", files)
    return calls


def test_the_second_time_comes_from_the_cache(few_files):
    first = read_docs(progress=False)
    assert read_docs(progress=False) == first
    assert len(few_files) == 1


@pytest.mark.parametrize("damage", [lambda data: data[:-5], lambda data: data.replace(b"the", b"THE", 1)])
def test_a_damaged_cache_is_made_again(few_files, damage):
    first = read_docs(progress=False)
    (path,) = cache.cache_dir().iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert read_docs(progress=False) == first
    assert len(few_files) == 2
    assert path.read_bytes() == whole


def test_other_versions_have_another_cache(few_files, monkeypatch):
    read_docs(progress=False)
    monkeypatch.setattr(docstrings.metadata, "version", lambda name: "0.0")
    read_docs(progress=False)
    monkeypatch.setattr(docstrings, "DOCS_VERSION", -1)
    read_docs(progress=False)
    assert len(few_files) == 3
    assert len(list(cache.cache_dir().iterdir())) == 3


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(docstrings.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="package 'torch' has no source files here"):
        next(docstrings._docs_files())


PROBE = """
import sys
from locant.data.docstrings import _docs_files
before = set(sys.modules)
names = [name for name, path in _docs_files()]
import json
print(json.dumps([sorted({name.split("/")[0] for name in names}), len(names), sorted(set(sys.modules) - before)]))
"""


def test_the_packages_are_found_without_importing_more():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    packages, count, imported = json.loads(done.stdout)
    assert packages == ["numpy", "python", "torch", "transformers"]
    assert count > 3000
    assert not [name for name in imported if name.startswith(("torch.", "transformers.models", "numpy."))]


@pytest.mark.slow
def test_the_whole_text_is_large_and_the_same_twice():
    first = collect_docstrings(docstrings._docs_files())
    size = sum(len(document.text.encode()) for document in first)
    assert 6e6 < size < 12e6
    assert len(first) > 2500
    assert first == collect_docstrings(docstrings._docs_files())
