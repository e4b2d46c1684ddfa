"""Warmup plans of published models, held against the calls that serving them makes."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels.attention.decode_sm90 import config as decode_sm90
from cute_kernels.attention.decode_sm90.op import row_ranges
from cute_kernels.attention.prefill_sm90 import config as prefill_sm90
from cute_kernels.attention.route_sm90 import Bounds, route
from cute_kernels.compile.plans import CompileUnit
from cute_kernels.store import config as store
from kvcache.cli_common import read_model
from kvcache.models import layer_kinds
from kvcache.warmup import plan_warmup
from tests.kvcache.helpers import CONFIGS

MAX_TOKENS = 8192
MODELS = ("gemma-4-31b", "gemma-4-e2b", "llama-3-70b", "qwen3-235b-a22b", "gpt-oss-120b")
TP_SIZES = (1, 2, 4, 8)


def plan(name: str, kv_cache_dtype: str = "fp8", **options):
    arguments = {"text_only": True, "max_query_tokens": MAX_TOKENS, **options}
    architectures = arguments.pop("architectures", ["sm_90a"])
    model = read_model(CONFIGS / f"{name}.json")
    return plan_warmup(model, architectures, kv_cache_dtype, **arguments)


def decode_units(found):
    return [planned for planned in found.units if planned.unit.kernel == "decode_sm90"]


def decode(found) -> dict[tuple[int, int], str]:
    """Reasons by (head size, rows) of the decode kernel's units."""
    units = decode_units(found)
    assert len({planned.unit for planned in units}) == len(units)
    return {
        (planned.unit.config.head_size, planned.unit.config.rows): " | ".join(planned.reasons)
        for planned in units
    }


GEMMA_4 = {(256, rows) for rows in (8, 16, 32, 64)} | {(512, rows) for rows in (8, 16, 32)}


@pytest.mark.parametrize(
    ("name", "tp_size", "expected"),
    (
        # Sliding layers 32/16 heads of 256, full ones 32/4 of 512.
        ("gemma-4-31b", 1, GEMMA_4),
        # TP 8: 4/2 and, one KV head replicated, 4/1.
        ("gemma-4-31b", 8, GEMMA_4),
        ("gemma-4-e2b", 1, GEMMA_4),
        ("llama-3-70b", 1, {(128, 8), (128, 16), (128, 32), (128, 64)}),
        # 64/4: 16 rows already at one token, so the bucket of 8 cannot occur...
        ("qwen3-235b-a22b", 4, {(128, 16), (128, 32), (128, 64)}),
        # ...but at TP 8 it is 8/1.
        ("qwen3-235b-a22b", 8, {(128, 8), (128, 16), (128, 32), (128, 64)}),
        ("gpt-oss-120b", 2, {(64, 8), (64, 16), (64, 32), (64, 64)}),
    ),
)
def test_published_models(name, tp_size, expected):
    found = plan(name, tp_sizes=[tp_size])
    assert set(decode(found)) == expected and found.unserved == ()
    assert {planned.unit.config.box_tokens for planned in decode_units(found)} == {64}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize("page_sizes", ((64,), (16, 32, 128)))
