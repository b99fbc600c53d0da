"""Encoding: the base class of all position encodings, their composition, and the stack that serves a model.

An encoding overrides the hooks that its equation needs; ``sites`` is computed from which it overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from jaxtyping import Float
from torch import Tensor, nn

from locant.positions import Positions
from locant.terms import Term

Beyond = Literal["raise", "clip", "saturate", "defined"]  # past the range, strictest first


@dataclass(frozen=True)
class Paper:
    """Where an encoding was published: arXiv identifier (or another source), the equation, authors and year."""

    source: str
    equation: str
    authors: str = ""

    @property
    def url(self) -> str:
        """Link to the paper, empty where the source is no arXiv identifier."""
        return f"https://arxiv.org/abs/{self.source}" if self.source[:4].isdigit() else ""


@dataclass(frozen=True)
class Properties:
    """Claims, each tested in both directions by the conformance suite.

    ``shift_invariant``: adding a constant to all ids changes nothing. ``symmetric``: with q = k the logits are
    symmetric. ``beyond_range``: what happens past the trained range. ``layers``: whether layers share one object by
    default. ``neutral``: the parameter value at which the encoding equals no encoding at the same logit factor, if any.
    ``content``: whether what is added to the logits depends on q or k. ``bidirectional``: whether it serves attention
    to later tokens, too; ``decoders``: whether it serves attention under a causal mask. ``text``: whether ids may
    number the tokens of a text, and not the patches of an image alone. ``cache_safe``: whether decoding with cached
    keys equals the full pass. ``draws``: whether training draws random numbers, which evaluation does not.
    """

    shift_invariant: bool
    symmetric: bool
    beyond_range: Beyond
    layers: Literal["separate", "shared"]
    neutral: str | None = None
    content: bool = False
    bidirectional: bool = True
    decoders: bool = True
    text: bool = True
    cache_safe: bool = True
    draws: bool = False


@dataclass(frozen=True)
class Layer:
    """What an encoding may read of the layer it serves: q', k' (after ``query_key``), the input x, the projections.

    ``x`` [B I M], ``q`` [B H I D], ``k`` [B H J D] (or fewer heads: grouped queries). ``project_query`` and
    ``project_key`` map [R M] to [R H*D] with the host's own weights (DeBERTa shares them). Fields a host cannot give
    are None.
    """

    q: Float[Tensor, "B H I D"]
    k: Float[Tensor, "B H2 J D"]
    x: Float[Tensor, "B I M"] | None = None
    project_query: Callable[[Tensor], Tensor] | None = None
    project_key: Callable[[Tensor], Tensor] | None = None


class Encoding(nn.Module):
    """One position encoding, serving one layer (or, as one object, all layers).

    Subclasses set ``name``, ``paper`` and ``properties`` and override the hooks they need.
    """

    name: str
    paper: ClassVar[Paper]
    properties: Properties
    logit_factor: float = 1.0  # multiplies the host's 1/sqrt(D); TUPE sqrt(1/2), DeBERTa sqrt(1/3)
    max_length: int | None = None  # ids must stay below this; None where any id is defined
    auxiliary_share: float = 0.0  # of `auxiliary_loss` in the whole loss; the task's own has the rest
    aux: Any = None  # what the last forward in training mode left for `auxiliary_loss`

    def prepare(self, positions: Positions) -> Positions:
        """Once per forward, at the entrance: move the ids, or compute what all layers share."""
        return positions

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """Once per forward: the token embeddings with position information."""
        return x

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H2 J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H2 J D"]]:
        """Each layer: q', k'."""
        return q, k

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """Each layer: the terms that attention adds."""
        return ()

    def auxiliary_loss(self, aux: Any, targets: Any) -> Tensor | None:
        """A loss of the encoding itself (None where there is none), from its ``aux`` and what the trainer knows.

        The trainer reports it apart, and trains on (1 - auxiliary_share) times its own loss + auxiliary_share times it.
        """
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave out what one forward left behind: a part of its graph."""
        return {name: value for name, value in self.__dict__.items() if name != "aux"}

    def tie(self, first: Encoding) -> None:
        """Share with the first layer's object what all layers share, where the rest is separate."""

    def neutralize(self) -> None:
        """Set the parameters to the value at which the encoding changes nothing.

        Raises: ValueError where no such value exists.
        """
        raise ValueError(f"{self.name}: has no neutral parameter value; start from its own initialization")

    def check_causal(self, causal: bool) -> None:
        """Raise a ValueError where a part is defined under a causal mask alone, and there is none, or the reverse."""
        for part in self.parts():
            if causal and not part.properties.decoders:
                raise ValueError(
                    f"{part.name}: reads all tokens before it gives them positions, so a decoder would read ahead, but "
                    f"causal={causal}; use it in an encoder"
                )
            if not (causal or part.properties.bidirectional):
                raise ValueError(
                    f"{part.name}: is defined under a causal mask alone, but causal={causal}; use it in a decoder, or "
                    "choose an encoding that serves encoders"
                )

    def check_text(self) -> None:
        """Raise a ValueError where ids number something else than the tokens of a text."""
        for part in self.parts():
            if not part.properties.text:
                raise ValueError(
                    f"{part.name}: its ids number the patches of an image, but a text has tokens in a row; choose an "
                    "encoding of sequences, such as cape or absolute"
                )

    @property
    def moves_ids(self) -> bool:
        """Whether it does nothing but move the position ids, which other encodings read."""
        return self.sites == ("prepare",)

    @property
    def sites(self) -> tuple[str, ...]:
        """Where the encoding acts: the hooks its class overrides."""
        hooks = ("prepare", "embed", "query_key", "terms", "auxiliary_loss")
        return tuple(h for h in hooks if getattr(type(self), h) is not getattr(Encoding, h))

    def parts(self) -> tuple[Encoding, ...]:
        """The encodings this one is composed of (itself, unless it is a sum)."""
        return (self,)

    def check_length(self, positions: Positions) -> None:
        """Raise a ValueError where the positions reach past the table."""
        if self.max_length is not None and positions.length > self.max_length:
            movers = [part.name for part in positions.shared if isinstance(part, Encoding) and part.moves_ids]
            shorter = f"truncate to {self.max_length} tokens, or build it with max_length={positions.length}"
            nearer = f"{' and '.join(movers)} moved them: move less far, or build it with max_length={positions.length}"
            raise ValueError(
                f"{self.name}: positions reach {positions.length} but the table has {self.max_length} rows; "
                + (nearer if movers else shorter)
            )

    def __add__(self, other: Encoding) -> Sum:
        """Both encodings at once."""
        return Sum(*self.parts(), *other.parts())


