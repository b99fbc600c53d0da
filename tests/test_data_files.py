"""Local files: what is read, in which order, and what each kind of bad file is told."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from locant.data.files import expand_path, file_format, find_files, read_files

TEXT = "It was a bright cold day in April.\r\nThe clocks were striking thirteen.\n\nCafé.\n"
CLEAN = TEXT.replace("\r\n", "\n")
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def parquet(path: Path, **columns: list) -> bytes:
    pq.write_table(pa.table(columns), path)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "bom"])
def test_txt_is_one_document_however_it_is_packed(tmp_path, suffix, mark):
    path = write(tmp_path / f"a.txt{suffix}", PACKERS[suffix](mark + TEXT.encode()))
    (document,) = read_files([path], "text")
    assert document.text == CLEAN
    assert document.name == str(path)
    assert document.paragraphs == ["It was a bright cold day in April.", "The clocks were striking thirteen.", "Café."]


@pytest.mark.parametrize("suffix", PACKERS)
def test_jsonl_lines_that_are_not_blank_are_documents(tmp_path, suffix):
    rows = [json.dumps({"body": text, "n": 1}) for text in ("one\u2028still one", " ", "two")]
    path = write(tmp_path / f"a.jsonl{suffix}", PACKERS[suffix]("\n".join([rows[0], "", *rows[1:]]).encode()))
    documents = read_files([path], "body")
    assert [(d.name, d.text) for d in documents] == [(f"{path}:1", "one\u2028still one"), (f"{path}:4", "two")]


@pytest.mark.parametrize("suffix", PACKERS)
def test_parquet_rows_that_are_not_blank_are_documents(tmp_path, suffix):
    data = parquet(tmp_path / "raw", body=["one", None, "", "two"], n=[1, 2, 3, 4])
    path = write(tmp_path / f"a.parquet{suffix}", PACKERS[suffix](data))
    assert [d.text for d in read_files([path], "body")] == ["one", "two"]


def test_folders_are_searched_to_the_bottom_in_sorted_order(tmp_path):
    for name in ("b/z.txt", "b/a.txt.gz", "a.jsonl", ".hidden.txt", "README.md", "c.parquet.xz"):
        write(tmp_path / name, "x")
    names = [path.relative_to(tmp_path).as_posix() for path in find_files((str(tmp_path),))]
    assert names == ["a.jsonl", "b/a.txt.gz", "b/z.txt", "c.parquet.xz"]


def test_patterns_keep_their_order_and_files_come_once(tmp_path):
    for name in ("1.txt", "2.txt", "3[a].txt"):
        write(tmp_path / name, "x")
    found = find_files((str(tmp_path / "3[a].txt"), str(tmp_path / "?.txt"), str(tmp_path / "1.txt")))
    assert [path.name for path in found] == ["3[a].txt", "1.txt", "2.txt"]


def test_variables_and_home_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCANT_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/somebody")
    assert expand_path("${LOCANT_DATA}/books") == expand_path("$LOCANT_DATA/books") == f"{tmp_path}/books"
    assert expand_path("~/x") == "/home/somebody/x"


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("LOCANT_DATA", raising=False)
    with pytest.raises(ValueError, match=r"\$\{LOCANT_DATA\}/books'.*variable LOCANT_DATA is not set"):
        find_files(("${LOCANT_DATA}/books",))


@pytest.mark.parametrize(
    "name, form", [("a.TXT", ".txt"), ("a.b.jsonl.xz", ".jsonl"), ("a.txt.zip", None), ("a", None), ("a.gz", None)]
)
def test_the_format_is_read_off_the_name(name, form):
    assert file_format(Path(name)) == form


@pytest.mark.parametrize("name", ["nowhere.txt", "no*.txt", "empty"])
def test_a_pattern_without_files_is_named(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/{name}".replace("*", r"\*")):
        find_files((str(tmp_path / name),))


def test_an_unknown_extension_is_refused(tmp_path):
    path = write(tmp_path / "a.doc.gz", "x")
    with pytest.raises(ValueError, match=r"a\.doc\.gz: unknown extension '\.doc\.gz'; give a \.txt"):
        find_files((str(path),))


@pytest.mark.parametrize(
    "name, data", [("a.txt", " \n\n"), ("a.jsonl", '{"text": ""}\n'), ("a.txt.gz", gzip.compress(b"", mtime=0))]
)
def test_empty_text_is_refused(tmp_path, name, data):
    path = write(tmp_path / name, data)
    with pytest.raises(ValueError, match=f"{name}: it is empty"):
        read_files([write(tmp_path / "good.txt", "x"), path], "text")


@pytest.mark.parametrize("suffix", PACKERS)
def test_bytes_that_are_not_utf8_are_told_with_their_offset(tmp_path, suffix):
    path = write(tmp_path / f"a.txt{suffix}", PACKERS[suffix](b"caf\xc3\xa9 caf\xe9 au lait"))
    with pytest.raises(ValueError, match=rf"a\.txt{suffix}: byte 0xe9 at offset 9 is not UTF-8"):
        read_files([path], "text")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
@pytest.mark.parametrize("damage", [lambda d: d[:-9], lambda d: b"junk" + d, lambda d: d[:30] + b"\0\0" + d[32:]])
def test_damaged_compression_is_told(tmp_path, suffix, damage):
    path = write(tmp_path / f"a.txt{suffix}", damage(PACKERS[suffix](TEXT.encode() * 9)))
    with pytest.raises(ValueError, match=rf"a\.txt{suffix}: damaged {suffix[1:]} data"):
        read_files([path], "text")


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(ValueError, match=r"a\.txt: cannot be read \(Is a directory\)"):
        read_files([tmp_path / "a.txt"], "text")


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"body": "x"}', r"line 3: no field 'text' in \['body'\]"),
        ("[1]", "line 3: no field 'text' in list"),
        ('{"text": 7}', "line 3: field 'text' holds int"),
        ('{"text": ', "line 3: not JSON"),
        (r'{"text": "a \ud83d b"}', r"line 3: field 'text' holds '\\ud83d', half of a surrogate pair"),
    ],
)
def test_a_bad_jsonl_line_is_told_with_its_number(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", f'{{"text": "x"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, {message}"):
        read_files([path], "text")


def test_a_parquet_column_must_exist_and_hold_strings(tmp_path):
    path = write(tmp_path / "a.parquet", parquet(tmp_path / "raw", body=["x"], n=[1]))
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'text' in \['body', 'n'\]"):
        read_files([path], "text")
    with pytest.raises(ValueError, match=r"a\.parquet: column 'n' holds int64"):
        read_files([path], "n")
    with pytest.raises(ValueError, match=r"b\.parquet: damaged parquet data"):
        read_files([write(tmp_path / "b.parquet", path.read_bytes()[:-6])], "body")
