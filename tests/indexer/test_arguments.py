"""What the indexer functions refuse before any work, and how they say it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cute_kernels import compress_norm_rope_insert, fused_indexer_q_rope_quant
from cute_kernels.indexer.formats import INDEXER_FORMATS, BlockLayout, get_indexer_format
from tests.indexer.helpers import BF16, SENTINEL, KCall, KCase, q_arguments

K_CASE = KCase("default", "mxfp4", 4, 1, lengths=(9,))
# The next float32 after the largest would be 2^128; half way to it rounds to infinity.
LARGEST = float(np.finfo(np.float32).max)
HALF_WAY = 2.0**128 - 2.0**103


def q_call(**changes) -> None:
    arguments = q_arguments(torch.ones(3, 2, 128, dtype=BF16))
    fused_indexer_q_rope_quant(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    (
        ("index_q", None, "got a NoneType; accepted: a tensor"),
        ("index_q", torch.ones(3, 256, dtype=BF16), r"got torch.bfloat16 \(3, 256\); accepted: bf"),
        ("index_q", torch.ones(3, 2, 128), r"got torch.float32 \(3, 2, 128\); accepted: bfloat16"),
        ("index_q", torch.ones(3, 2, 48, dtype=BF16), "got head size 48; accepted: positive mult"),
        ("index_q", torch.ones(3, 2, 0, dtype=BF16), "got head size 0"),
        ("positions", torch.arange(3).int(), r"got torch.int32 \(3,\); accepted: int64 \(T,\)"),
        ("positions", torch.arange(4), r"got torch.int64 \(4,\)"),
        ("positions", [0, 1, 2], "got a list"),
        (
            "positions",
            torch.arange(3, device="meta"),
            "got meta; accepted: a tensor that has memory",
        ),
        ("positions", torch.tensor([0, 1, 7]), "got entries from 0 to 7; .*less than 7"),
        ("positions", torch.tensor([0, -1, 2]), "got entries from -1 to 2"),
        ("cos_sin_cache", torch.ones(9, 63), "got rope_dim 63; .*even, 2 to 128"),
        ("cos_sin_cache", torch.ones(9, 0), "got rope_dim 0"),
        ("cos_sin_cache", torch.ones(9, 130), "got rope_dim 130"),
        ("cos_sin_cache", torch.ones(9, 64).half(), "got torch.float16"),
        ("cos_sin_cache", torch.ones(64), r"got torch.float32 \(64,\)"),
        ("index_weights", torch.ones(3, 3), r"got torch.float32 \(3, 3\); .* \(3, 2\)"),
        ("index_weights", torch.ones(3, 2).double(), "got torch.float64"),
        ("softmax_scale", math.nan, "got nan; accepted: a number that is finite as float32"),
        ("head_scale", -math.inf, "got -inf"),
        ("head_scale", HALF_WAY, "got 3.40282356"),
        ("softmax_scale", 10**400, "got 1000"),
        ("softmax_scale", True, "got True"),
        ("softmax_scale", torch.tensor(1.0), "got tensor"),
        ("use_fp4", 1, "got 1; accepted: True, False"),
    ),
)
def test_refusals_of_q(name, bad, message):
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        q_call(**{name: bad})


def k_bad_caches() -> list[tuple[torch.Tensor, str]]:
    u8 = torch.uint8
    return [
        (torch.zeros(2, 8, 67, dtype=u8), r"got torch.uint8 \(2, 8, 67\); .*, 68\), mxfp4 rows"),
        (torch.zeros(2, 8, 132, dtype=u8), r"got torch.uint8 \(2, 8, 132\)"),
        (torch.zeros(2, 8, 68, dtype=torch.int8), "got torch.int8"),
        (torch.zeros(2, 8, 1, 68, dtype=u8), r"got torch.uint8 \(2, 8, 1, 68\)"),
        (torch.zeros(2, 8, 80, dtype=u8)[..., :68], r"got shape .*strides \(640, 80, 1\); .*dense"),
        (torch.zeros(2, 8, 136, dtype=u8)[..., ::2], r"got shape .*strides"),
        (torch.zeros(2, 0, 68, dtype=u8), "got shape"),
    ]


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    (
        *(("k_cache", *pair) for pair in k_bad_caches()),
        ("k_cache", None, "got a NoneType"),
        ("state_cache", torch.ones(3, 16, 384), r"got \(3, 16, 384\); .*F = 256, or 512 with over"),
        ("state_cache", torch.ones(3, 0, 512), r"got \(3, 0, 512\)"),
        ("state_cache", torch.ones(3, 16, 512, dtype=BF16), "got torch.bfloat16"),
        ("state_cache", torch.ones(3, 512), r"got torch.float32 \(3, 512\)"),
        ("token_to_seq", torch.zeros(10).long(), "got torch.int64"),
        ("token_to_seq", torch.zeros(9).int(), "got 9 entries, slot_mapping 10"),
        ("positions", torch.zeros(10).int(), "got torch.int32"),
        ("positions", torch.zeros(9).long(), "got 9 entries, slot_mapping 10"),
        ("slot_mapping", torch.zeros(10).int(), "got torch.int32"),
        ("slot_mapping", torch.zeros(2, 5).long(), r"got torch.int64 \(2, 5\)"),
        ("state_block_table", torch.zeros(1, 9).long(), "got torch.int64"),
        ("state_block_table", torch.zeros(9).int(), r"got torch.int32 \(9,\)"),
        ("norm_weight", torch.ones(100), "got head size 100"),
        ("norm_weight", torch.ones(128).half(), "got torch.float16"),
        ("norm_eps", -1e-6, "got -1e-06; accepted: 0 or more"),
        ("norm_eps", math.nan, "got nan"),
        ("norm_eps", None, "got None"),
        ("cos_sin_cache", torch.ones(9, 192), "got rope_dim 192"),
        ("compress_ratio", 0, "got 0; accepted: 1 to 1073741823"),
        ("compress_ratio", 10**30, "got 10000.*; accepted: 1 to 1073741823"),
        ("compress_ratio", 4.0, "got 4.0; accepted: an int"),
        ("compress_ratio", True, "got True"),
        ("cache_format", "fp8", "got 'fp8'; nearest: 'fp8_e4m3'.*; known: 'mxfp4', 'fp8_e4m3'"),
        ("cache_format", "nvfp4", "got 'nvfp4'"),
        ("cache_format", None, "got None"),
    ),
)
def test_refusals_of_k(name, bad, message):
    call = KCall(K_CASE)
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        compress_norm_rope_insert(**call.arguments | {name: bad})
    assert (call.memory == SENTINEL).all()


def test_blocks_must_not_share_memory():
    call = KCall(K_CASE)
    shape = call.arguments["k_cache"].shape
    row = shape[1] * shape[2]
    sliding = torch.zeros(4 * row, dtype=torch.uint8).as_strided(shape, (row - 1, shape[2], 1))
    for cache in (sliding, torch.zeros(1, *shape[1:], dtype=torch.uint8).expand(shape)):
        with pytest.raises(ValueError, match="^k_cache: got strides .*; accepted: blocks that do"):
            compress_norm_rope_insert(**call.arguments | {"k_cache": cache})
        assert not cache.any()


@pytest.mark.parametrize(
    "name", ("state_cache", "cos_sin_cache", "norm_weight", "positions", "slot_mapping")
)
def test_the_cache_must_not_be_memory_that_is_read(name):
    call = KCall(K_CASE)
    read, shape = call.arguments[name].contiguous(), call.arguments["k_cache"].shape
    size = read.numel() * read.element_size()
    memory = torch.zeros(size + math.prod(shape), dtype=torch.uint8)
    memory[:size] = read.view(-1).view(torch.uint8)
    inside = memory[:size].view(read.dtype).view(read.shape)
    cache = memory[: math.prod(shape)].view(shape)
    behind = memory[size:].view(shape)
    with pytest.raises(ValueError, match=f"^k_cache: got memory of {name}; accepted: memory apart"):
        compress_norm_rope_insert(**call.arguments | {name: inside, "k_cache": cache})
    assert torch.equal(memory[:size], read.view(-1).view(torch.uint8))
    compress_norm_rope_insert(**call.arguments | {name: inside, "k_cache": behind})
    assert behind.any()


def test_a_ratio_that_nothing_reaches_allocates_nothing():
    call = KCall(K_CASE)
    call.run(compress_ratio=2**30 - 1)
    assert (call.memory == SENTINEL).all()


def test_tensors_of_one_device():
    call = KCall(K_CASE)
    for name in ("norm_weight", "k_cache", "slot_mapping"):
        elsewhere = {name: call.arguments[name].to("meta")}
        with pytest.raises(ValueError, match=f"^{name}: got meta; accepted: cpu, as state_cache"):
            compress_norm_rope_insert(**call.arguments | elsewhere)


def test_host_numbers_at_the_edge_of_float32():
    for value in (LARGEST, np.nextafter(HALF_WAY, 0.0).item(), -LARGEST, 0, 0.0, 2.0**-149, 1e-60):
        q_call(softmax_scale=value, head_scale=value)
    KCall(K_CASE).run(norm_eps=0)


def test_strides_that_say_nothing():
    """One token a block: the stride between tokens does not matter."""
    call = KCall(replace(K_CASE, block_size=1))
    cache = call.arguments["k_cache"]
    odd = cache.as_strided(cache.shape, (cache.stride(0), 7, 1), cache.storage_offset())
    np.testing.assert_array_equal(call.run(k_cache=odd), call.expected())


# ---- formats -----------------------------------------------------------------------------------


def test_bytes_of_a_row():
    parts = {name: storage.row_parts(128) for name, storage in INDEXER_FORMATS.items()}
    assert parts == {"mxfp4": (64, 4), "fp8_e4m3": (128, 4)}
    assert get_indexer_format("mxfp4").row_bytes(64) == 34
    assert {storage.layout for storage in INDEXER_FORMATS.values()} == {BlockLayout.PLANAR}
    assert all(name == storage.name for name, storage in INDEXER_FORMATS.items())
    for size in (0, -32, 100):
        with pytest.raises(ValueError, match=f"head_size: got head size {size}"):
            get_indexer_format("mxfp4").row_parts(size)
    for name in ("MXFP4", "mxfp4 ", "mx", None, 4):
        with pytest.raises(ValueError, match="cache_format: got .*known: 'mxfp4', 'fp8_e4m3'"):
            get_indexer_format(name)
