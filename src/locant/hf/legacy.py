"""Checkpoints of transformers v4 with relative positions, as v5 models with locant attached.

v4 stored one table for each layer, [2P - 1, D] with P = max_position_embeddings, read at (i - j) + P - 1 (query minus
key) and shared by the heads; locant's row is (j - i) + P - 1, so the table is read backwards. What differs from class
to class is data in `legacy_families.py`. Distances beyond P - 1, where v4 failed, share the last row (Shaw's clip).
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from locant.hf.attachment import attachments
from locant.hf.checkpoint import attach_recorded
from locant.hf.directory import inspect_directory, read_config
from locant.hf.families import Site, calls_interface, find_sites
from locant.hf.interface import NAME
from locant.hf.legacy_families import ENCODINGS, VERSION4, Version4
from locant.hf.pretrained import OLD_TABLE, nearest
from locant.hf.record import record_of
from locant.hf.weights import FILES, read_weights, weight_files
from locant.hf.writing import replacing

HUB = ("cache_dir", "force_download", "local_files_only", "revision", "token")  # where files are fetched from
ASKED = "_locant_version4"  # on a config while it is converted: what position_embedding_type was
OUTPUT = re.compile(r"(^|[._])(pooler|heads?)[._]")  # parts on top of the layers, which a checkpoint may lack


def from_legacy(path_or_id: str | os.PathLike[str], auto_class: str = "AutoModel", **kwargs: Any) -> Any:
    """A transformers v4 checkpoint with ``relative_key`` or ``relative_key_query`` positions, as the v5 model itself.

    The encoding is attached, each class's own scaling kept, so that outputs are v4's; with a cache they are those of
    the full pass, which v4's were not. ``auto_class``: any Auto class of transformers, or a model class; a head that
    the checkpoint lacks is drawn and reported as transformers does. The model is in eval mode, in the dtype it was
    stored in. ``kwargs`` go to ``from_pretrained``. Classes whose v4 code took the option but then used no positions
    get ``none``, with a warning. Torch files are read as data only.
    Raises: ValueError for anything but such a checkpoint, with the reason; FileNotFoundError where files are missing.
    """
    for name in ("config", "state_dict"):
        if name in kwargs:
            raise ValueError(
                f"from_legacy: {name}= was given, but it is read from {path_or_id}; give a folder that holds what is "
                "meant"
            )
    source = _fetch(path_or_id, {name: kwargs.pop(name) for name in HUB if name in kwargs})
    _check(source)
    given = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}  # a config would keep it
    config: Any
    config, kwargs = AutoConfig.from_pretrained(source, return_unused_kwargs=True, **kwargs)  # pyright: ignore
    implementation = kwargs.pop("attn_implementation", None)
    asked = list(_mark(source, config))
    skeleton = _skeleton(auto_class, config)
    sites = _attach(source, skeleton, asked)
    state = _converted(source, skeleton, sites, read_weights(weight_files(source)))
    for part, _ in asked:
        delattr(part, ASKED)
    setattr(config, NAME, record_of(skeleton))
    if implementation is not None:
        kwargs["attn_implementation"] = implementation
    kwargs.update(given or {"dtype": next(t.dtype for t in state.values() if t.is_floating_point())})
    resized = kwargs.pop("ignore_mismatched_sizes", False)
    kwargs.update(config=config, state_dict=state, output_loading_info=True, ignore_mismatched_sizes=True)
    cls: Any = type(skeleton)
    model, told = cls.from_pretrained(None, **kwargs)
    if not resized:
        _check_shapes(source, told["mismatched_keys"])
    _check_complete(source, model, set(told["missing_keys"]))
    model.config.name_or_path = str(path_or_id)
    if model.can_generate() and (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def convert_legacy(
    path_or_id: str | os.PathLike[str], out: str | os.PathLike[str], auto_class: str | None = None, **kwargs: Any
) -> Path:
    """Write a v4 checkpoint as a v5 folder that loads with ``from_pretrained`` while locant.hf is imported.

    The class is the one that config.json names, unless ``auto_class`` is given. Other files (the tokenizer's) are
    copied, the README gets the model card's part. The folder appears whole or not at all.
    Raises: as `from_legacy`; ValueError where ``out`` is there and not empty.
    """
    target = Path(out)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"convert_legacy: {target} is there already; give a new or an empty folder")
    source = _fetch(path_or_id, {name: kwargs.pop(name) for name in HUB if name in kwargs})
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"convert_legacy: {target} is within {source}, whose files are copied there; give a folder elsewhere"
        )
    _check(source)
    if auto_class is None:
        auto_class = next(iter(read_config(source).get("architectures") or ["AutoModel"]))
    model = from_legacy(source, auto_class, **kwargs)
    with replacing(target) as fresh:
        _copy_others(source, fresh)
        model.save_pretrained(fresh)
    return target


def _copy_others(source: Path, fresh: Path) -> None:
    for entry in source.iterdir():
        weights = entry.name in FILES or entry.suffix in {".bin", ".safetensors", ".h5", ".msgpack", ".ot", ".pt"}
        if entry.name.startswith(".") or entry.name == "config.json" or weights:
            continue
        if entry.is_dir():
            shutil.copytree(entry, fresh / entry.name)
        else:
            shutil.copyfile(entry, fresh / entry.name)


def _fetch(path_or_id: str | os.PathLike[str], hub: Mapping[str, Any]) -> Path:
    """The folder itself, or the snapshot of a Hub repository."""
    if Path(path_or_id).is_dir():
        if hub:
            raise ValueError(
                f"from_legacy: {path_or_id} is a folder, for which {', '.join(hub)} has no meaning; leave it out"
            )
        return Path(path_or_id)
    from huggingface_hub import snapshot_download

    for weights in ("*.safetensors", "*.bin"):
        try:
            found = Path(
                snapshot_download(str(path_or_id), allow_patterns=["*.json", "*.txt", "*.model", weights], **hub)
            )
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"from_legacy: {path_or_id} is no folder here and could not be fetched from the Hub "
                f"({type(error).__name__}); give the folder of a v4 model, or an id that can be reached"
            ) from error
        if any(found.glob(weights)):
            return found
    raise FileNotFoundError(
        f"from_legacy: {path_or_id} on the Hub holds no *.safetensors or *.bin file; give another id"
    )


def _check(source: Path) -> None:
    """Raise a ValueError where a folder is no v4 checkpoint with relative positions, with what it is."""
    config = read_config(source)
    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"from_legacy: transformers {transformers.__version__} has no model type {kind!r} (v4 may have had it), so "
            f"there is no class to load {source} into"
        )
    found = inspect_directory(source)
    if found.kind != "legacy":
        raise ValueError(f"from_legacy: {source} is {found.kind}: {found.reason}; {found.advice}")


def _configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _configs(part)


def _mark(source: Path, config: PreTrainedConfig) -> Iterator[tuple[PreTrainedConfig, str]]:
    """Every part of a config that asks for relative positions, with what it asks; the parts ask no longer."""
    for part in _configs(config):
        asked = getattr(part, "position_embedding_type", None)
        if asked not in ENCODINGS:
            continue
        row = VERSION4.get(part.model_type)
        if row is None or row.positions == "absolute":
            known = "v4 ignored the option there" if row else f"locant knows {', '.join(sorted(VERSION4))}"
            raise ValueError(
                f"from_legacy: {source} asks for {asked!r} in model type {part.model_type!r}, for which it cannot be "
                f"told what v4 computed ({known}); attach an encoding by hand"
            )
        if hasattr(type(part), "position_embedding_type"):
            part.position_embedding_type = "absolute"  # pyright: ignore[reportAttributeAccessIssue]
        else:
            delattr(part, "position_embedding_type")
        setattr(part, ASKED, asked)
        yield part, asked


def _skeleton(auto_class: str, config: PreTrainedConfig) -> PreTrainedModel:
    cls: Any = getattr(transformers, auto_class, None)
    auto: bool = hasattr(cls, "_model_mapping")
    if not (auto or (isinstance(cls, type) and issubclass(cls, PreTrainedModel))):
        raise ValueError(
            f"from_legacy: transformers {transformers.__version__} has no model class {auto_class!r}; give AutoModel, "
            "AutoModelForMaskedLM, ... or the name of a model class"
        )
    if auto and type(config) not in cls._model_mapping:  # pyright: ignore[reportAttributeAccessIssue]
        named = ", ".join(config.architectures or ()) or "none"
        raise ValueError(
            f"from_legacy: {auto_class} has no class for model type {config.model_type!r}; give another one (the "
            f"config names {named})"
        )
    with torch.device("meta"):
        return cls.from_config(config) if auto else cls(config)  # pyright: ignore[reportAttributeAccessIssue]


def _attach(
    source: Path, skeleton: PreTrainedModel, asked: list[tuple[PreTrainedConfig, str]]
) -> list[tuple[Site, Version4]]:
    """Attach to each stack that asked for it, on the meta device; the stacks, with their rows."""
    try:
        sites = find_sites(skeleton)
    except ValueError:
        sites = []
    entries, rows = [], []
    for site in sites:
        config: Any = getattr(site.module, "config", None)
        kind = getattr(config, ASKED, None)
        if kind is None or not all(hasattr(getattr(m, "config", config), ASKED) for _, m in site.attention):
            continue
        row = VERSION4[config.model_type]
        nothing = row.positions == "none"
        if nothing:
            warnings.warn(
                f"from_legacy: {type(site.module).__name__} of {source} took {kind!r} in v4 and then used no positions "
                "at all; the encoding 'none' is attached, which gives the same outputs",
                stacklevel=3,
            )
        options: dict[str, Any] = {"max_length": config.max_position_embeddings}
        entry = {
            "encoding": "none" if nothing else ENCODINGS[kind],
            "options": options | ({} if nothing else dict(row.options)),
            "share_layers": None,
            "keep_absolute": row.keep_absolute or not site.own,
            "backend": "auto",
            "keep_scale": False,
        }
        entries.append((site, entry))
        rows.append((site, row))
    if not entries:
        types = ", ".join(part.model_type for part, _ in asked)
        own = sorted({type(m).__name__ for _, m in skeleton.named_modules() if _attends(m) and not calls_interface(m)})
        told = f" ({', '.join(own[:3])} of v5 computes attention on its own)" if own else ""
        raise ValueError(
            f"from_legacy: {type(skeleton).__name__} has no stack of layers that locant could give the relative "
            f"positions of {types}{told}; load it with transformers 4.56"
        )
    attach_recorded(f"from_legacy: {source}", skeleton, entries, len(entries) == len(sites))
    return rows


def _attends(module: nn.Module) -> bool:
    return "SelfAttention" in type(module).__name__


def _converted(
    source: Path, skeleton: nn.Module, rows: list[tuple[Site, Version4]], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The state dict with every v4 table under the name that the attachment gives it, read backwards."""
    there = {path: attachment for path, _, attachment in attachments(skeleton)}
    left = {name for name in state if name.endswith(OLD_TABLE)}
    for site, row in rows:
        if row.positions == "none":
            continue
        attachment = there[site.path]
        length = attachment.spec.sizes["max_length"]
        shape = (2 * length - 1, attachment.spec.sizes["head_dim"])
        for index, name in enumerate(_tables(source, site, left)):
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"from_legacy: {name} of {source} has shape {tuple(state[name].shape)} but "
                    f"max_position_embeddings={length} with heads of {shape[1]} needs {shape}; config.json and weights "
                    "do not belong together"
                )
            if not torch.isfinite(state[name]).all():
                raise ValueError(
                    f"from_legacy: {name} of {source} holds NaN or infinite numbers; copy the checkpoint again"
                )
            left.discard(name)
            ours = f"{site.path}.{NAME}.encodings.{attachment.layer_of[index]}.table".lstrip(".")
            state[ours] = state.pop(name).flip(0)[None]
    if left:
        raise ValueError(
            f"from_legacy: {len(left)} tables of {source} ({min(left)}, ...) belong to no layer of "
            f"{type(skeleton).__name__}; config.json and weights do not belong together, or another class is meant"
        )
    return state


