"""locant: every published position encoding in a Transformer, exact, fast and compared on equal terms."""

from locant.attention import attention, explain
from locant.encoding import Encoding, Layer, Paper, Properties, Stack, load, names, stack
from locant.positions import Positions

__version__ = "0.1.0"
__all__ = [
    "Encoding",
    "Layer",
    "Paper",
    "Positions",
    "Properties",
    "Stack",
    "attention",
    "explain",
    "load",
    "names",
    "stack",
]
