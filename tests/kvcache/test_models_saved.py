"""Per-layer fields, and model files as transformers saves them again: the same plan."""

from __future__ import annotations

import json

import pytest

from kvcache.models import layer_kinds
from kvcache.warmup import plan_warmup
from tests.kvcache.helpers import CONFIGS
from tests.requires import requires_module

PLAIN = {
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 512,
}


def kinds(**fields):
    return layer_kinds({**PLAIN, **fields}, "fp8", "sm_90a", text_only=True)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_a_file_that_transformers_saved_again_gives_the_same_plan(path, tmp_path):
    transformers = requires_module("transformers")
    (tmp_path / "config.json").write_bytes(path.read_bytes())
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    given = json.loads(path.read_text(encoding="utf-8"))
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    found = [layer_kinds(model, "fp8", "sm_90a", text_only=True) for model in (given, saved)]
    assert found[0] == found[1]
    plans = [plan_warmup(model, ["sm_90a"], "fp8", text_only=True) for model in (given, saved)]
    assert plans[0] == plans[1]


def test_layers_with_fields_of_their_own():
    own = {"01": {"head_dim": 256, "num_key_value_heads": 4, "intermediate_size": 9}, "3": {}}
    own["0"] = {"sliding_window": 256}
    found = {
        kind.name: (kind.layers, kind.config.head_size, kind.config.num_kv_heads)
        for kind in kinds(per_layer_config=own)
    }
    assert found == {
        "sliding_attention[0]": ((0,), 128, 8),
        "full_attention[1]": ((1,), 256, 4),
        "sliding_attention[2]": ((2,), 128, 8),
        "full_attention[3]": ((3,), 128, 8),
    }
    # What says the same as the model's own fields, or nothing about attention, splits nothing.
    own = {"0": {"num_key_value_heads": 8}, "1": {"sliding_window": None, "num_experts": 8}}
    assert [kind.name for kind in kinds(per_layer_config=own)] == PLAIN["layer_types"][:2]


@pytest.mark.parametrize(
    ("given", "message"),
    (
        ([], "per_layer_config: got a list"),
        ({"4": {}}, r"per_layer_config\['4'\]: accepted: indices of layers, 0 to 3"),
        ({"full_attention": {}}, r"per_layer_config\['full_attention'\]: accepted: indices"),
        ({"1": 5}, r"per_layer_config\['1'\]: got a int"),
        ({"1": {"skip": ["attention"]}}, r"per_layer_config\['1'\].skip: what it means"),
        ({"1": {"head_dim": "512"}}, r"per_layer_config\['1'\].head_dim: got '512'"),
    ),
)
def test_per_layer_fields_that_are_not_known_are_refused_by_name(given, message):
    with pytest.raises(ValueError, match=message):
        kinds(per_layer_config=given)


@pytest.mark.parametrize("model_type", ("gemma4_text", "gemma4_unified_text"))
def test_what_gemma_4_files_leave_out(model_type):
    """Full layers have heads of 512 elements, and other KV heads with `attention_k_eq_v` only."""
    fields = {"model_type": model_type, "head_dim": 256, "num_global_key_value_heads": 4}

    def full(**more):
        config = kinds(**fields, **more)[1].config
        return config.head_size, config.num_kv_heads

    assert full() == (512, 8)
    assert full(attention_k_eq_v=True) == (512, 4)
    assert full(global_head_dim=256) == (256, 8)
