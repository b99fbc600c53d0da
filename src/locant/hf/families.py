"""Model families as data: where a host keeps its layers, its projections and the positions it brings of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Family:
    """One model family on the attention interface of transformers v5.

    ``stacks``: classes that embed tokens and run layers. ``encoders``: classes that only run layers (a bare encoder).
    ``attention``: classes of self-attention. ``projections``: the query and key projections of an attention module, or
    one fused module. ``table``, ``rotary``: the host's own positions, as paths below the stack; ``bias``: as a name
    below an attention module. ``padded_rows``: position 0 is row pad_token_id + 1 of the table (RoBERTa).
    """

    name: str
    stacks: tuple[str, ...]
    attention: tuple[str, ...]
    projections: tuple[str, ...]
    encoders: tuple[str, ...] = ()
    table: str | None = None
    rotary: str | None = None
    bias: str | None = None
    padded_rows: bool = False

    @property
    def own_positions(self) -> str:
        """What the host brings of its own, which `attach` switches off unless it is kept."""
        parts = [
            f"the learned absolute table ({self.table})" if self.table else "",
            f"rotary positions ({self.rotary})" if self.rotary else "",
            f"the bucketed bias ({self.bias} of the first block)" if self.bias else "",
        ]
        return " and ".join(part for part in parts if part) or "nothing"


_BERT_TABLE = "embeddings.position_embeddings"

FAMILIES: tuple[Family, ...] = (
    Family("bert", ("BertModel",), ("BertSelfAttention",), ("query", "key"), ("BertEncoder",), table=_BERT_TABLE),
    Family(
        "roberta",
        ("RobertaModel",),
        ("RobertaSelfAttention",),
        ("query", "key"),
        ("RobertaEncoder",),
        table=_BERT_TABLE,
        padded_rows=True,
    ),
    Family(
        "electra",
        ("ElectraModel",),
        ("ElectraSelfAttention",),
        ("query", "key"),
        ("ElectraEncoder",),
        table=_BERT_TABLE,
    ),
    Family(
        "albert", ("AlbertModel",), ("AlbertAttention",), ("query", "key"), ("AlbertTransformer",), table=_BERT_TABLE
    ),
    Family(
        "distilbert",
        ("DistilBertModel",),
        ("DistilBertSelfAttention",),
        ("q_lin", "k_lin"),
        ("Transformer",),
        table=_BERT_TABLE,
    ),
    Family("gpt2", ("GPT2Model",), ("GPT2Attention",), ("c_attn",), table="wpe"),
    Family("llama", ("LlamaModel",), ("LlamaAttention",), ("q_proj", "k_proj"), rotary="rotary_emb"),
    Family("t5", ("T5Stack",), ("T5Attention",), ("q", "k"), bias="relative_attention_bias"),
)

# What a host without a row is searched for: tables are modules or parameters, by name; rotary modules by class.
TABLE_NAMES = (
    "position_embeddings",
    "position_embedding",
    "mid_position_embeddings",
    "positions_embed",
    "position_embeds_layer",
    "positional_embedding",
    "embed_positions",
    "pos_embed",
    "pos_embedding",
    "pos_conv_embed",
    "wpe",
)
ROTARY_NAMES = ("rotary_emb", "rotary_pos_emb")
ROTARY_CLASSES = ("RotaryEmbedding", "RotaryPositionEmbedding", "RotaryPositionalEmbedding", "RopePositionEmbedding")
BIAS_NAME = "relative_attention_bias"
PROJECTION_NAMES = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"), ("c_attn",))
CROSS_NAMES = ("cross", "encoder_attn", "encoder_decoder_attention", "EncDecAttention")


@dataclass(frozen=True)
class Site:
    """One stack of layers found in a model: its path, the module, its family, its self-attention modules in order.

    ``embeds``: whether the stack embeds tokens (a bare encoder does not). ``own``: the host's own positions, as (kind,
    path below the stack). ``runner``: for hosts that are given no tokens (images, sound), the path below the stack of
    the module that runs its layers, which are ``layers``; tokens are counted where the first of them begins.
    ``hands_on``: whether keywords reach the attention function; where they do not, the route lies ready at the modules.
    """

    path: str
    module: nn.Module
    family: Family
    attention: tuple[tuple[str, nn.Module], ...]
    embeds: bool
    own: tuple[tuple[str, str], ...]
    runner: str | None = None
    layers: tuple[nn.Module, ...] = ()
    hands_on: bool = True


def class_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and of all classes above it."""
    return tuple(cls.__name__ for cls in type(module).__mro__)


def calls_interface(module: nn.Module) -> bool:
    """Whether the module's forward calls the attention interface of transformers v5."""
    try:
        return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False


