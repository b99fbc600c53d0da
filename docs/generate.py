"""Write the page of each encoding and the README's table from docstrings and metadata."""

from __future__ import annotations

import inspect
from pathlib import Path

import locant
from locant.catalog import encoding_class
from locant.encoding import Encoding

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- encodings: written by make docs -->", "<!-- end -->"
SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16, "max_length": 32}

ACTS = {
    "prepare": "position ids",
    "embed": "input embeddings",
    "query_key": "queries and keys",
    "terms": "attention",
    "auxiliary_loss": "loss",
}
BEYOND = {
    "clip": "farther offsets share the last row",
    "saturate": "goes on, leveling off",
    "raise": "refuses",
    "defined": "goes on",
}


BEFORE = """
Before an encoding, a transform moves the position ids that it reads: `"shape+sinusoidal"`, `"randomized+rope"`.
"""


def tables(pages: str) -> str:
    """Return the tables of all encodings and of all transforms; `pages` is the way to their pages."""
    return "\n".join((table("Encoding", locant.names(), pages), BEFORE, table("Transform", transforms(), pages)))


def transforms() -> list[str]:
    """Return the names of the transforms."""
    return locant.names("transforms")


def table(title: str, names: list[str], pages: str) -> str:
    """Return one Markdown table."""
    lines = [f"| {title} | Paper | Acts on | Past the trained length |", "|---|---|---|---|"]
    for name in names:
        encoding = locant.load(name, **SIZES)
        row = (
            f"[`{name}`]({pages}{name}.md)",
            paper(encoding),
            acts(encoding),
            BEYOND[encoding.properties.beyond_range],
        )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def paper(encoding: Encoding) -> str:
    """Return authors, link and equation of the paper."""
    where = f"[{encoding.paper.source}]({encoding.paper.url})" if encoding.paper.url else encoding.paper.source
    return ", ".join(part for part in (encoding.paper.authors, where, encoding.paper.equation) if part)


def acts(encoding: Encoding) -> str:
    """Return in words where the encoding acts."""
    # What is prepared for later hooks acts there; alone, it is the ids that move.
    sites = [site for site in encoding.sites if site != "prepare"] or encoding.sites
    return ", ".join(ACTS[site] for site in sites) or "nothing"


def page(name: str) -> str:
    """Return the page of one encoding."""
    encoding, kind = locant.load(name, **SIZES), encoding_class(name)
    module, claims = inspect.getmodule(kind), encoding.properties
    facts = {
        "Paper": paper(encoding),
        "Acts on": acts(encoding),
        "Depends on content": yes(claims.content),
        "Unchanged when all ids shift": yes(claims.shift_invariant),
        "Symmetric": yes(claims.symmetric),
        "Past the trained length": BEYOND[claims.beyond_range],
        "Serves encoders": yes(claims.bidirectional),
        "Decodes with cached keys": yes(claims.cache_safe),
        "Draws at random in training": yes(claims.draws),
        "Layers by default": "share one object" if claims.layers == "shared" else "each have their own",
        "Equals no encoding at": claims.neutral or "no parameter value",
        "Multiplies the logits by": f"{encoding.logit_factor:.4g}",
    }
    lines = [f"# {name}", "", f'`locant.load("{name}", ...)` builds `{kind.__name__}({signature(kind)})`.', ""]
    lines += fenced(inspect.getdoc(module) or "") + fenced(inspect.getdoc(kind) or "")
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    return "\n".join(lines) + "\n"


def signature(kind: type[Encoding]) -> str:
    """Return the constructor's options as they are written in the source."""
    options = []
    for option in inspect.signature(kind.__init__).parameters.values():
        kinds = option.annotation if isinstance(option.annotation, str) else inspect.formatannotation(option.annotation)
        default = "" if option.default is option.empty else f" = {option.default!r}"
        options.append(f"{option.name}: {kinds}{default}")
    return ", ".join(options[1:])  # without self


def yes(claim: bool) -> str:
    """Return a claim in a word."""
    return "yes" if claim else "no"


def fenced(text: str) -> list[str]:
    """Return a docstring as it is written: its columns and equations are aligned by hand."""
    return ["```text", *text.splitlines(), "```", ""]


def readme(text: str) -> str:
    """Return the README with a fresh table between its two markers."""
    if text.count(START) != 1 or text.count(END) != 1:
        raise ValueError(f"docs: the README needs {START!r} and {END!r} once each, around the table of encodings")
    head, rest = text.split(START)
    return f"{head}{START}\n{tables('docs/encodings/')}\n{END}{rest.split(END)[1]}"


def render() -> dict[Path, str]:
    """Return the text of every generated file."""
    folder = ROOT / "docs" / "encodings"
    files = {folder / f"{name}.md": page(name) for name in locant.names() + transforms()}
    files[folder / "README.md"] = (
        f"# Encodings\n\nThese pages are written by `make docs` from the code.\n\n{tables('')}\n"
    )
    files[ROOT / "README.md"] = readme((ROOT / "README.md").read_text(encoding="utf-8"))
    return files


def stale(files: dict[Path, str]) -> list[Path]:
    """Return the generated files that are out of date or belong to no encoding."""
    extra = [path for path in (ROOT / "docs" / "encodings").glob("*") if path not in files]
    return extra + [
        path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]


def write(files: dict[Path, str]) -> None:
    """Bring every generated file up to date."""
    for path in stale(files):
        if path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        else:
            path.unlink()
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    write(render())
