"""`python -m kvcache explain`."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from rich.console import Console

from kvcache import cli, models
from kvcache.cli import main
from kvcache.cli_common import print_whole
from tests.kvcache.helpers import CONFIGS

KERNELS = ("decode_sm90", "prefill_sm90")


def explain(model: str, *options: str):
    return CliRunner().invoke(
        main, ["explain", "--model", str(CONFIGS / f"{model}.json"), *options]
    )


def rows(output: str) -> dict[str, list[str]]:
    """The table's cells by layer kind."""
    lines = [line.split() for line in output.splitlines() if "_attention " in line]
    return {cells[0]: cells[1:] for cells in lines if cells[0].endswith("_attention")}


def test_the_indexer_of_a_model_is_explained():
    done = explain("deepseek-v4-defaults", "--kv-cache-dtype", "fp8")
    assert "indexer (64 heads of 128): kernels make its Q and K" in done.output
    old = explain("deepseek-v4-defaults", "--kv-cache-dtype", "fp8", "--arch", "sm_80")
    assert "indexer (64 heads of 128): not served: no kernel" in old.output


def test_a_model_that_is_served():
    done = explain("gemma-4-defaults", "--arch", "sm_90a", "--kv-cache-dtype", "fp8")
    assert done.exit_code == 0, done.output
    assert rows(done.output) == {
        "sliding_attention": ["25", "512", "8/4", "256", *KERNELS, "64", "2048"],
        "full_attention": ["5", "8/4", "512", *KERNELS, "64", "4096"],
    }
    assert (
        "one pool for all layers: pages of 262144 bytes, sliding_attention 128 tokens (0.00 % "
        "unused), full_attention 64 tokens (0.00 % unused); 0.00 % of the pool unused\n"
    ) in done.output


def test_the_command_says_what_is_missing():
    done = explain("gemma-4-defaults", "--arch", "sm_100a", "--kv-cache-dtype", "nvfp4")
    assert done.exit_code == 1
    assert [cells[-1] for cells in rows(done.output).values()] == ["none", "none"]
    for kind in ("sliding_attention", "full_attention"):
        (line,) = [line for line in done.output.splitlines() if line.startswith(f"{kind}: ")]
        assert "the reader is missing" in line and "store is missing" not in line
        assert line.endswith("no other kv_cache_dtype works with this configuration either")
    assert "one pool" not in done.output


def test_a_model_is_served_from_nvfp4():
    done = explain("gemma-4-defaults", "--arch", "sm_90a", "--kv-cache-dtype", "nvfp4")
    assert done.exit_code == 0, done.output
    assert rows(done.output) == {
        "sliding_attention": [
            *("25", "512", "8/4", "256", "decode_sm90", "prefill_sm90_nvfp4", "64", "1152")
        ],
        "full_attention": ["5", "8/4", "512", "decode_sm90", "prefill_sm90_nvfp4", "64", "2304"],
    }


def test_layers_that_share_a_cache_take_no_pages(tmp_path):
    model = json.loads((CONFIGS / "gemma-4-defaults.json").read_text(encoding="utf-8"))
    model["text_config"]["num_kv_shared_layers"] = 29
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    done = CliRunner().invoke(main, ["explain", "--model", str(path), "--kv-cache-dtype", "fp8"])
    assert done.exit_code == 0
    # Layer 0 is the only one with a cache: there is no pool to share.
    assert "one pool" not in done.output


def test_only_layers_with_a_cache_count_in_the_pool(tmp_path):
    """The first 10 of 30 layers have caches: the plan is that of a model of 10 layers."""
    model = json.loads((CONFIGS / "gemma-4-defaults.json").read_text(encoding="utf-8"))
    text = {
        **model["text_config"],
        # 2560 bytes a token beside 4096: no pages up to 256 tokens are both full.
        "num_attention_heads": 20,
        "num_key_value_heads": 5,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
    }
    ten = {"num_hidden_layers": 10, "layer_types": text["layer_types"][:10]}
    pools = []
    for fields in ({"num_kv_shared_layers": 20}, ten, {}):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**model, "text_config": {**text, **fields}}), encoding="utf-8")
        done = CliRunner().invoke(
            main, ["explain", "--model", str(path), "--kv-cache-dtype", "fp8"]
        )
        assert done.exit_code == 0
        pools += [line for line in done.output.splitlines() if line.startswith("one pool")]
    shared, short, whole = pools
    assert shared == short != whole


def test_layers_without_keys_and_values_need_no_kernel():
    done = explain("qwen3-next-80b", "--kv-cache-dtype", "fp8")
    assert done.exit_code == 0
    assert rows(done.output)["linear_attention"] == ["36", "not", "needed"]


