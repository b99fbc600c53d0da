"""Position encodings in Hugging Face models: attach and detach, in place."""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("locant.hf: transformers is not installed, which it is for; pip install 'locant[hf]'") from error

from locant.hf.attach import attach, detach

__all__ = ["attach", "detach"]
