"""What a model does with positions, as numbers: tensors or a model in, frozen dataclass out. Nothing plots or prints.

`analyze(model, tokenizer, texts)` runs the protocols; each is a function of its own, too (see docs/analysis.md).
"""

from locant.analysis.course import Course, correlate, over_checkpoints
from locant.analysis.model import Host, position_vectors, read_model
from locant.analysis.plain import plain
from locant.analysis.protocols import PROTOCOLS, Analysis, ModelFacts, analyze

__all__ = [
    "PROTOCOLS",
    "Analysis",
    "Course",
    "Host",
    "ModelFacts",
    "analyze",
    "correlate",
    "over_checkpoints",
    "plain",
    "position_vectors",
    "read_model",
]
