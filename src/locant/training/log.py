"""The log of a run: one JSON object a line, a line for each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from locant.training.folder import write_atomically


class JsonLines:
    """Appends to a file; without ``writes`` (the other processes of a run) it does nothing."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        self.path, self.writes = path, writes

    def __call__(self, event: str, **values: Any) -> None:
        """Adds a line. Raises: OSError."""
        if self.writes:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"event": event, **values}) + "\n")

    def steps(self) -> list[dict[str, Any]]:
        """The lines of steps, as far as the log is whole: one that was cut off at the end is left out."""
        return [line for line in self._lines() if line.get("event") == "step"]

    def last(self, event: str) -> dict[str, Any]:
        """The last line of an event, {} where there is none."""
        return next((line for line in reversed(self._lines()) if line.get("event") == event), {})

    def cut(self, step: int, command: str) -> None:
        """Take back the steps after ``step``: a run that goes on from there does them again.

        Raises: ValueError where the steps up to it are not all there, since results are read from them; OSError.
        """
        if self.writes:
            found = len({line["step"] for line in self.steps() if line["step"] <= step})
            if found < step:
                raise ValueError(
                    f"{command}: {str(self.path)!r} is damaged: it has {found} whole lines of steps, needed all "
                    f"{step} up to the checkpoint that the run goes on from; put the whole log back, or delete "
                    f"{str(self.path.parent)!r}/checkpoint-* to begin again"
                )
            kept = [line for line in self._lines() if line.get("step", 0) <= step and line["event"] != "scores"]
            write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def _lines(self) -> list[dict[str, Any]]:
        lines = []
        if self.path.is_file():
            for text in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                line = _read(text)
                if line is None:
                    break
                lines.append(line)
        return lines


def _read(text: str) -> dict[str, Any] | None:
    """A line of ours, or None."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    ours = isinstance(line, dict) and "event" in line and isinstance(line.get("step", 0), int)
    return line if ours and ("step" in line or line["event"] != "step") else None
