"""The built-in text: English prose out of the docstrings of installed Python packages.

Source files are parsed with `ast` and never imported. From each docstring only prose survives: code, doctests,
formulas, tables, headings and type lines go. Paragraphs that differ only in names and numbers count as one, since
model libraries repeat theirs hundreds of times. One source file is one document. Docstrings handed to `add_docstr` and
`add_newdoc` (functions written in C) are read as well.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path

from tqdm import tqdm

from locant.data.cache import load_cached, store_cached
from locant.data.document import Document

DOCS_VERSION = 1  # raise it when the cleaning below changes: it is part of the cache's key
DOCS_PACKAGES = ("torch", "numpy", "transformers")
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "testing", "__pycache__", "idlelib", "lib2to3"}


def read_docs(progress: bool = True) -> list[Document]:
    """Return the built-in text, from the cache when it was made before from the same versions."""
    name = f"docs-{_docs_key()}.json"
    cached = load_cached(name)
    if cached is not None:
        return [Document(*row) for row in json.loads(cached)]
    documents = collect_docstrings(_docs_files(), progress=progress)
    store_cached(name, json.dumps([[d.name, d.text] for d in documents]).encode())
    return documents


def collect_docstrings(files: Iterable[tuple[str, Path]], progress: bool = False) -> list[Document]:
    """Read (name, source file) pairs in order; return one document for each file that adds new prose."""
    seen_docstrings: set[str] = set()
    seen_paragraphs: set[str] = set()
    documents = []
    files = list(files)
    with warnings.catch_warnings(), _no_garbage_collection():
        warnings.simplefilter("ignore")  # invalid escapes in other people's files
        for name, path in tqdm(files, desc="reading docstrings", unit="file", delay=2, disable=not progress):
            fresh = []
            for docstring in _new(_file_docstrings(path), seen_docstrings, str):
                fresh += _new(prose_paragraphs(docstring), seen_paragraphs, _plain_words)
            if fresh:
                documents.append(Document(name, "\n".join(fresh)))
    return documents


def _new(texts: Iterable[str], seen: set[str], key: Callable[[str], str]) -> Iterator[str]:
    for text in texts:
        if (mark := key(text)) not in seen:
            seen.add(mark)
            yield text


def _plain_words(paragraph: str) -> str:
    return " ".join(_PLAIN_WORD.findall(paragraph)) or paragraph


def _docs_key() -> str:
    versions = [DOCS_VERSION, sys.version_info[:3], *((name, metadata.version(name)) for name in DOCS_PACKAGES)]
    return hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:16]


def _docs_files() -> Iterator[tuple[str, Path]]:
    roots = [("python", Path(sysconfig.get_paths()["stdlib"]))]
    for name in DOCS_PACKAGES:
        spec = util.find_spec(name)  # finds, does not import
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"text 'docs': package {name!r} has no source files here; install it or name other text")
        roots.append((name, Path(spec.submodule_search_locations[0])))
    for package, root in roots:
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(s for s in subfolders if s not in _SKIPPED_FOLDERS)
            # transformers makes its modeling files from modular ones, docstrings included
            for file in sorted(f for f in files if f.endswith(".py") and not f.startswith("modular_")):
                path = Path(folder, file)
                yield f"{package}/{path.relative_to(root).as_posix()}", path


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees hold no cycles, and walking them again and again costs a fifth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _file_docstrings(path: Path) -> Iterator[str]:
    source = path.read_bytes()
    if b'"""' not in source and b"'''" not in source:
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # templates and files for other Python versions
        return
    yield from _node_docstrings(tree)


def _node_docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    match node.body:
        case [ast.Expr(value=ast.Constant(value=str(text))), *_]:
            yield text
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _node_docstrings(child)
        elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield from _attached_docstring(child.value)


def _attached_docstring(call: ast.Call) -> Iterator[str]:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("add_docstr", "add_newdoc"):
        return
    match call.args:
        case [*_, ast.Constant(value=str(text))] | [
            *_,
            ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")),
        ]:
            yield text


