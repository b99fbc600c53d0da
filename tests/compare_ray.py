"""A comparison on a Ray cluster, in a process of its own: `python -m tests.compare_ray RECIPE OUT ADDRESS EVENTS`.

Every event is appended to the file EVENTS as a JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from locant.compare.grid import compare
from locant.compare.on_ray import ray_executor
from locant.compare.recipe import load_recipe


def main(recipe: str, out: str, address: str, events: str) -> None:
    with open(events, "a", encoding="utf-8", buffering=1) as file, ray_executor(address) as executor:
        compare(
            load_recipe(Path(recipe), []),
            out,
            watch=lambda subject, event: event and file.write(json.dumps([subject.title, event]) + "\n"),
            executor=executor,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
