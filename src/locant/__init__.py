"""locant: every published position encoding in a Transformer, exact, fast and compared on equal terms."""

from locant.attention import attention, explain
from locant.catalog import load, names, stack
from locant.encoding import Encoding, Layer, Paper, Properties, Stack
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
