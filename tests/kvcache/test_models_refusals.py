"""What a config.json does not say, or says wrongly, is refused: no layer is guessed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvcache.cli import main
from kvcache.models import layer_kinds
from kvcache.warmup import plan_warmup

PLAIN = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
    "dtype": "bfloat16",
}


def kinds(**fields):
    return {kind.name: kind for kind in layer_kinds({**PLAIN, **fields}, "fp8", "sm_90a")}


@pytest.mark.parametrize(
    "model_type",
    ["frobnicate", "bert", "jamba", "bamba", "nemotron_h", "zamba2", "lfm2", "llama4", "gpt_oss",
     "cohere2", "olmo3", "gemma3n", "qwen3_next", "minimax"],
)  # fmt: skip
def test_layers_of_types_that_are_not_known_are_not_guessed(model_type):
    with pytest.raises(ValueError, match="layer_types: missing"):
        kinds(model_type=model_type)


def test_published_gemma3_files_have_no_pattern():
    found = kinds(model_type="gemma3_text", num_hidden_layers=48, hidden_size=3840)
    assert len(found["sliding_attention"].layers) == 40
    assert found["full_attention"].layers == tuple(range(5, 48, 6))
    assert found["full_attention"].config.head_size == 256


def test_qwen_slides_only_on_request():
    assert list(kinds(model_type="qwen2")) == ["full_attention"]
    found = kinds(model_type="qwen2", use_sliding_window=True, max_window_layers=0)
    assert list(found) == ["sliding_attention"]


def test_qwen3_heads_are_not_a_share_of_the_hidden_size():
    assert kinds(model_type="qwen3", hidden_size=2560)["full_attention"].config.head_size == 128


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text_config": "x"}, "text_config"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 32}, "layer_types"),
        ({"sliding_window_pattern": "LLG"}, "sliding_window_pattern"),
        ({"full_attention_interval": "4"}, "full_attention_interval"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "21"},
         "max_window_layers"),
        ({"num_hidden_layers": 300_000_000}, "num_hidden_layers"),
        ({"num_kv_shared_layers": 99}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": -2}, "num_kv_shared_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"dtype": ["bfloat16"]}, "dtype"),
        ({"dtype": "float8"}, "^dtype"),
        ({"head_dim": 128, "v_head_dim": 64}, "v_head_dim"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "llama"}, "sliding_window"),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, "layer_types"),
        ({"model_type": "qwen3", "use_sliding_window": "false"}, "use_sliding_window"),
        ({"use_bidirectional_attention": "ALL"}, "use_bidirectional_attention"),
        ({"hidden_size": 100}, "hidden_size: got 100; accepted without head_dim"),
        ({"model_type": "gemma", "head_dim": None, "sliding_window": None}, "head_dim: got None"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": None, "sliding_window": None},
         "kv_lora_rank"),
        ({"model_type": "frobnicate", "layer_types": ["full_attention"] * 32}, "head_dim: missing"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(fields, name):
    with pytest.raises(ValueError, match=name):
        kinds(**{"model_type": "mistral", **fields})


def test_an_unknown_model_must_say_how_many_heads_it_has():
    model = {**PLAIN, "model_type": "frobnicate", "layer_types": ["full_attention"] * 32}
    del model["num_key_value_heads"]
    with pytest.raises(ValueError, match="num_key_value_heads: missing"):
        layer_kinds({**model, "head_dim": 128}, "fp8", "sm_90a")


def explained(tmp_path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    return CliRunner().invoke(main, ["explain", "--model", str(path), "--kv-cache-dtype", "fp8"])


def test_names_of_layers_are_not_markup(tmp_path):
    model = {**PLAIN, "model_type": "llama", "layer_types": ["[/red]"] * 32}
    done = explained(tmp_path, json.dumps(model))
    assert done.exit_code == 1 and "[/red]" in done.output


def test_a_file_of_brackets_is_refused(tmp_path):
    done = explained(tmp_path, "[" * 100_000)
    assert done.exit_code == 1 and "Error" in done.output and done.exception.code == 1


OF_LAYERS = {
    **PLAIN,
    "num_hidden_layers": 4,
    "head_dim": 128,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}


def heads(**fields):
    return {
        kind.name: (kind.layers, kind.config.num_q_heads, kind.config.num_kv_heads)
        for kind in layer_kinds({**OF_LAYERS, **fields}, "fp8", "sm_90a")
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "laguna", "num_attention_heads": 96,
         "num_attention_heads_per_layer": [96, 32, 32, 32]},
        {"model_type": "step3p5", "num_attention_heads": 96, "num_sliding_attention_heads": 32},
        # As transformers saves it.
        {"model_type": "step3p5", "num_attention_heads": 96, "num_sliding_attention_heads": 32,
         "per_layer_config": {str(layer): {"num_attention_heads": 32} for layer in (1, 2, 3)}},
    ],
)  # fmt: skip
def test_layers_may_have_heads_of_their_own_number(fields):
    assert heads(**fields) == {
        "full_attention": ((0,), 96, 8),
        "sliding_attention": ((1, 2, 3), 32, 8),
    }
    model = {**OF_LAYERS, **fields}
    found = plan_warmup(model, ["sm_90a"], "fp8", max_query_tokens=1)
    decode = [unit.config for unit in found.compile_units if unit.kernel == "decode_sm90"]
    assert {config.rows for config in decode} == {8, 16}


def test_layers_of_one_type_may_differ():
    found = heads(model_type="laguna", num_key_value_heads_per_layer=[8, 8, 4, 4])
    assert found == {
        "full_attention": ((0,), 32, 8),
        "sliding_attention[1]": ((1,), 32, 8),
        "sliding_attention[2]": ((2, 3), 32, 4),
    }


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_attention_heads_per_layer": [32, 32]}, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": 32}, "num_attention_heads_per_layer"),
        ({"num_attention_heads_per_layer": [32, 0, 32, 32]}, r"num_attention_heads_per_layer\[1\]"),
        ({"num_attention_heads_per_layer": [32, 64, 32, 32], "num_sliding_attention_heads": 16},
         r"num_attention_heads_per_layer\[1\]: got 64; another field has 16"),
        ({"num_attention_heads_per_layer": [32, 64, 64, 64],
          "per_layer_config": {"1": {"num_attention_heads": 32}}},
         "per_layer_config.*num_attention_heads: got 32; another field has 64"),
        ({"num_sliding_attention_heads": "64"}, "num_sliding_attention_heads"),
        ({"head_dim_per_layer": [128, 64, 64, 64]}, "head_dim_per_layer"),
        ({"per_layer_head_dim": [128, 64, 64, 64]}, "per_layer_head_dim"),
        ({"num_query_heads_per_layer": [32] * 4}, "num_query_heads_per_layer"),
        ({"num_sliding_key_value_heads": 4}, "num_sliding_key_value_heads"),
        ({"swa_num_attention_heads": 64}, "swa_num_attention_heads"),
        ({"swa_head_dim": 192}, "swa_head_dim"),
        ({"swa_v_head_dim": 128}, "swa_v_head_dim"),
        ({"attention_other_setting": {"num_attention_heads": 96}}, "attention_other_setting"),
    ],
)  # fmt: skip
def test_heads_of_single_layers_that_are_not_known_are_refused(fields, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        heads(model_type="laguna", **fields)


def test_heads_that_are_those_of_all_layers_are_not_refused():
    same = {
        "head_dim_per_layer": [128] * 4,
        "swa_head_dim": 128,
        "swa_num_key_value_heads": 8,
        "num_attention_heads_per_layer": [32] * 4,
        "hidden_size_per_layer_input": 256,
        "num_local_experts": 8,
        "swa_num_attention_heads": None,
    }
    assert heads(model_type="laguna", **same) == heads(model_type="laguna")
    no_window = {"layer_types": ["full_attention"] * 4, "swa_head_dim": 64}
    assert heads(model_type="laguna", **no_window) == {"full_attention": ((0, 1, 2, 3), 32, 8)}
