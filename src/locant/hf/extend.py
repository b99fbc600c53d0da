"""Models for longer input than they were made for: tables get more rows, rotary positions another scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from locant.catalog import SIZES, option_names
from locant.encoding import Encoding, Stack
from locant.hf.attachment import Attachment, Nothing, attachments
from locant.hf.build import FIELDS, build, spare_rows, table_rows
from locant.hf.configs import configs_of, give_own_configs
from locant.hf.families import Site, find_sites, size
from locant.hf.guard import guard_site
from locant.hf.reach import reach
from locant.hf.resample import check_rule, resampled, stretch

Model = TypeVar("Model", bound=nn.Module)
Change = Callable[[list[Any]], None]  # given the configs that tell about the stack
LENGTH_FIELD = "max_position_embeddings"  # other names of it are mapped by the configs themselves


def capacity(model: nn.Module) -> int | None:
    """The longest input a model serves, in tokens: the shortest of its tables; None where any length is defined."""
    return reach(model).limit


def extend(model: Model, length: int, rule: str = "interpolate", *, theta: float | None = None) -> Model:
    """Make a model serve input of ``length`` tokens, in place; returns the model.

    The host's absolute table and what locant attached get more rows by ``rule``: ``interpolate`` (stretched; the first
    and the last row stay), ``tile`` (starts over), ``clip`` (repeats the last row), ``fit`` (goes on by the rotation
    that best carries each row to the next). Reserved rows (RoBERTa's, TUPE's, those of special tokens) are kept as they
    are; tables of clipped offsets grow on both sides in proportion. Rotary positions take ``interpolate`` (positions
    are divided) or ``fit`` (the base is raised so that the slowest wave turns no further than it did); ``theta`` sets
    the base instead. Buffers, ``config.max_position_embeddings`` and inverse frequencies follow at once; the config is
    a copy. Hosts with a table refuse longer input from here on, before any kernel (see `locant.hf.guard`). An optimizer
    made before holds the old rows: make a new one. Give the whole model: a part cannot reach the config of its whole.
    Raises: ValueError for an unknown rule, a shorter length, a rule without meaning for what is there, an encoding
    that was attached as an object, and where nothing limits the length.
    """
    check_rule(rule)
    if length < 1:
        raise ValueError(f"extend: length={length} leaves no tokens; give length >= 1")
    if theta is not None and not theta > 0:
        raise ValueError(f"extend: theta={theta} gives no wavelengths; give theta > 0, such as 500000")
    there = {path: attachment for path, _, attachment in attachments(model)}
    sites = find_sites(model)
    plans = [(site, plan) for site in sites for plan in _plans(site, there.get(site.path), length, rule, theta)]
    if not plans:
        raise ValueError(
            f"extend: nothing limits the length of {type(model).__name__} ({_what(sites, there)} is defined at any "
            "length); use it as it is"
        )
    for site, _ in plans:
        configs_of(model, site)  # refuses what it cannot tell before anything is touched
    give_own_configs(model, sites)
    for site, change in plans:
        change(configs_of(model, site))
    return model


def _what(sites: list[Site], there: dict[str, Attachment]) -> str:
    names = [there[s.path].stack.name if s.path in there else ", ".join(k for k, _ in s.own) for s in sites]
    return ", ".join(dict.fromkeys(name for name in names if name)) or "a model without positions"


def _plans(site: Site, there: Attachment | None, length: int, rule: str, theta: float | None) -> Iterator[Change]:
    """What is to be done to one stack, all of it checked, none of it done."""
    if there is not None:
        yield from _attached_plans(site, there, length, rule, theta)
    if there is not None and not there.spec.keep_absolute:
        return
    tables = [path for kind, path in site.own if kind in ("table", "weight")]
    if tables:
        if theta is not None:
            raise ValueError(f"extend: theta={theta} is for rotary positions but {site.family.name} has a table")
        if len(tables) > 1 or table_rows(site) is None:
            raise ValueError(
                f"extend: the positions of {site.family.name} are {', '.join(tables)}, and only one nn.Embedding with "
                "a row for each token can be made longer; attach an encoding instead of it"
            )
        yield _table_plan(site, there, length, rule)
    for kind, path in site.own:
        if kind == "rotary":
            yield _rotary_plan(site, path, length, rule, theta)


# --- the host's own table ---------------------------------------------------------------------------------------------


def _table_plan(site: Site, there: Attachment | None, length: int, rule: str) -> Change:
    path = next(path for kind, path in site.own if kind == "table")
    table = site.module.get_submodule(path)
    assert isinstance(table, nn.Embedding)
    spare, old = spare_rows(site), len(table.weight)
    if length < old - spare:
        raise ValueError(
            f"extend: {site.family.name} already serves {old - spare} tokens and length={length} is less; give a "
            "length above it"
        )
    rows = torch.cat((table.weight.detach()[:spare], stretch(table.weight.detach()[spare:], length, rule)))
    above = site.module.get_submodule(path.rpartition(".")[0])
    buffers = dict(_longer_buffers(above, old, len(rows)))
    told = size(getattr(site.module, "config", None), FIELDS["max_length"])

    def change(configs: list[Any]) -> None:
        table.weight = nn.Parameter(rows, requires_grad=table.weight.requires_grad)
        table.num_embeddings = len(rows)
        for name, buffer in buffers.items():
            above._buffers[name] = buffer
        if told is not None:
            for config in configs:
                setattr(config, LENGTH_FIELD, told + len(rows) - old)
        if there is not None:
            there.kept_rows = len(rows)
        guard_site(site)

    return change


def _longer_buffers(above: nn.Module, old: int, new: int) -> Iterator[tuple[str, Tensor]]:
    """Buffers with one entry for each row: ids that count, and token types, which are zero."""
    for name, buffer in above.named_buffers(recurse=False):
        if buffer.dim() == 0 or buffer.shape[-1] != old:
            continue
        count = torch.arange(old, device=buffer.device, dtype=buffer.dtype).expand(buffer.shape)
        if torch.equal(buffer, count):
            yield name, torch.arange(new, device=buffer.device, dtype=buffer.dtype).expand(*buffer.shape[:-1], new)
        elif not buffer.any():
            yield name, buffer.new_zeros(*buffer.shape[:-1], new)
        else:
            raise ValueError(
                f"extend: the buffer {name} of {type(above).__name__} has {old} entries that neither count nor are "
                "zero, so what they are at a new length is not known"
            )


# --- rotary positions of the host -------------------------------------------------------------------------------------


def _rotary_plan(site: Site, path: str, length: int, rule: str, theta: float | None) -> Change:
    old: Any = site.module.get_submodule(path)
    config: Any = getattr(old, "config", None)
    given = getattr(config, "rope_parameters", None)
    trained = size(config, FIELDS["max_length"])
    if not isinstance(given, dict) or given.get("rope_type") != "default" or trained is None:
        raise ValueError(
            f"extend: the rotary positions of {site.family.name} are set by {given!r}, and only one plain wave scale "
            "(rope_type 'default') can be changed; change its config and build the model anew"
        )
    scale = Scale.of(f"the rotary positions of {site.family.name}", length / trained, rule, theta)
    base, width = given["rope_theta"], 2 * len(old.inv_freq)
    fresh = {**given, "rope_theta": scale.base(base, width)}
    if scale.factor != 1:
        fresh.update(rope_type="linear", factor=scale.factor)

    def change(configs: list[Any]) -> None:
        above, _, name = path.rpartition(".")
        for each in configs:
            each.rope_parameters = dict(fresh)
            setattr(each, LENGTH_FIELD, length)
        rebuilt = type(old)(site.module.config).to(old.inv_freq.device).train(old.training)
        site.module.get_submodule(above)._modules[name] = rebuilt

    return change


class Scale:
    """How rotary positions reach further: positions are divided by ``factor``, or the base is another one."""

    def __init__(self, factor: float = 1.0, stretch: float = 1.0, theta: float | None = None) -> None:
        self.factor, self.stretch, self.theta = factor, stretch, theta

    @classmethod
    def of(cls, who: str, times: float, rule: str, theta: float | None) -> Scale:
        """For input ``times`` as long as before. Raises: ValueError for shorter input, or a rule made for tables."""
        if theta is not None:
            return cls(theta=theta)
        if times < 1:
            raise ValueError(f"extend: {who} would get {times:.3g} times their length; give a length above it")
        if rule not in ("interpolate", "fit"):
            raise ValueError(
                f"extend: rule={rule!r} is for tables but {who} have none; use 'interpolate', 'fit', or theta="
            )
        return cls(factor=times) if rule == "interpolate" else cls(stretch=times)

    def base(self, base: float, width: int) -> float:
        """The new base: the slowest wave, of period ~ base^((width - 2) / width), becomes ``stretch`` times as long."""
        if self.theta is not None:
            return self.theta
        return base if self.stretch == 1 else base * self.stretch ** (width / max(width - 2, 1))


# --- what locant attached ---------------------------------------------------------------------------------------------


def _attached_plans(site: Site, there: Attachment, length: int, rule: str, theta: float | None) -> Iterator[Change]:
    spec = there.spec
    trained, options = spec.sizes["max_length"], dict(spec.options)
    clip = options.get("clip")
    if clip is not None:
        options["clip"] = max(clip, math.ceil((clip + 1) * length / trained) - 1)
    rotary: list[Any] = [part for part in there.stack.parts() if "factor" in option_names(part.name)]
    for part in rotary[:1]:
        scale = Scale.of(f"the rotary positions of {part.name}", length / trained, rule, theta)
        if scale.factor != 1:
            options["factor"] = scale.factor * options.get("factor", 1.0)
        if scale.base(part.base, part.rotary_dim) != part.base:
            options["base"] = scale.base(part.base, part.rotary_dim)
    if theta is not None and not rotary:
        raise ValueError(f"extend: theta={theta} is for rotary positions but {there.stack.name} has none")
    if there.stack.max_length is not None and length < there.stack.max_length:
        raise ValueError(
            f"extend: {there.stack.name} already serves {there.stack.max_length} tokens and length={length} is less; "
            "give a length above it"
        )
    if spec.encoding is None:
        raise ValueError(
            f"extend: {there.stack.name} was attached as an object, which cannot be built anew; {spec.remedy}"
        )
    options["max_length"] = length
    sizes = {**spec.sizes, "max_length": length}
    chosen = {name: value for name, value in options.items() if name not in SIZES}
    with torch.random.fork_rng(devices=[]):
        built = build(site, spec.encoding, spec.share_layers, sizes, chosen, "model_dim" in spec.options)
    grown = _fill(there.stack, built, rule)
    if grown or rotary:
        yield lambda configs: _serve(site, there, built, replace(spec, options=options, sizes=sizes))


def _fill(old: Stack, new: Stack, rule: str) -> bool:
    """Copy or resample every parameter; returns whether one has more rows than before."""
    grown = False
    for before, after in zip(old, new, strict=True):
        for part, fresh in zip(before.parts(), after.parts(), strict=True):
            grown |= _fill_part(part, fresh, rule)
    return grown


def _fill_part(part: Encoding, fresh: Encoding, rule: str) -> bool:
    grown, had = False, dict(part.named_parameters())
    for name, parameter in fresh.named_parameters():
        value = had[name].detach()
        if value.shape != parameter.shape:
            value, grown = resampled(part, name, value, parameter.shape, rule), True
        parameter.data = value.clone()
        parameter.requires_grad_(had[name].requires_grad)
    fresh.train(part.training)
    return grown


def _serve(site: Site, there: Attachment, built: Stack, spec: Any) -> None:
    there.serve(built)
    there.spec = spec
    for stand_in in (site.module.get_submodule(held.path) for held in there.held if held.kind == "table"):
        if isinstance(stand_in, Nothing):
            stand_in.rows = spec.sizes["max_length"]
