"""Position encodings in Hugging Face models: attach, detach, save, load and describe, all in place."""

from __future__ import annotations

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("locant.hf: transformers is not installed, which it is for; pip install 'locant[hf]'") from error

from locant.hf.attach import attach, detach
from locant.hf.attachment import attachments
from locant.hf.card import model_card
from locant.hf.checkpoint import load, save
from locant.hf.describe import describe
from locant.hf.directory import Directory, inspect_directory
from locant.hf.doctor import diagnose
from locant.hf.freeze import freeze_host
from locant.hf.legacy import convert_legacy, from_legacy
from locant.hf.pretrained import install
from locant.hf.starts import FitReport, fit_report

__all__ = [
    "Directory",
    "FitReport",
    "attach",
    "attachments",
    "convert_legacy",
    "describe",
    "detach",
    "diagnose",
    "fit_report",
    "freeze_host",
    "from_legacy",
    "inspect_directory",
    "load",
    "model_card",
    "save",
]

install()  # transformers saves and loads attached models from here on
