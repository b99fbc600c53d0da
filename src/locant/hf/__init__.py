"""Position encodings in Hugging Face models: attach, detach, save, load and describe, all in place."""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("locant.hf: transformers is not installed, which it is for; pip install 'locant[hf]'") from error

from locant.hf.attach import attach, detach
from locant.hf.attachment import attachments
from locant.hf.checkpoint import load, save
from locant.hf.describe import describe

__all__ = ["attach", "attachments", "describe", "detach", "load", "save"]