def test_a_replay_asks_for_the_plan_and_nothing_else(name, tp_size, page_sizes):
    """Every number of query tokens: decode, verify batches, chunks of prefill, whole prompts."""
    model = read_model(CONFIGS / f"{name}.json")
    asked = set()
    for kind in layer_kinds(model, "fp8", "sm_90a", text_only=True):
        q_heads = kind.config.num_q_heads // tp_size
        kv_heads = max(1, kind.config.num_kv_heads // tp_size)
        for tokens, page in itertools.product((*range(1, 129), 1000, MAX_TOKENS), page_sizes):
            rows = decode_sm90.row_bucket(kind.config.head_size, tokens * (q_heads // kv_heads))
            box = decode_sm90.box_tokens_for_page(page)
            asked.add(decode_sm90.make_config(kind.config.head_size, rows, "bf16", box))
    found = plan(name, tp_sizes=[tp_size], page_sizes=page_sizes)
    assert {planned.unit.config for planned in decode_units(found)} == asked
    assert all(planned.reasons for planned in found.units)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", TP_SIZES)
@pytest.mark.parametrize(
    ("storage", "deterministic", "most"),
    (
        ("fp8_e4m3", False, MAX_TOKENS),
        ("fp8_e4m3", True, MAX_TOKENS),
        ("fp8_e4m3", True, 1),
        ("nvfp4", False, MAX_TOKENS),
        ("nvfp4", True, MAX_TOKENS),
        ("bf16", False, MAX_TOKENS),
        ("bf16", False, 1),
        ("bf16", True, 1),
    ),
)
def test_storing_and_routed_calls_ask_for_the_plan_and_nothing_else(
    name, tp_size, storage, deterministic, most
):
    """All kernels, as calls reach them on an H200; the GPU tests make such calls."""
    model, asked = read_model(CONFIGS / f"{name}.json"), set()
    for kind in layer_kinds(model, "fp8", "sm_90a", text_only=True):
        head_size = kind.config.head_size
        q_heads = kind.config.num_q_heads // tp_size
        kv_heads = max(1, kind.config.num_kv_heads // tp_size)
        counts = [count for count in (*range(1, 66), 500, MAX_TOKENS) if count <= most]
        for tokens, batch in itertools.product(counts, (1, 3, 64, 2000)):
            asked |= units_of_a_step(
                Bounds(
                    batch + 1,
                    batch * tokens + 1,
                    tokens,
                    q_heads // kv_heads,
                    kv_heads,
                    head_size,
                    deterministic,
                    storage,
                    8192,
                )
            )
    found = plan(
        name,
        {"fp8_e4m3": "fp8", "nvfp4": "nvfp4", "bf16": "auto"}[storage],
        tp_sizes=[tp_size],
        max_query_tokens=most,
        batch_invariant=deterministic,
    )
    assert set(found.compile_units) == asked
    assert found.unserved == ()


def units_of_a_step(bounds: Bounds):
    """What a step asks for: sequences of `max_seqlen_q` query tokens, and one with a single one."""
    chosen = route(bounds, sm_count=132)
    head_size, storage = bounds.head_size, bounds.kv_format
    configs: list[tuple[str, object]] = []
    if storage != "bf16":
        stored = store.make_config("fp8" if storage == "fp8_e4m3" else storage, "bf16", "sm_90a")
        configs.append((store.kernel_name("sm_90a"), stored))
        if bounds.total_q > store.SCANNED_TOKENS:
            configs.append(("store_claim", store.ClaimConfig()))
    if chosen.prefill and storage != "nvfp4":
        made = prefill_sm90.make_config(head_size, "bf16", 64, storage)
        configs.append(("prefill_sm90", made))
    if chosen.capacity:
        made = prefill_sm90.widened_config(head_size, "bf16", storage)
        configs.append(("prefill_sm90", made))
    if chosen.decode:
        ranges = [(0, chosen.rows)]
        if bounds.deterministic:
            shape = (head_size, bounds.group, bounds.batch, bounds.total_q, bounds.max_seqlen_q)
            ranges = row_ranges(*shape, chosen.rows)
        for _, most in ranges:
            packed = min(bounds.max_seqlen_q * bounds.group, most)
            rows = decode_sm90.row_bucket(head_size, packed)
            made = decode_sm90.make_config(head_size, rows, "bf16", 64, kv_format=storage)
            configs.append(("decode_sm90", made))
    return {CompileUnit(kernel, config, "sm_90a") for kernel, config in configs}


def test_sizes_are_planned_together_and_reasons_say_for_which():
    found = plan("qwen3-235b-a22b", tp_sizes=TP_SIZES)
    reasons = decode(found)
    assert reasons[128, 8] == "full_attention (94 layers) on sm_90a, TP 8"
    assert reasons[128, 16] == "full_attention (94 layers) on sm_90a, TP 1/2/4/8"
    assert len(found.compile_units) == len(set(found.compile_units)) == len(found.units)


def test_short_sequences_need_fewer_kernels():
    assert set(decode(plan("llama-3-70b", max_query_tokens=1))) == {(128, 8)}
    assert set(decode(plan("llama-3-70b", max_query_tokens=4))) == {(128, 8), (128, 16), (128, 32)}
    with pytest.raises(ValueError, match="max_query_tokens: got 0"):
        plan("llama-3-70b", max_query_tokens=0)


def test_query_dtypes():
    names = {planned.unit.config.q_dtype for planned in decode_units(plan("llama-3-70b"))}
    assert names == {"bf16"}
    found = plan("llama-3-70b", query_dtype="fp16")
    assert {planned.unit.config.q_dtype for planned in decode_units(found)} == {"fp16"}


def test_images_are_not_forgotten():
    found = plan("gemma-3-4b", text_only=False)
    assert found.units == ()
    assert len(found.unserved) == 2 and all("bidirectional" in line for line in found.unserved)
    assert all(line.endswith("--text-only, or text_only=True") for line in found.unserved)


def test_layers_that_are_causal_among_an_images_tokens_are_planned():
    """Gemma-4's full ones."""
    found = plan("gemma-4-31b", text_only=False)
    (line,) = found.unserved
    assert line.startswith("sliding_attention (50 layers)") and "bidirectional" in line
    assert {planned.unit.config.head_size for planned in decode_units(found)} == {512}
    kernels = {planned.unit.kernel for planned in found.units}
    assert {"decode_sm90", "prefill_sm90", "store_sm90", "store_claim"} <= kernels
    full = {
        planned.unit
        for planned in plan("gemma-4-31b").units
        if any(reason.startswith("full_attention") for reason in planned.reasons)
    }
    assert {planned.unit for planned in found.units} == full


def test_architectures_without_kernels_are_named_and_stop_nothing():
    found = plan("llama-3-70b", architectures=["sm_90a", "sm_100a"])
    assert {planned.unit.target for planned in decode_units(found)} == {"sm_90a"}
    (line,) = found.unserved
    assert line.startswith("full_attention (80 layers) on sm_100a, TP 1: ")


@pytest.mark.parametrize("kv_cache_dtype", ("fp8", "nvfp4_mse"))
def test_where_others_read_the_cache_the_store_is_planned(kv_cache_dtype):
    found = plan_warmup(read_model(CONFIGS / "llama-3-70b.json"), ["sm_100a"], kv_cache_dtype)
    assert {planned.unit.kernel for planned in found.units} == {"store_sm100", "store_claim"}
    for planned in found.units:
        assert planned.reasons == ("the store of full_attention (80 layers) on sm_100a, TP 1",)
    plain = plan_warmup(read_model(CONFIGS / "llama-3-70b.json"), ["sm_100a"], "bf16")
    assert not plain.units


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("architectures", "sm_90a"),
        ("architectures", [90]),
        ("tp_sizes", 2),
        ("page_sizes", 64),
        ("page_sizes", "64"),
    ),
)
def test_one_in_the_place_of_several_is_named(name, value):
    arguments = {"architectures": ["sm_90a"], name: value}
    with pytest.raises(TypeError, match=rf"^{name}(\[0\])?: got "):
        plan_warmup(read_model(CONFIGS / "llama-3-70b.json"), kv_cache_dtype="fp8", **arguments)


@pytest.mark.parametrize("value", ("8", 1.5, True, 0))
def test_max_query_tokens_is_a_positive_int(value):
    with pytest.raises(ValueError, match="^max_query_tokens: got .*; accepted: an int > 0"):
        plan("llama-3-70b", max_query_tokens=value)


@pytest.mark.parametrize("name", ("index_n_heads", "index_head_dim"))
@pytest.mark.parametrize("value", (0, "64", 1.5, True))
def test_an_indexers_sizes_are_positive_ints(name, value):
    model = read_model(CONFIGS / "deepseek-v4-defaults.json")
    with pytest.raises(ValueError, match=f"^{name}: got {value!r}; accepted: an int > 0"):
        plan_warmup({**model, name: value}, ["sm_90a"], "fp8")


def test_the_indexer_and_unknown_layers_of_deepseek_v4_are_named():
    found = plan("deepseek-v4-defaults", tp_sizes=(1, 8))
    assert not decode_units(found)
    for kind in ("compressed_sparse_attention (20", "heavily_compressed_attention (23"):
        (line,) = [line for line in found.unserved if line.startswith(kind)]
        assert "on sm_90a, TP 1/8: layers of type" in line
    indexer = [planned for planned in found.units if "indexer" in " ".join(planned.reasons)]
    assert not [line for line in found.unserved if line.startswith("indexer")]
    # Q: two formats, few and many rows, these sizes and any. K: two formats, windows of 8 rows, of
    # 128 and of any number.
    assert sorted(planned.unit.kernel for planned in indexer) == (
        ["indexer_k_sm90"] * 6 + ["indexer_q_sm90"] * 8
    )
    assert {planned.reasons for planned in indexer} == {
        ("indexer (64 heads of 128) on sm_90a, TP 1/8",)
    }


def test_an_indexer_that_no_kernel_is_for_is_named():
    model = read_model(CONFIGS / "deepseek-v4-defaults.json")
    for change, why in (
        (
            {"index_head_dim": 100},
            "its kernels take head sizes 32 to 512, multiples of 32, not 100",
        ),
        ({"dtype": "float16"}, "its kernels take bf16, not fp16"),
        ({"index_n_heads": 70000}, "its kernels take up to 65535 heads, not 70000"),
    ):
        found = plan_warmup({**model, **change}, ["sm_90a"], "fp8")
        (line,) = [line for line in found.unserved if line.startswith("indexer (")]
        assert line.endswith(why)


@pytest.mark.parametrize("model_type", ("minimax_m3_vl_text", "deepseek_v32", "glm_moe_dsa"))
def test_fields_of_another_models_indexer_plan_none_of_ours(model_type):
    model = read_model(CONFIGS / "llama-3.1-8b.json")
    plain = plan_warmup(model, ["sm_90a"], "fp8")
    types = {"layer_types": ["full_attention"] * 32, "head_dim": 128}
    indexer = {"model_type": model_type, "index_n_heads": 64, "index_head_dim": 128, **types}
    found = plan_warmup({**model, **indexer}, ["sm_90a"], "fp8")
    assert found.units == plain.units
    assert found.unserved == (
        "indexer (64 heads of 128) on sm_90a, TP 1: "
        f"that of model_type {model_type!r} is not known here",
    )


@pytest.mark.parametrize(
    ("tp_size", "message"),
    (
        (0, "tp_sizes: got 0"),
        (-1, "tp_sizes: got -1"),
        (1.0, "tp_sizes: got 1.0"),
        (3, "3 devices cannot share 64 query and 8 KV heads"),
    ),
)
def test_sizes_that_cannot_be(tp_size, message):
    with pytest.raises(ValueError, match=message):
        plan("llama-3-70b", tp_sizes=[tp_size])


@pytest.mark.parametrize("tp_size", (0, -1, 3, 1000))
def test_sizes_that_cannot_be_with_layers_that_are_not_known(tp_size):
    with pytest.raises(ValueError, match="tp_sizes: .*64 query heads|tp_sizes: got"):
        plan("deepseek-v4-defaults", tp_sizes=[tp_size])


def test_a_page_that_no_kernel_reads_is_named_and_the_others_are_planned():
    found = plan("llama-3-70b", page_sizes=(16, 17))
    assert found.units == plan("llama-3-70b", page_sizes=(16,)).units != ()
    (line,) = found.unserved
    assert "page size 17" in line and "page size 16" not in line
    none = plan("llama-3-70b", page_sizes=(17, 18))
    (line,) = none.unserved
    assert not none.units and "page size 17" in line and "page size 18" in line


def test_a_device_has_one_compile_target():
    """As for `explain`, which says what the device is served with."""
    assert plan("llama-3-70b", architectures=["sm_90"]) == plan("llama-3-70b")
    assert plan("llama-3-70b", architectures=["sm_90", "sm_90a"]) == plan("llama-3-70b")