def hands_on(module: nn.Module) -> bool:
    """Whether the module's forward hands keywords that it does not know to what it calls."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return True
    (name,) = [p.name for p in _parameters(module) if p.kind is inspect.Parameter.VAR_KEYWORD] or [None]
    return name is not None and source.count(f"**{name}") > 1


def _parameters(module: nn.Module) -> list[inspect.Parameter]:
    return list(inspect.signature(module.forward).parameters.values())


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether an attention module looks at another sequence."""
    near = ".".join(path.split(".")[-2:])
    named = any(name in near for name in CROSS_NAMES) or "CrossAttention" in type(module).__name__
    return named or bool(getattr(module, "is_cross_attention", False))


def find_sites(model: nn.Module) -> list[Site]:
    """The stacks of a model that an encoding can be attached to.

    Raises: ValueError where there is none, with what was looked for.
    """
    sites = list(_known_sites(model)) or list(_generic_sites(model))
    if not sites:
        raise ValueError(_nothing_found(model))
    return sites


def _known_sites(model: nn.Module) -> Iterator[Site]:
    found: list[str] = []
    for level in ("stacks", "encoders"):
        for path, module in model.named_modules():
            if any(path == f or path.startswith(f"{f}." if f else "") for f in found):
                continue
            for family in FAMILIES:
                if not set(getattr(family, level)) & set(class_names(module)):
                    continue
                attention = _self_attention(module, family.attention)
                if attention:
                    found.append(path)
                    yield Site(
                        path, module, family, attention, level == "stacks", _own(module, family, attention, level)
                    )
                    break


def _self_attention(stack: nn.Module, classes: tuple[str, ...]) -> tuple[tuple[str, nn.Module], ...]:
    return tuple(
        (path, module)
        for path, module in stack.named_modules()
        if set(classes) & set(class_names(module)) and not is_cross(path, module)
    )


def _own(
    stack: nn.Module, family: Family, attention: tuple[tuple[str, nn.Module], ...], level: str
) -> tuple[tuple[str, str], ...]:
    paths = dict(stack.named_modules())
    known = (("table", family.table), ("rotary", family.rotary)) if level == "stacks" else ()
    own = [(kind, path) for kind, path in known if path in paths]
    if family.bias:
        own += [("bias", f"{path}.{family.bias}") for path, module in attention if hasattr(module, family.bias)]
    return tuple(own)


def _generic_sites(model: nn.Module) -> Iterator[Site]:
    """Families without a row: modules whose forward calls the interface, below the smallest stack that has tokens.

    Stacks that embed tokens come first; only a model without one is served where its layers run.
    """
    modules = dict(model.named_modules())
    attention = {p: m for p, m in modules.items() if calls_interface(m) and not is_cross(p, m)}
    homes = list(dict.fromkeys(h for h in (_token_home(p, modules) for p in attention) if h is not None))
    homes = [h for h in homes if not any(other != h and below(other, h) for other in homes)]
    if homes:
        for home in homes:
            depth = {p: _depth(_runner(p, modules)) for p in attention if below(p, home)}  # towers sit deeper
            found = tuple((_relative(p, home), attention[p]) for p in depth if depth[p] == min(depth.values()))
            yield _generic_site(home, modules[home], found)
        return
    if _takes_tokens(model):
        return  # its own attention is not on the interface, a tower within it is not the model
    runs: dict[str, list[str]] = {}
    for path in attention:
        runner = _runner(path, modules)
        if runner is not None:
            runs.setdefault(runner, []).append(path)
    for runner, paths in runs.items():
        home = _home(runner, [r for r in runs if r != runner], modules)
        found = tuple((_relative(p, home), modules[p]) for p in paths)
        layers = dict.fromkeys(modules[_layer(p, modules)] for p in paths)
        yield _generic_site(home, modules[home], found, _relative(runner, home), tuple(layers))


def _generic_site(
    path: str,
    module: nn.Module,
    attention: tuple[tuple[str, nn.Module], ...],
    runner: str | None = None,
    layers: tuple[nn.Module, ...] = (),
) -> Site:
    own = _found_own(module, runner or "")
    first = attention[0][1]
    biases = [p for p, m in attention if hasattr(m, BIAS_NAME)]
    family = Family(
        str(getattr(getattr(module, "config", None), "model_type", type(module).__name__)),
        (type(module).__name__,),
        tuple({type(m).__name__ for _, m in attention}),
        next((names for names in PROJECTION_NAMES if all(hasattr(first, n) for n in names)), ()),
        table=next((p for kind, p in own if kind in ("table", "weight")), None),
        rotary=next((p for kind, p in own if kind == "rotary"), None),
        bias=BIAS_NAME if biases else None,
    )
    own += tuple(("bias", f"{p}.{BIAS_NAME}") for p in biases)
    between = dict.fromkeys(p for a, _ in attention for p in (a, *paths_above(a)) if below(p, runner or ""))
    links = (module.get_submodule(p) for p in between)
    handed = all(hands_on(link) for link in links if not isinstance(link, (nn.ModuleList, nn.ModuleDict)))
    return Site(path, module, family, attention, runner is None, own, runner, layers, handed)