class Sum(Encoding):
    """Several encodings at once: hooks run in order, terms are joined, logit factors multiply."""

    def __init__(self, *parts: Encoding) -> None:
        super().__init__()
        self.members = nn.ModuleList(part for given in parts for part in given.parts())
        if "name" not in type(self).__dict__:
            self.name = "+".join(part.name for part in self.parts())

    def parts(self) -> tuple[Encoding, ...]:
        """The encodings this one is composed of."""
        return tuple(self.members)  # pyright: ignore[reportReturnType]

    @property
    def sites(self) -> tuple[str, ...]:
        """Where the parts act."""
        found = {site for part in self.parts() for site in part.sites}
        return tuple(h for h in ("prepare", "embed", "query_key", "terms", "auxiliary_loss") if h in found)

    @property
    def logit_factor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The product of the parts' factors."""
        factor = 1.0
        for part in self.parts():
            factor = factor * part.logit_factor
        return factor

    @property
    def max_length(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The smallest limit of the parts."""
        return min((p.max_length for p in self.parts() if p.max_length is not None), default=None)

    @property
    def properties(self) -> Properties:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the parts have in common."""
        all_of = [part.properties for part in self.parts()]
        neutral = [p.neutral for p in all_of]
        return Properties(
            shift_invariant=all(p.shift_invariant for p in all_of),
            symmetric=all(p.symmetric for p in all_of),
            beyond_range=next(b for b in get_args(Beyond) if any(p.beyond_range == b for p in all_of)),
            layers="shared" if all(p.layers == "shared" for p in all_of) else "separate",
            neutral=" and ".join(n for n in neutral if n) if all(neutral) else None,
            content=any(p.content for p in all_of),
            bidirectional=all(p.bidirectional for p in all_of),
            decoders=all(p.decoders for p in all_of),
            cache_safe=all(p.cache_safe for p in all_of),
            draws=any(p.draws for p in all_of),
        )

    def prepare(self, positions: Positions) -> Positions:
        """Each part in turn, first those that move the ids."""
        for part in movers_first(self.parts()):
            positions = part.prepare(positions)
        return positions

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """Each part in turn."""
        for part in self.parts():
            x = part.embed(x, positions)
        return x

    def query_key(
        self, q: Float[Tensor, "B H I D"], k: Float[Tensor, "B H2 J D"], positions: Positions
    ) -> tuple[Float[Tensor, "B H I D"], Float[Tensor, "B H2 J D"]]:
        """Each part in turn."""
        for part in self.parts():
            q, k = part.query_key(q, k, positions)
        return q, k

    def terms(self, positions: Positions, layer: Layer) -> tuple[Term, ...]:
        """The terms of all parts."""
        return tuple(term for part in self.parts() for term in part.terms(positions, layer))

    def neutralize(self) -> None:
        """Neutralize every part, or none where one has no neutral value."""
        if self.properties.neutral is None:
            return super().neutralize()
        for part in self.parts():
            part.neutralize()


class Stack(nn.Module):
    """Which encoding serves each layer of a model. Sharing across layers is identity: one object, or one for each.

    ``layers[i]`` is layer i's encoding. ``prepare`` and ``embed`` run once per forward, at the model's entrance.
    """

    def __init__(self, layers: Sequence[Encoding]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("stack: got 0 layers; give one encoding for each layer")
        self.layers = nn.ModuleList(layers)
        if all(part.moves_ids for part in self.parts()):
            raise ValueError(
                f"stack: {self.name!r} only moves position ids, which nothing reads; compose it with an encoding, such "
                f"as '{self.name}+sinusoidal'"
            )

    def parts(self) -> tuple[Encoding, ...]:
        """Every distinct part of every layer, once, in order."""
        return tuple(dict.fromkeys(part for layer in self for part in layer.parts()))

    def __iter__(self) -> Iterator[Encoding]:
        """The layers' encodings."""
        return iter(self.layers)  # pyright: ignore[reportReturnType]

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __getitem__(self, index: int) -> Encoding:
        """Layer ``index``'s encoding."""
        return self.layers[index]  # pyright: ignore[reportReturnType]

    @property
    def name(self) -> str:
        """The name of the layers' encoding, or all names where they differ."""
        return ", ".join(dict.fromkeys(layer.name for layer in self))

    @property
    def max_length(self) -> int | None:
        """The smallest limit of the parts."""
        return min((p.max_length for p in self.parts() if p.max_length is not None), default=None)

    def prepare(self, positions: Positions, batch: int | None = None) -> Positions:
        """Positions with what the layers share on board; checks the length against every table.

        ``batch``: how many sequences there are; transforms that draw for each of them ask for it.
        Raises: ValueError past a table, and for cached keys where a part gives other numbers with a cache than without.
        """
        if batch is not None and any(part.properties.draws for part in self.parts()):
            positions = positions.batched(batch)
        for part in movers_first(self.parts()):
            positions = part.prepare(positions)
        for part in self.parts():
            part.check_length(positions)
        cached = positions.num_keys - positions.num_queries
        unsafe = [part.name for part in self.parts() if not part.properties.cache_safe]
        if cached and unsafe:
            raise ValueError(
                f"{unsafe[0]}: {cached} keys were read before, and with its options a token that is read later changes "
                "what they give; read the whole text each time (use_cache=False), or choose other options"
            )
        return positions

    def embed(self, x: Float[Tensor, "B I M"], positions: Positions) -> Float[Tensor, "B I M"]:
        """Token embeddings with the position information of every distinct part."""
        for part in self.parts():
            x = part.embed(x, positions)
        return x


def movers_first(parts: Sequence[Encoding]) -> list[Encoding]:
    """Parts in the order in which they prepare: whoever reads ids reads those that were moved."""
    return sorted(parts, key=lambda part: not part.moves_ids)


def draw(table: nn.Parameter, std: float = 0.02, mean: float = 0.0) -> nn.Parameter:
    """Fill a table with normal draws, as the methods' authors do."""
    nn.init.normal_(table, mean, std)
    return table