def test_layer_types_that_are_not_known_fail(tmp_path):
    model = json.loads((CONFIGS / "llama-3.1-8b.json").read_text(encoding="utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**model, "layer_types": ["new_attention"] * 32}), encoding="utf-8")
    done = CliRunner().invoke(main, ["explain", "--model", str(path), "--kv-cache-dtype", "fp8"])
    assert done.exit_code == 1
    assert "new_attention: layers of type 'new_attention' are not known here\n" in done.output


@pytest.mark.parametrize("width", (20, 80))
def test_the_table_is_whole_on_a_narrow_terminal(width):
    path = CONFIGS / "gemma-4-defaults.json"
    kinds = models.layer_kinds(json.loads(path.read_text(encoding="utf-8")), "fp8", "sm_90a")
    screen = Console(width=width, file=io.StringIO(), force_terminal=True, soft_wrap=True)
    print_whole(screen, cli._table(kinds, [None] * len(kinds)))
    text = screen.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for cell in ("sliding_attention", "full_attention", "bytes/token", *KERNELS, "4096"):
        assert cell in text


def test_options():
    for verbose in ((), ("--verbose",)):
        refused = explain("gemma-4-31b", "--kv-cache-dtype", "fp8", *verbose)
        assert refused.exit_code == 1
        assert refused.output.count("served without images: --text-only") == 1
        assert "other kv_cache_dtype" not in refused.output
        served = explain("gemma-4-31b", "--kv-cache-dtype", "fp8", "--text-only", *verbose)
        assert served.exit_code == 0 and "without images" not in served.output
    # Images are not all that stands in the way.
    blackwell = explain("gemma-3-4b", "--kv-cache-dtype", "fp8", "--arch", "sm_100a")
    assert blackwell.exit_code == 1 and "without images" not in blackwell.output
    verbose = explain("llama-3.1-8b", "--kv-cache-dtype", "fp8", "--verbose").output
    writers = "kvcache.paged and cute_kernels.reshape_and_cache"
    assert "  decode_sm90 reads it\n  decode_sm90_16_bits cannot" in verbose
    assert "  prefill_sm90 reads it\n  prefill_sm90_16_bits cannot" in verbose
    shares = (
        "decode_sm90 serves sequences of up to 16 query tokens, prefill_sm90 those of more, where "
        "the call has enough rows for the GPU; else decode_sm90 serves all of it in passes of 64 "
        "rows"
    )
    copies = (
        "prefill_sm90 reads fp16 copies of the keys (widened) in calls whose max_seqlen_q is 256 "
        "or more, where they fit 512 MiB"
    )
    assert f"\n  {writers} write it\n  {shares}\n  {copies}\n  served\n" in verbose
    assert "  served" not in explain("llama-3.1-8b", "--kv-cache-dtype", "fp8").output


def test_batch_invariance_is_asked_for_as_in_warmup():
    """Prefill from nvfp4 copies follows from the batch; from fp8 no call is sent elsewhere."""
    nvfp4 = ("gemma-4-defaults", "--kv-cache-dtype", "nvfp4", "--batch-invariant")
    assert rows(explain(*nvfp4).output)["sliding_attention"][4:6] == ["decode_sm90"] * 2
    verbose = explain(*nvfp4, "--verbose").output
    assert "  prefill_sm90_nvfp4 cannot read it: bits independent of the batch, which" in verbose
    options = ("--kv-cache-dtype", "fp8", "--verbose", "--batch-invariant")
    fixed = explain("llama-3.1-8b", *options).output
    assert "query tokens, prefill_sm90 those of more\n" in fixed and "fp16 copies" not in fixed
    commands = (main.commands[name] for name in ("explain", "warmup"))
    helps = [
        {option.help for option in each.params if option.name == "batch_invariant"}
        for each in commands
    ]
    assert helps[0] == helps[1] != set()


def test_the_models_own_dtype_is_what_it_stores_without_the_option():
    done = explain("llama-3.1-8b")
    assert done.exit_code == 0
    kernels = ["decode_sm90_16_bits", "prefill_sm90_16_bits"]
    cells = rows(done.output)["full_attention"]
    assert cells == ["32", "32/8", "128", *kernels, "64", "4096"]
    assert "does not split a sequence's keys over CTAs" not in done.output
    # Gemma-4's full layers have head size 512.
    done = explain("gemma-4-defaults")
    assert done.exit_code == 0
    assert rows(done.output)["sliding_attention"][4:6] == kernels
    assert rows(done.output)["full_attention"] == ["5", "8/4", "512", *kernels, "64", "8192"]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        (("--kv-cache-dtype", "nvfp4_foo"), "got 'nvfp4_foo'; nearest: 'nvfp4'"),
        (("--arch", "hopper"), "capability: got 'hopper'"),
    ),
)
@pytest.mark.parametrize("command", ("explain", "warmup"))
def test_wrong_options_are_called_by_their_names(command, options, message):
    """Not by the name of the model's file, which has no fault."""
    model = str(CONFIGS / "llama-3.1-8b.json")
    done = CliRunner().invoke(main, [command, "--model", model, *options])
    assert done.exit_code == 2 and message in done.output
    assert f"Invalid value for '{options[0]}'" in done.output and model not in done.output


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("{", "Expecting property name"),
        ("[]", "holds an object, this is a list"),
        ("{}", "got None"),
    ),
)
def test_wrong_files(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["explain", "--model", str(path)])
    assert done.exit_code == 1 and message in done.output and str(path) in done.output
    done = CliRunner().invoke(main, ["explain", "--model", str(tmp_path / "none.json")])
    assert done.exit_code == 2 and "does not exist" in done.output


def test_as_a_command_without_torch():
    """It starts quickly: torch, the DSL and CUDA are not needed to explain."""
    code = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('kvcache', run_name='__main__')\n"
        "finally:\n"
        "    print({'torch', 'cutlass', 'tvm_ffi', 'cuda'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, "explain", "--kv-cache-dtype", "fp8", "--model"]
    done = subprocess.run(
        [*command, str(CONFIGS / "gemma-3-270m.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout)["full_attention"][-4:] == [*KERNELS, "64", "512"]
    assert done.stdout.endswith("set()\n")