def _found_own(stack: nn.Module, runner: str) -> tuple[tuple[str, str], ...]:
    """Position tables (modules or parameters) and rotary modules below a stack, by name and class, towers left out."""
    tables, rotary = [], []
    towers = [path for path, module in stack.named_modules() if is_tower(module) and not below(runner, path)]
    for path, module in stack.named_modules():
        if any(below(path, tower) for tower in towers):
            continue
        if path.rpartition(".")[2] in TABLE_NAMES:
            tables.append(("table", path))
        elif is_rotary(path, module):
            rotary.append(("rotary", path))
        tables += [
            ("weight", f"{path}.{name}" if path else name)
            for name, _ in module.named_parameters(recurse=False)
            if name in TABLE_NAMES
        ]
    return tuple(tables + rotary)


def is_rotary(path: str, module: nn.Module) -> bool:
    """Whether a module turns ids into rotary positions."""
    return path.rpartition(".")[2] in ROTARY_NAMES or any(
        name in cls for name in ROTARY_CLASSES for cls in class_names(module)
    )


# --- paths ---


def below(path: str, above: str) -> bool:
    """Whether a module's path is at or below another one."""
    return path == above or not above or path.startswith(f"{above}.")


def _takes_tokens(module: nn.Module) -> bool:
    return embedding(module) is not None and "input_ids" in inspect.signature(module.forward).parameters


def is_tower(module: nn.Module) -> bool:
    """Whether a module is a model of images or sound (within another one, as a rule)."""
    reads = getattr(module, "main_input_name", "input_ids")
    return (
        reads != "input_ids" and reads in (names := [p.name for p in _parameters(module)]) and "input_ids" not in names
    )


def _relative(path: str, above: str) -> str:
    return path[len(above) :].lstrip(".")


def _depth(path: str | None) -> int:
    return len(path.split(".")) if path else 0


def paths_above(path: str) -> Iterator[str]:
    """The paths above one, nearest first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _token_home(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The nearest stack above an attention module that embeds tokens."""
    for above in paths_above(path):
        module = modules[above]
        if is_tower(module):
            return None
        if _takes_tokens(module):
            return above
    return None


def _layer(path: str, modules: dict[str, nn.Module]) -> str:
    """The layer an attention module belongs to: the element of the nearest list above it."""
    inner = path
    for above in paths_above(path):
        if isinstance(modules[above], (nn.ModuleList, nn.Sequential)):
            return inner
        inner = above
    return path


def _runner(path: str, modules: dict[str, nn.Module]) -> str | None:
    """The module whose forward runs the list of layers that an attention module belongs to."""
    layer = _layer(path, modules)
    return next((p for p in paths_above(layer) if not isinstance(modules[p], (nn.ModuleList, nn.Sequential))), None)


def _home(runner: str, others: list[str], modules: dict[str, nn.Module]) -> str:
    """The model around a runner of layers that brings positions, if it runs no others; else the nearest model."""
    around: list[str] = []
    for path in (runner, *paths_above(runner)):
        if any(below(other, path) for other in others):
            break
        if hasattr(modules[path], "get_input_embeddings"):
            around.append(path)
    return next((p for p in around if _found_own(modules[p], _relative(runner, p))), around[0] if around else runner)


def embedding(stack: nn.Module) -> nn.Module | None:
    """The module that embeds a stack's tokens; None where it embeds none, or something else than tokens."""
    try:
        found = stack.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    except (NotImplementedError, AttributeError):
        return None
    return found if isinstance(found, nn.Embedding) or hasattr(found, "embedding_dim") else None


def _nothing_found(model: nn.Module) -> str:
    attention = sorted({type(m).__name__ for _, m in model.named_modules() if "Attention" in type(m).__name__})
    without = f" It has {', '.join(attention[:4])}, which compute attention on their own." if attention else ""
    names = ", ".join(name for family in FAMILIES for name in family.stacks + family.encoders)
    return (
        f"attach: {type(model).__name__} has no self-attention that locant can serve; looked for the families "
        f"{', '.join(f.name for f in FAMILIES)} ({names}) and for a module with get_input_embeddings that takes "
        "input_ids, above modules whose forward calls ALL_ATTENTION_FUNCTIONS of transformers v5."
        f"{without} Give a model of a known family, or one on the attention interface"
    )


def size(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of the named fields that a config has."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except Exception:  # a config may refuse to tell what differs between its layers
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None
