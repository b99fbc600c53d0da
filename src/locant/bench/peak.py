"""`python -m locant.bench.peak KIND FACTS`: prints the peak memory of one call, measured in this fresh process."""

from __future__ import annotations

import json
import sys

from locant.bench import attention, model

if __name__ == "__main__":
    kind, facts = sys.argv[1:]
    print({"attention": attention.peak, "model": model.peak}[kind](**json.loads(facts)))
