"""The Triton kernels. Imported only where they run: `triton` comes with torch for GPUs, not with torch for the CPU.

Every program works on tiles of queries (rows) and keys (columns) of one batch row and head. A table comes laid out by
offset, ``low`` .. ``high`` (`lower.py`); its first column serves all offsets <= low, its last all >= high. Tiles wholly
beyond one end are plain attention with a number for each row or column; only tiles of the band read single columns.

With P = exp(logits - lse), K what dropout multiplies by, and delta_i = dout_i . out_i:

    dlogits = P (K (dout v^T) - delta),    dcontent = scale_table * dlogits * s
"""

import triton.language as tl  # pyright: ignore[reportMissingImports]

from locant.backends.triton.kernels.arguments import Inputs, Sizes, Sums, Terms
from locant.backends.triton.kernels.forward import forward, masses
from locant.backends.triton.kernels.over_keys import rows
from locant.backends.triton.kernels.over_queries import columns
from locant.backends.triton.kernels.tables import gates, pairs

__all__ = ["Inputs", "Sizes", "Sums", "Terms", "columns", "forward", "gates", "masses", "pairs", "rows", "tl"]
