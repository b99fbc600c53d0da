"""What each model type of transformers v4 did with ``position_embedding_type``, as data (read and run on 4.56.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ENCODINGS = {"relative_key": "shaw", "relative_key_query": "huang_m4"}


@dataclass(frozen=True)
class Version4:
    """One model type of v4, asked for relative positions.

    ``positions``: ``"tables"``, one for each layer, read by query - key and shared by heads; ``"none"``: the option was
    taken, the absolute table was left out, and nothing came instead; ``"absolute"``: the option had no effect.
    ``options``: of the encoding that gives its numbers in the v5 class. ``keep_absolute``: the absolute table was added
    all the same.
    """

    positions: Literal["tables", "none", "absolute"] = "tables"
    options: tuple[tuple[str, Any], ...] = ()
    keep_absolute: bool = False


_LIKE_BERT = (
    "altclip_text_model",
    "bert",
    "blip_text_model",
    "bros",
    "camembert",
    "canine",
    "data2vec-text",
    "dpr",
    "electra",
    "ernie",
    "git",
    "lilt",
    "megatron-bert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
_FORGETFUL = ("align_text_model", "chinese_clip_text_model", "clap_text_model", "flava_text_model", "splinter")

VERSION4: dict[str, Version4] = {
    **dict.fromkeys(_LIKE_BERT, Version4()),
    # adds q.a (and k.a) after dividing q.k by sqrt(D)
    "albert": Version4(options=(("scaled", False),)),
    # divides q by sqrt(D) before anything else, so k.a is not scaled; the v5 class does the same and hands on scale 1
    "esm": Version4(),
    **dict.fromkeys(_FORGETFUL, Version4("none")),
    "bert-generation": Version4(keep_absolute=True),
    "layoutlm": Version4("absolute"),
}
