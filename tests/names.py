"""Names of encodings by the hosts that they serve."""

from __future__ import annotations

import locant

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
DECODER_ONLY = [name for name in locant.names() if not locant.load(name, **SIZES).properties.bidirectional]
ENCODERS = [name for name in locant.names() if name not in DECODER_ONLY]
