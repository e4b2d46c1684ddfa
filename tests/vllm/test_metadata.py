"""The metadata builder, CUDA-graph support, warmup units and what the log says."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.warmup import cutedsl_warmup
from vllm.v1.attention.backend import AttentionCGSupport

from cute_kernels import compile_cache
from cute_kernels.attention.decode_sm90 import op
from cute_kernels.compile.key import compile_key
from kvcache.integrations.vllm import logger, metadata
from kvcache.integrations.vllm.counters import Counters
from kvcache.integrations.vllm.metadata import CuteMetadataBuilder
from tests.vllm.helpers import batch, layer, vllm_config

CPU = torch.device("cpu")
TABLE = torch.tensor([[3, 1, -1, -1], [0, -1, -1, -1]])


@pytest.fixture
def builder():
    config = vllm_config()
    made = layer(config, heads=(32, 4), head_size=512)
    return CuteMetadataBuilder(made.get_kv_cache_spec(config), [made.layer_name], config, CPU)


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    return caplog


def give_model(monkeypatch, builder, dtype: torch.dtype) -> None:
    """The fields of a configuration with a model that the warmup reads."""
    layers = builder.vllm_config.compilation_config
    model = SimpleNamespace(dtype=dtype)
    found = SimpleNamespace(
        model_config=model,
        compilation_config=layers,
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        cache_config=builder.vllm_config.cache_config,
    )
    monkeypatch.setattr(builder, "vllm_config", found)


def test_uniform_batches_are_what_graphs_may_replay(builder):
    """A graph is right for queries up to the longest of its capture; vLLM captures mixed batches
    with queries of one token and replays them with longer ones."""
    support = CuteMetadataBuilder.get_cudagraph_support(builder.vllm_config, builder.kv_cache_spec)
    assert support is AttentionCGSupport.UNIFORM_BATCH


def test_metadata_is_vllms_tensors_themselves(builder):
    common = batch([2, 1], [70, 30], TABLE, 64)
    built = builder.build(0, common)
    assert built.block_table is common.block_table_tensor
    assert built.seq_lens is common.seq_lens
    assert built.query_start_loc is common.query_start_loc
    assert built.slot_mapping is common.slot_mapping
    assert (built.num_actual_tokens, built.max_query_len, built.max_seq_len) == (3, 2, 70)
    assert built.block_size == 64


def test_a_captured_batch_allows_what_the_block_table_can_hold(builder):
    common = batch([1, 1], [1, 1], TABLE, 64)
    assert builder.build(0, common).max_seq_len == 1
    assert builder.build_for_cudagraph_capture(common).max_seq_len == 4 * 64
    longer = common.replace(max_seq_len=1000)
    assert builder.build_for_cudagraph_capture(longer).max_seq_len == 1000


def test_another_block_table_leaves_the_first_metadata_as_it_was(builder):
    built = builder.build(0, batch([1, 1], [70, 30], TABLE, 64))
    other, slots = TABLE.int() + 1, torch.tensor([5, 6])
    updated = builder.update_block_table(built, other, slots)
    assert updated.block_table is other and updated.slot_mapping is slots
    assert built.block_table is not other
    assert updated.seq_lens is built.seq_lens


def test_batches_that_are_not_causal_are_refused(builder):
    common = batch([1, 1], [70, 30], TABLE, 64)
    for causal in (False, torch.tensor([1, 0], dtype=torch.int32)):
        with pytest.raises(NotImplementedError, match="not causal"):
            builder.build(0, common.replace(causal=causal))
    with pytest.raises(NotImplementedError, match="bidirectional"):
        builder.build(0, common.replace(mm_req_doc_ranges={0: [(1, 5)]}))


def test_vllms_warmup_finds_every_variant_of_the_layers(builder, monkeypatch):
    made = []
    monkeypatch.setattr(compile_cache, "warmup", made.extend)
    mine = [each for each in cutedsl_warmup._CUTEDSL_WARMUP_PROVIDERS if each is builder]
    assert mine == [builder]
    monkeypatch.setattr(cutedsl_warmup, "_CUTEDSL_WARMUP_PROVIDERS", mine)
    assert list(cutedsl_warmup._iter_cutedsl_warmup_compile_units()) == []  # no GPU, no kernels
    builder.device = torch.device("cuda")
    give_model(monkeypatch, builder, torch.bfloat16)
    units = cutedsl_warmup._collect_unique_compile_units(
        [*cutedsl_warmup._iter_cutedsl_warmup_compile_units()] * 2
    )
    decode = {unit.name for unit in units if unit.name.startswith("decode_sm90")}
    assert decode == {
        f"decode_sm90_fp8_e4m3_d512_r{rows}_bf16_box64 for sm_90a" for rows in (8, 16, 32)
    }
    names = {unit.name for unit in units}
    assert "prefill_sm90_fp8_e4m3_d512_r64_bf16_box64 for sm_90a" in names
    assert "store_fp8_e4m3_bf16 for sm_90a" in names
    for unit in units:
        unit.compile()
    assert [unit.name for unit in made] == [unit.name for unit in units]


def test_the_units_are_what_launches_look_up(builder, monkeypatch):
    """A batch's variant, as the launch computes it, is among the units."""
    builder.device = torch.device("cuda")
    give_model(monkeypatch, builder, torch.float16)
    keys = {unit.key for unit in builder.get_cutedsl_warmup_compile_units()}
    for packed_rows in (8, 9, 40, 4096):
        launched = op._config(512, packed_rows, torch.float16, 64, "fp8_e4m3")
        assert compile_key(launched, "sm_90a") in keys


