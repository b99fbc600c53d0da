"""The model of a fine-tuning run: loaded with a new head, its encoding attached, checked against its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

import locant.hf
from locant.finetune.settings import FinetuneSettings, ModelChoice
from locant.training.folder import file_digest
from locant.training.mlm import derived_seed
from locant.training.resumable import without_bars

UNREADABLE = ("legacy", "half-converted")  # folders that load wrong


def load_tokenizer(choice: ModelChoice) -> PreTrainedTokenizerFast:
    """The tokenizer of a model. Raises: ValueError for one that is missing, empty, slow or without padding."""
    source = choice.tokenizer or choice.model
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"finetune: no tokenizer can be loaded from {source!r} ({_first_line(error)}); give --tokenizer FOLDER"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            f"finetune: {type(tokenizer).__name__} of {source!r} tells no offsets, needed a tokenizer with a "
            "tokenizer.json; give --tokenizer FOLDER"
        )
    special = sorted(tokenizer.all_special_tokens)
    if not set(tokenizer.get_vocab()) - set(special):  # what transformers makes up where a folder has no tokenizer
        raise ValueError(
            f"finetune: the tokenizer of {source!r} knows no word but {', '.join(special)}, needed the one that the "
            "model was trained with; give --tokenizer FOLDER"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"finetune: the tokenizer of {source!r} has no padding token, needed one for batches; set "
            "tokenizer.pad_token (and the model's config.pad_token_id), and save both"
        )
    return tokenizer


def build_model(
    choice: ModelChoice, auto: str, config: Mapping[str, Any], seed: int, fit_batch: Callable[[], dict[str, Any]]
) -> nn.Module:
    """The pretrained model with a new head and its encoding; both depend on the seed alone, the head on nothing else.

    ``auto`` names a class of transformers, ``config`` goes to its config; ``fit_batch`` makes the inputs of init="fit".
    Raises: ValueError for a folder that is no such model, or lacks weights.
    """
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(derived_seed("finetune head", seed))
        model = _load(choice.model, getattr(transformers, auto), dict(config))
        if choice.encoding:
            torch.manual_seed(derived_seed("finetune encoding", seed, choice.encoding))
            fit = {"fit_inputs": fit_batch()} if choice.init == "fit" else {}
            locant.hf.attach(
                model, choice.encoding, keep_absolute=choice.keep_absolute, init=choice.init, **fit, **choice.options
            )
    return model


def _load(source: str, auto: Any, config: dict[str, Any]) -> Any:
    folder = Path(source)
    if folder.is_dir():
        kind = locant.hf.inspect_directory(folder)
        if kind.kind in (*UNREADABLE, "encoding"):
            raise ValueError(f"finetune: {source!r} cannot be fine-tuned as it is: {kind.reason}; {kind.advice}")
    try:
        model, told = auto.from_pretrained(source, output_loading_info=True, ignore_mismatched_sizes=True, **config)
    except OSError as error:
        raise ValueError(
            f"finetune: no model can be loaded from {source!r} ({_first_line(error)}); give the folder of a saved "
            "model, or an id that is in the local Hugging Face cache"
        ) from error
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        kind = type(AutoConfig.from_pretrained(source)).__name__
        raise ValueError(
            f"finetune: {source!r} has a {kind}, for which transformers has no "
            f"{auto.__name__.removeprefix('AutoModelFor')} head; give another model"
        ) from error
    _check_complete(source, model, told)
    return model


def _check_complete(source: str, model: Any, told: Mapping[str, Any]) -> None:
    """Only the head may be new: an encoder that was left at random would be trained in silence."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    new = [str(name) for name in told["missing_keys"]]
    new += [str(key[0] if isinstance(key, tuple) else key) for key in told["mismatched_keys"]]
    lacking = [name for name in new if name.startswith(prefix) and "pooler" not in name]
    if lacking:
        raise ValueError(
            f"finetune: {source!r} lacks {len(lacking)} weights of {type(model).__name__} ({', '.join(lacking[:3])}), "
            "needed all but the head's; give a whole checkpoint of this architecture"
        )


def check_fit(model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises: ValueError where the tokenizer writes ids that the model lacks, or pads with another one."""
    rows = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise ValueError(
            f"finetune: the tokenizer has ids up to {highest}, but the model embeds {rows} (0 to {rows - 1}); they do "
            "not belong together: give the model's own with --tokenizer"
        )
    config: Any = model.config
    if config.pad_token_id != tokenizer.pad_token_id:
        raise ValueError(
            f"finetune: the tokenizer pads with id {tokenizer.pad_token_id} and the model with {config.pad_token_id}; "
            "they do not belong together: give the model's own with --tokenizer"
        )


def model_inputs(tokenizer: PreTrainedTokenizerFast, config: Any) -> bool:
    """Whether the model is given token types: it embeds several, and the tokenizer tells the texts of a pair apart.

    What a tokenizer says that it gives is not asked: transformers' own of ALBERT leaves them out.
    """
    return getattr(config, "type_vocab_size", 0) > 1 and any(tokenizer.backend_tokenizer.encode("a", "a").type_ids)


def choose_length(settings: FinetuneSettings, model: nn.Module) -> int:
    """The length of input in tokens. Raises: ValueError for one above what the model serves."""
    limit = locant.hf.capacity(model)
    if settings.length and limit is not None and settings.length > limit:
        raise ValueError(
            f"finetune: length = {settings.length} is above the {limit} tokens that the model serves; give length of "
            f"at most {limit}, or make the model longer (locant extend)"
        )
    return settings.length or min(settings.default_length, limit or settings.default_length)


def identity(choice: ModelChoice) -> dict[str, Any]:
    """What a run depends on: the choice, with a digest of the model's files in place of where they lie."""
    from transformers.utils.hub import cached_file

    try:
        config = cached_file(choice.model, "config.json")
    except OSError as error:
        raise ValueError(
            f"finetune: no model at {choice.model!r} ({_first_line(error)}); give the folder of a saved model, or an "
            "id that is in the local Hugging Face cache"
        ) from error
    assert config is not None
    digest = hashlib.sha256()
    for file in sorted(Path(config).parent.iterdir()):
        if file.name == "config.json" or file.suffix in (".safetensors", ".bin"):
            digest.update(file.name.encode() + file_digest(file).encode())
    return {**asdict(choice), "model": Path(choice.model).name, "sha256": digest.hexdigest()}


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, and without transformers' remarks that the head is new."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_bars():
            yield
    finally:
        logging.set_verbosity(before)