def _check_shapes(source: Path, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    for name, have, need in sorted(mismatched, key=lambda item: item[0]):
        raise ValueError(
            f"from_legacy: {name} of {source} has shape {tuple(have)} but config.json asks for {tuple(need)}; config "
            "and weights do not belong together (ignore_mismatched_sizes=True draws such weights anew)"
        )


def _check_complete(source: Path, model: PreTrainedModel, missing: set[str]) -> None:
    """Weights of the base model that the files lack would be drawn anew, which is no v4 model any more.

    Heads and poolers may be drawn, and cross attention as a whole, where two models begin as encoder and decoder.
    """
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False) if not OUTPUT.search(name)}
    for path, part in model.named_modules():
        base = getattr(part, "base_model", part)
        if base is not part:
            above = {name for name, _ in part.named_parameters(remove_duplicate=False)}
            within = next(name for name, module in part.named_modules() if module is base)
            above -= {f"{within}.{name}" for name, _ in base.named_parameters(remove_duplicate=False)}
            needed -= {f"{path}.{name}".lstrip(".") for name in above}
    crossing = {name for name in needed if "crossattention" in name}
    lost = sorted((needed - crossing if crossing <= missing else needed) & missing)
    if lost:
        raise ValueError(
            f"from_legacy: {source} holds nothing for {len(lost)} weights of the base model ({lost[0]}, ...), which "
            "transformers v5 cannot find under their v4 names either; the checkpoint is incomplete, or a part of "
            "another model: load the whole"
        )


def _tables(source: Path, site: Site, names: set[str]) -> list[str]:
    """The stored table of each attention module, in order, whatever stands before the stack's path."""
    found = []
    for path, _ in site.attention:
        suffix = f"{path}.{OLD_TABLE}"
        fitting = [name for name in names if name == suffix or name.endswith(f".{suffix}")]
        found.append(nearest(f"{site.path}.{suffix}".lstrip("."), fitting))
    missing = [path for (path, _), name in zip(site.attention, found, strict=True) if name is None]
    if not missing:
        return found  # pyright: ignore[reportReturnType]
    numbered = sorted(names, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()])
    alike = len({tuple(part for part in name.split(".") if not part.isdigit()) for name in names}) == 1
    if alike and len(names) == len(missing) == len(found):  # modules that v5 calls by other names
        return numbered
    raise ValueError(
        f"from_legacy: {source} holds {len(names)} tables but not one for each of the {len(found)} layers of "
        f"{type(site.module).__name__}: looked for a single name that ends in {missing[0]}.{OLD_TABLE}; the checkpoint "
        "is incomplete, or has other layers than its config.json says"
    )
