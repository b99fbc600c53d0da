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
from locant.hf.extend import capacity, extend
from locant.hf.fold import fold
from locant.hf.freeze import freeze_host
from locant.hf.guard import guard
from locant.hf.legacy import convert_legacy, from_legacy
from locant.hf.pretrained import install
from locant.hf.public import from_public, load_public
from locant.hf.starts import FitReport, fit_report

__all__ = [
    "Directory",
    "FitReport",
    "attach",
    "attachments",
    "capacity",
    "convert_legacy",
    "describe",
    "detach",
    "diagnose",
    "extend",
    "fit_report",
    "fold",
    "freeze_host",
    "from_legacy",
    "from_public",
    "guard",
    "inspect_directory",
    "load",
    "load_public",
    "model_card",
    "save",
]

install()  # transformers saves and loads attached models from here on
