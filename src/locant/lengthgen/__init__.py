"""Length generalization: problems whose longer examples tell position encodings apart, and how answers are scored."""

from locant.lengthgen.attention_distance import (
    head_distances,
    jensen_shannon,
    kl,
    layer_distance,
    model_distance,
    symmetric_kl,
)
from locant.lengthgen.commands import read_scan, write_scan
from locant.lengthgen.pcfg import write_pcfg
from locant.lengthgen.problem import SCRATCHPADS, Example, Problem, Scratchpad
from locant.lengthgen.scores import (
    Bucket,
    by_length,
    edit_distance,
    final_answer,
    is_right,
    mean_reciprocal_rank,
    overall,
    ranks,
)
from locant.lengthgen.splits import (
    PROBLEMS,
    Split,
    bins,
    bucket,
    make_split,
    problems,
    scan_split,
    split_facts,
    split_rows,
)
from locant.lengthgen.symbols import SymbolTokenizer, pool

__all__ = [
    "PROBLEMS",
    "SCRATCHPADS",
    "Bucket",
    "Example",
    "Problem",
    "Scratchpad",
    "Split",
    "SymbolTokenizer",
    "bins",
    "bucket",
    "by_length",
    "edit_distance",
    "final_answer",
    "head_distances",
    "is_right",
    "jensen_shannon",
    "kl",
    "layer_distance",
    "make_split",
    "mean_reciprocal_rank",
    "model_distance",
    "overall",
    "pool",
    "problems",
    "ranks",
    "read_scan",
    "scan_split",
    "split_facts",
    "split_rows",
    "symmetric_kl",
    "write_pcfg",
    "write_scan",
]