# What is taken away, line by line.
_FENCE = re.compile(r"^\s*(```|~~~)")
_DIRECTIVE = re.compile(r"^\s*\.\.\s+([\w:-]+?)::")
_PROSE_DIRECTIVES = {"note", "warning", "important", "tip", "seealso", "versionadded", "versionchanged", "deprecated"}
_UNDERLINE = re.compile(r"^\s*([-=~^*#+.\"'])\1{2,}\s*$")
_TABLE = re.compile(r"^\s*[|+]|\s\|\s.*\s\|\s|[-=]{4,}\s+[-=]{4,}|\s{4,}\S.*\s{4,}\S")
_HEADING = re.compile(r"^\s*(#+\s.*|\w+(\s\w+){0,2}:)\s*$")
_ARGUMENT = re.compile(r"^\s*[*`\w.,/ ]{1,60}?\s*\((?:[^()]|\([^()]*\)){1,200}\)\s*:\s*")
_NAMED_TYPE = re.compile(r"^\s*[*\w][*\w, ]*\s:\s.*$")
_NAME_COLON = re.compile(r"^\s*`{0,2}\*{0,2}\w+`{0,2}\s*:\s+(?=\S)")
_BULLET = re.compile(r"^\s*([-*+•]|\(?\d{1,2}[.)]|\[\d+\])\s+")
# What is taken away inside a paragraph, and what a paragraph must look like to stay.
_INLINE = (
    (re.compile(r"\[([^\]]*)\]\([^)]*\)"), r"\1"),  # [words](link)
    (re.compile(r":[\w:+-]+:`~?([^`<]*?)\s*(?:<[^`>]*>)?`"), r"\1"),  # :role:`words <target>`
    (re.compile(r"\[`~?([^`]*)`\]"), r"\1"),
    (re.compile(r"`{1,2}([^`]*)`{1,2}_{0,2}"), r"\1"),
    (re.compile(r"\*{1,2}(\w(?:[^*]*\w)?)\*{1,2}"), r"\1"),
    (re.compile(r"<?https?://\S+>?"), ""),
    (re.compile(r"\s+"), " "),
)
_PLAIN_WORD = re.compile(r"(?<![\w.])[a-z]+(?![\w.(])")
_COMMON = frozenset(
    "the a an of to in is and for that it be as on with are this by or if from not will can which at you should when "
    "was has have been its we all any each than then into only used use may must".split()
)
_ODD = re.compile(r"[{}\\<>|=\[\]@$%^~#]")
_ASCII = str.maketrans(
    {"\u2014": "-", "\u2013": "-", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2192": "->"}
)


def prose_paragraphs(docstring: str) -> list[str]:
    """Return the English prose of one docstring as clean one-line paragraphs."""
    paragraphs: list[str] = []
    lines: list[str] = []
    for line in _prose_lines(inspect.cleandoc(docstring)):
        if line:
            lines.append(line)
        else:
            if lines and (paragraph := _prose(" ".join(lines))):
                paragraphs.append(paragraph)
            lines = []
    return paragraphs


def _prose_lines(text: str) -> Iterator[str]:
    """Yield lines of prose, with "" wherever a paragraph ends."""
    lines = text.expandtabs().split("\n")
    fenced = False
    block_indent = -1  # lines indented deeper than this belong to a code, formula or table block
    doctest = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if _FENCE.match(line):
            fenced = not fenced
            yield ""
            continue
        if not line.strip():
            doctest = False
            yield ""
            continue
        if block_indent >= 0 and indent <= block_indent:
            block_indent = -1
        doctest = doctest or line.lstrip().startswith((">>>", "$ ", "In ["))
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if fenced or doctest or block_indent >= 0 or _UNDERLINE.match(line) or _UNDERLINE.match(following):
            yield ""
            continue
        if directive := _DIRECTIVE.match(line):
            if directive[1] not in _PROSE_DIRECTIVES:
                block_indent = indent
            yield ""
            continue
        if line.rstrip().endswith("::"):
            block_indent = indent
            line = line.rstrip()[:-1]
        yield from _line(line)
    yield ""


def _line(line: str) -> Iterator[str]:
    if (
        _TABLE.search(line.strip())
        or _HEADING.match(line)
        or line.lstrip().startswith((".. ", ":param", ":return", "@"))
    ):
        yield ""
        return
    if _NAMED_TYPE.match(line):
        yield ""
        return
    stripped = line
    for pattern in (_BULLET, _ARGUMENT, _NAME_COLON):
        stripped = pattern.sub("", stripped, count=1)
    if stripped != line:
        yield ""
    yield stripped.strip()


def _prose(paragraph: str) -> str | None:
    for pattern, replacement in _INLINE:
        paragraph = pattern.sub(replacement, paragraph)
    paragraph = paragraph.translate(_ASCII).strip()
    words = paragraph.split()
    if len(words) < 4 or not paragraph.isascii() or len(paragraph) > 5000:
        return None
    common = sum(word.lower() in _COMMON for word in words)
    letters = sum(map(str.isalpha, paragraph)) + len(words)
    if common < 0.12 * len(words) or letters < 0.84 * len(paragraph) or len(_ODD.findall(paragraph)) > 0.2 * len(words):
        return None
    return paragraph