def test_the_log_names_the_kernel_of_each_layer_once(log):
    counters = Counters()
    for _ in range(2):
        counters.chosen("model.layers.3.self_attn.attn", "decode_sm90")
    counters.chosen("model.layers.4.self_attn.attn", "decode_sm90")
    lines = [record.getMessage() for record in log.records]
    assert lines == [
        f"cute_kernels: model.layers.{index}.self_attn.attn is served by decode_sm90"
        for index in (3, 4)
    ]
    assert counters.kernels == {"decode_sm90": 2}
    assert str(counters).startswith("layers served: 2 by decode_sm90; kernels loaded: ")


def test_kernels_that_a_batch_waited_for_are_in_the_log(log, monkeypatch):
    loaded = []
    monkeypatch.setattr(compile_cache, "loaded", lambda: tuple(loaded))
    monkeypatch.setattr(compile_cache, "compiled", lambda: tuple(loaded[2:]))
    counters = Counters()
    loaded += [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    counters.batch()
    counters.warmed_up()
    counters.batch()
    assert counters.late == 0
    assert [record.levelno for record in log.records] == [logging.INFO]
    loaded.append(SimpleNamespace(name="c for sm_90a"))
    counters.batch()
    counters.batch()
    (record,) = log.records[1:]
    assert record.levelno == logging.WARNING
    assert "a batch waited for c for sm_90a" in record.getMessage()
    assert "kernels loaded: 3, compiled here: 1, after warmup: 1" in record.getMessage()


def test_kernels_that_come_before_a_capture_are_not_late(log, monkeypatch):
    loaded = []
    monkeypatch.setattr(compile_cache, "loaded", lambda: tuple(loaded))
    counters = Counters()
    counters.warmed_up()
    loaded.append(SimpleNamespace(name="a"))
    counters.warmed_up()
    counters.batch()
    assert counters.late == 0
    assert {record.levelno for record in log.records} == {logging.INFO}


def test_every_batch_is_counted(builder, monkeypatch):
    seen = []
    fake = type("Fake", (), {"batch": lambda self: seen.append(1), "warmed_up": lambda self: None})
    monkeypatch.setattr(metadata, "COUNTERS", fake())
    builder.build(0, batch([1, 1], [70, 30], TABLE, 64))
    assert seen == [1]
