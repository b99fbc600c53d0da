"""Where text comes from: the built-in documentation prose, local files, or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from locant.data.docstrings import read_docs
from locant.data.document import Document
from locant.data.files import file_format, find_files, read_files


@dataclass(frozen=True)
class TextSource:
    """Names a text. Raises ValueError for settings that contradict each other."""

    text: str | Sequence[str] = "docs"  # "docs", "hf:NAME[:CONFIG]", or paths, folders, globs (${VAR}, ~ expanded)
    field: str = "text"  # jsonl key, parquet column or dataset column that holds the text
    split: str = "train"  # split of a Hugging Face dataset, as load_dataset takes it ("train[:1%]" works)
    limit_mb: float | None = None  # take text from the start until this many megabytes of UTF-8; None takes all

    def __post_init__(self) -> None:
        """Check what needs no file."""
        if not isinstance(self.text, str):
            object.__setattr__(self, "text", tuple(self.text))
        if not self.text or not all(self.patterns):
            raise ValueError(f"text source: text is {self.text!r}; give 'docs', 'hf:NAME', or paths of text files")
        if self.limit_mb is not None and not self.limit_mb > 0:
            raise ValueError(f"text source: limit_mb={self.limit_mb} must be above 0; leave it out to take all text")
        if self.split != "train" and not self.is_dataset:
            raise ValueError(
                f"text source: split={self.split!r} has no meaning for {self.text!r}; drop it or use 'hf:NAME'"
            )
        if self.field != "text" and self.text == "docs":
            raise ValueError(f"text source: field={self.field!r} has no meaning for 'docs'; drop it")
        if len(self.patterns) > 1 and any(p == "docs" or p.startswith("hf:") for p in self.patterns):
            raise ValueError(
                f"text source: {self.text!r} mixes files with other sources; give paths only, or one source"
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """`text` as a tuple."""
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)

    @property
    def is_dataset(self) -> bool:
        """Whether this names a Hugging Face dataset."""
        return self.patterns[0].startswith("hf:")


def read_text(source: TextSource, *, progress: bool = True) -> list[Document]:
    """Return the documents of a source, always in the same order, none of them blank.

    Raises FileNotFoundError where nothing is found, ValueError for text that cannot be used.
    """
    if source.patterns == ("docs",):
        documents = read_docs(progress)
    elif source.is_dataset:
        documents = _read_dataset(source)
    else:
        files = find_files(source.patterns)
        if source.field != "text" and all(file_format(path) == ".txt" for path in files):
            raise ValueError(
                f"text source: field={source.field!r} has no meaning for txt files such as {files[0]}; drop it"
            )
        documents = read_files(files, source.field, progress)
    if source.limit_mb is not None:
        documents = _limited(documents, round(source.limit_mb * 1e6))
    if not documents:
        raise ValueError(f"text source {source.text!r}: it is empty, some text was needed; name another source")
    return documents


def _limited(documents: list[Document], num_bytes: int) -> list[Document]:
    kept = []
    for document in documents:
        data = document.text.encode()
        if len(data) > num_bytes:
            paragraph_end = data[:num_bytes].rfind(b"\n")
            text = data[: paragraph_end if paragraph_end > 0 else num_bytes].decode(errors="ignore")
            return [*kept, Document(document.name, text)] if text.strip() else kept
        num_bytes -= len(data)
        kept.append(document)
    return kept


def _read_dataset(source: TextSource) -> list[Document]:
    name, _, config = source.patterns[0].removeprefix("hf:").partition(":")
    if not name:
        raise ValueError(f"text source {source.text!r}: no dataset name; write hf:NAME or hf:NAME:CONFIG")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"text source {source.text!r}: the package datasets is missing; pip install datasets"
        ) from error
    try:
        dataset = datasets.load_dataset(name, config or None, split=source.split)
    except Exception as error:  # the hub raises many kinds: connection, not found, gated, bad config, bad split
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"text source {source.text!r}: dataset {name!r} could not be loaded ({reason}); "
            "check its name and split and the network, or name local files"
        ) from error
    if source.field not in dataset.column_names:
        raise ValueError(
            f"text source {source.text!r}: no column {source.field!r} in {dataset.column_names}; name the text column"
        )
    rows = enumerate(dataset[source.field])
    return [Document(f"{name}:{number}", text) for number, text in rows if text and text.strip()]
