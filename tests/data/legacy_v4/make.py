"""Numbers of transformers 4.56.2: `pip install --target v4 "transformers==4.56.2"`, then

    PYTHONPATH=v4:. python tests/data/legacy_v4/make.py

Writes cases.json (class, configuration, names and shapes of the state dict) and outputs.safetensors (last hidden
states of weights that `tests/legacy_weights.py` draws from their names; float32, CPU, eager, eval).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import save_file

from tests.legacy_weights import drawn, mask, tokens

HERE = Path(__file__).parent
VOCABULARY = 43
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=24,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=37,
    max_position_embeddings=19,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
)
KINDS = ("relative_key", "relative_key_query")
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertGenerationEncoder": {},
    "RobertaModel": {},
    "RobertaPreLayerNormModel": {},
    "XLMRobertaModel": {},
    "XLMRobertaXLModel": {},
    "CamembertModel": {},
    "ElectraModel": dict(embedding_size=14),
    "AlbertModel": dict(embedding_size=14, num_hidden_layers=3),
    "EsmModel": dict(mask_token_id=4, token_dropout=False, emb_layer_norm_before=True),
    "ErnieModel": dict(use_task_id=False),
    "Data2VecTextModel": {},
    "RoCBertModel": dict(
        pronunciation_vocab_size=VOCABULARY,
        shape_vocab_size=VOCABULARY,
        pronunciation_embed_dim=9,
        shape_embed_dim=7,
    ),
    "XmodModel": dict(languages=["en_XX", "de_DE"], default_language="en_XX", adapter_reduction_factor=2),
    "DPRQuestionEncoder": dict(projection_dim=0),
    "MegatronBertModel": {},
    "SplinterModel": {},
    "AltCLIPTextModel": dict(project_dim=24),
    "ChineseCLIPTextModel": {},
    "ClapTextModel": {},
    "AlignTextModel": {},
    "GitModel": dict(
        vision_config=dict(hidden_size=12, intermediate_size=13, num_hidden_layers=1, num_attention_heads=2)
    ),
}
WHOLE: dict[str, dict[str, Any]] = {  # models of which only the text tower is run
    "AltCLIPModel": dict(
        text_config=dict(project_dim=24),
        vision_config=dict(
            hidden_size=12, intermediate_size=13, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
        ),
        projection_dim=10,
    ),
}


def run(model: Any) -> dict[str, torch.Tensor]:
    """One batch; pad tokens stand where the mask is 0."""
    seen = mask()
    model = getattr(model, "text_model", model)
    with torch.no_grad():
        return {"hidden": model(tokens(VOCABULARY).masked_fill(seen == 0, 1), attention_mask=seen)[0]}


def main() -> None:
    cases, outputs = {}, {}
    for name, extra in (MODELS | WHOLE).items():
        for kind in KINDS:
            text = {**SIZES, "position_embedding_type": kind}
            cls = getattr(T, name)
            given = {**extra, "text_config": {**text, **extra["text_config"]}} if name in WHOLE else {**text, **extra}
            config = cls.config_class(**given)
            config._attn_implementation = "eager"
            model = cls(config).eval()
            shapes = {n: list(t.shape) for n, t in model.state_dict().items() if t.is_floating_point()}
            model.load_state_dict(drawn(shapes), strict=False)
            found = run(model)
            key = f"{name}/{kind}"
            stored = json.loads(config.to_json_string(use_diff=True))
            cases[key] = {"class": name, "config": {**stored, "architectures": [name]}, "shapes": shapes}
            outputs |= {f"{key}/{n}": t.contiguous() for n, t in found.items()}
            print(f"{key}: {tuple(found['hidden'].shape)}, {sum('distance' in n for n in shapes)} tables")
    (HERE / "cases.json").write_text(
        json.dumps({"library": f"transformers {T.__version__}", "cases": cases}, indent=0) + "\n"
    )
    save_file(outputs, HERE / "outputs.safetensors")


if __name__ == "__main__":
    main()
