"""Local text files: txt, jsonl and parquet, plain or compressed with gzip or xz, read whole and strictly."""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from locant.data.document import Document

FORMATS = (".txt", ".jsonl", ".parquet")
_COMPRESSIONS = (".gz", ".xz")
_SURROGATE = re.compile("[\ud800-\udfff]")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


def expand_path(path: str) -> str:
    """Replace `${NAME}`, `$NAME` and a leading `~`; a variable that is not set is an error."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise ValueError(f"path {path!r}: environment variable {name} is not set; set it or write the path out")
        return os.environ[name]

    return os.path.expanduser(_VARIABLE.sub(value, path))


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files that paths, folders and globs name, each once, sorted within every pattern.

    From a folder (searched to the bottom) only files of known formats are taken; one named by path or glob must be of
    a known format.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        expanded = expand_path(pattern)
        path = Path(expanded)
        if path.is_dir():
            matches = sorted(
                f for f in path.rglob("*") if f.is_file() and file_format(f) and not f.name.startswith(".")
            )
            needed = f"a folder holding {_formats()}"
        elif path.exists() or not glob.has_magic(expanded):
            if not path.exists():
                raise FileNotFoundError(
                    f"text {pattern!r}: no file at {path}; a path, folder or glob of text is needed"
                )
            matches, needed = [path], ""
        else:
            matches = sorted(Path(m) for m in glob.glob(expanded, recursive=True) if Path(m).is_file())
            needed = "a glob that matches"
        if not matches:
            raise FileNotFoundError(f"text {pattern!r}: no file matched {expanded}; give {needed}")
        found.update(dict.fromkeys(matches))
    for path in found:
        if not file_format(path):
            raise ValueError(f"text file {path}: unknown extension {''.join(path.suffixes[-2:])!r}; give {_formats()}")
    return list(found)


def file_format(path: Path) -> str | None:
    """Return ".txt", ".jsonl" or ".parquet", whatever the compression; None for any other extension."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def read_files(files: list[Path], field: str, progress: bool = True) -> list[Document]:
    """Read files in order: a txt file is one document, a jsonl line or parquet row that is not blank is one."""
    documents: list[Document] = []
    for path in tqdm(files, desc="reading text", unit="file", delay=2, disable=not progress):
        before = len(documents)
        documents += (document for document in _read(path, field) if document.text.strip())
        if len(documents) == before:
            raise ValueError(f"text file {path}: it is empty, some text was needed; leave it out")
    return documents


def read_text_file(path: Path) -> str:
    """The text of one file, plain or with .gz or .xz, whatever its format. Raises: ValueError naming the file."""
    return _decoded(path, _decompressed(path))


def check_characters(where: str, field: str, text: str) -> None:
    """Raises: ValueError for half of a surrogate pair, which JSON can write, and neither UTF-8 nor a tokenizer hold."""
    if (bad := _SURROGATE.search(text)) is not None:
        raise ValueError(f"{where}: field {field!r} holds {bad[0]!r}, half of a surrogate pair; write whole characters")


def _formats() -> str:
    return "a .txt, .jsonl or .parquet file, plain or with .gz or .xz"


def _read(path: Path, field: str) -> Iterator[Document]:
    data = _decompressed(path)
    match file_format(path):
        case ".txt":
            yield Document(str(path), _decoded(path, data))
        case ".jsonl":
            yield from _read_jsonl(path, _decoded(path, data), field)
        case _:
            yield from _read_parquet(path, data, field)


def _decompressed(path: Path) -> bytes:
    suffix = path.suffix.lower()
    try:
        data = path.read_bytes()
        if suffix == ".gz":
            return gzip.decompress(data)
        if suffix == ".xz":
            return lzma.decompress(data)
        return data
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(
            f"text file {path}: damaged {suffix[1:]} data ({error}); fetch or compress it again"
        ) from error
    except OSError as error:
        raise ValueError(f"text file {path}: cannot be read ({error.strerror}); check its permissions") from error


def _decoded(path: Path, data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text file {path}: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8; convert the file"
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def _read_jsonl(path: Path, text: str, field: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"text file {path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error}); each line needs one JSON object") from error
        if not isinstance(row, dict) or field not in row:
            came = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where}: no field {field!r} in {came}; name the field that holds the text")
        if not isinstance(row[field], str):
            raise ValueError(
                f"{where}: field {field!r} holds {type(row[field]).__name__}, a string was needed; name another"
            )
        check_characters(where, field, row[field])
        yield Document(f"{path}:{number}", row[field])


def _read_parquet(path: Path, data: bytes, column: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise ValueError(f"text file {path}: parquet needs the package pyarrow; pip install pyarrow") from error
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        names = file.schema_arrow.names
        values = file.read(columns=[column])[column] if column in names else None
    except pa.ArrowException as error:
        raise ValueError(f"text file {path}: damaged parquet data ({error}); fetch it again") from error
    if values is None:
        raise ValueError(f"text file {path}: no column {column!r} in {names}; name the column that holds the text")
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        raise ValueError(f"text file {path}: column {column!r} holds {values.type}, strings were needed; name another")
    for number, value in enumerate(values.to_pylist()):
        yield Document(f"{path}:{number}", value or "")
