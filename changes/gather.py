"""Move the changelog fragments of this folder into CHANGELOG.md, under the version of pyproject.toml."""

from __future__ import annotations

import datetime
import sys
import tomllib
from pathlib import Path

KINDS = ("added", "changed", "fixed", "removed")


def read_fragments(folder: Path) -> dict[str, list[Path]]:
    """Return the fragments of each kind, sorted by name; any other file than README.md and gather.py is an error."""
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.iterdir()):
        if path.name in {"README.md", "gather.py"} or path.is_dir():
            continue
        parts = path.name.split(".")
        if len(parts) != 3 or parts[1] not in KINDS or parts[2] != "md":
            raise ValueError(f"changes: {path.name!r} is no fragment; name it <slug>.<{'|'.join(KINDS)}>.md")
        if not path.read_text(encoding="utf-8").strip():
            raise ValueError(f"changes: {path.name!r} is empty; say in one sentence what a user will notice")
        found[parts[1]].append(path)
    return found


def format_section(version: str, day: datetime.date, fragments: dict[str, list[Path]]) -> str:
    """Return the Markdown section of one version."""
    lines = [f"## {version} ({day.isoformat()})", ""]
    for kind in KINDS:
        if fragments[kind]:
            lines += [f"### {kind.capitalize()}", ""]
            lines += ["- " + " ".join(path.read_text(encoding="utf-8").split()) for path in fragments[kind]]
            lines.append("")
    return "\n".join(lines)


def gather(root: Path, day: datetime.date) -> str:
    """Write the section of the current version above the older ones, delete the fragments, return the section."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    fragments = read_fragments(root / "changes")
    if not any(fragments.values()):
        raise ValueError(f"changes: there is no fragment to gather for {version}; see changes/README.md")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if f"\n## {version} " in text:
        raise ValueError(f"changes: CHANGELOG.md already has {version}; raise the version in pyproject.toml first")
    section = format_section(version, day, fragments)
    head, mark, older = text.partition("\n## ")
    changelog.write_text(head.rstrip("\n") + "\n\n" + section + (mark + older if mark else ""), encoding="utf-8")
    for paths in fragments.values():
        for path in paths:
            path.unlink()
    return section


if __name__ == "__main__":
    try:
        print(gather(Path(__file__).resolve().parents[1], datetime.date.today()))
    except ValueError as error:
        sys.exit(str(error))
