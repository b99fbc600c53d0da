"""Names of encodings by the hosts that they serve."""

from __future__ import annotations

import locant

SIZES = {"num_heads": 2, "head_dim": 8, "model_dim": 16}
CLAIMS = {name: locant.load(name, **SIZES).properties for name in locant.names()}
DECODER_ONLY = [name for name, claims in CLAIMS.items() if not claims.bidirectional]
ENCODER_ONLY = [name for name, claims in CLAIMS.items() if not claims.decoders]
ENCODERS = [name for name in CLAIMS if name not in DECODER_ONLY]
DECODERS = [name for name in CLAIMS if name not in ENCODER_ONLY]
EITHER = [name for name in ENCODERS if name in DECODERS]


def home(name: str) -> str:
    """The host in which an encoding is tried where any would do: BERT, or GPT-2 for what only a decoder can have."""
    return "gpt2" if name in DECODER_ONLY else "bert"
