"""What the stores and their readers refuse, and how they say it; a refusal writes nothing."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.reference.store import gather_kv, reshape_and_cache, split_nvfp4

U8 = torch.uint8


def call(**changes) -> None:
    """A valid nvfp4 store, but for the changes."""
    x = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    arguments = {
        "key": x,
        "value": x,
        "key_cache": torch.zeros(4, 8, 2, 36, dtype=U8),
        "value_cache": torch.zeros(4, 8, 2, 36, dtype=U8),
        "slot_mapping": torch.tensor([0, 1, 2]),
        "kv_cache_dtype": "nvfp4",
        "k_scale": 1.0,
        "v_scale": 1.0,
    }
    arguments.update(changes)
    try:
        reshape_and_cache(**arguments)
    except ValueError:
        for name in ("key_cache", "value_cache"):
            assert not arguments[name].float().any(), f"{name} was written"
        raise


def both(name: str, value: object) -> dict[str, object]:
    """The same value for K and V."""
    k, v = {"x": ("key", "value"), "cache": ("key_cache", "value_cache")}[name]
    return {k: value, v: value}


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=U8)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def overlapping(cache: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sides that have all blocks but one in common."""
    return {"key_cache": cache[1:], "value_cache": cache[:-1]}


def padded_rows() -> torch.Tensor:
    return zeros(4, 8, 2, 40)[..., :36]


EXPANDED = zeros(1, 8, 2, 36).expand(4, 8, 2, 36)


def test_two_sides_of_one_allocation_are_no_aliases():
    for sides in (zeros(4, 2, 8, 2, 36).unbind(1), zeros(2, 4, 8, 2, 36)):
        call(key_cache=sides[0], value_cache=sides[1])
        assert sides[0].any() and sides[1].any()
    empty = zeros(0, 8, 2, 36)
    call(key_cache=empty, value_cache=empty)


def test_the_valid_call_is_valid():
    call()
    call(v_scale_layout="sm100")


@pytest.mark.parametrize(
    ("message", "changes"),
    (
        (r"'nvfp4_4over'; accepted: .*mean 'nvfp4_4over6'", {"kv_cache_dtype": "nvfp4_4over"}),
        (r"'fp8_e5m2'; accepted", {"kv_cache_dtype": "fp8_e5m2"}),
        (r"v_scale_layout: got 'sm90'", {"v_scale_layout": "sm90"}),
        (
            r"v_scale_layout: got 'sm100'; fp8_e4m3 accepts 'linear'",
            {
                "kv_cache_dtype": "fp8",
                "v_scale_layout": "sm100",
                **both("cache", zeros(4, 8, 2, 64)),
            },
        ),
        (
            r"v_scale_layout: got 'sm100' for block_size 6",
            {"v_scale_layout": "sm100", **both("cache", zeros(4, 6, 2, 36))},
        ),
        (
            r"'sm100' for block_size 8 and D 32",
            {
                "v_scale_layout": "sm100",
                **both("x", ones(3, 2, 32)),
                **both("cache", zeros(4, 8, 2, 18)),
            },
        ),
        (r"key and value: got \(3, 2, 64\) and \(3, 2, 32\)", {"value": ones(3, 2, 32)}),
        (r"key and value: got \(3, 128\)", both("x", ones(3, 128))),
        (r"got torch.float32 and torch.float32", both("x", ones(3, 2, 64).float())),
        (r"got torch.float16 and torch.bfloat16", {"key": ones(3, 2, 64).half()}),
        (r"slot_mapping: got .* torch.int32", {"slot_mapping": torch.arange(3).int()}),
        (r"slot_mapping: got \(1, 3\)", {"slot_mapping": torch.arange(3)[None]}),
        (r"slot_mapping: got 4 slots, 3 tokens", {"slot_mapping": torch.arange(4)}),
        (r"accepted: one shape", {"value_cache": zeros(4, 4, 2, 36)}),
        (
            r"key_cache: got \(4, 8, 2, 64\); fp8_e4m3 accepts .* 2, 80\)",
            {
                "kv_cache_dtype": "fp8",
                **both("x", ones(3, 2, 80)),
                **both("cache", zeros(4, 8, 2, 64)),
            },
        ),
        (r"key_cache: got \(4, 8, 3, 36\)", both("cache", zeros(4, 8, 3, 36))),
        (r"rows of 64 bytes; nvfp4 has 9 D / 16", both("cache", zeros(4, 8, 2, 64))),
        (r"head size 72; nvfp4 accepts multiples of 16", both("x", ones(3, 2, 72))),
        (
            r"torch.float8_e4m3fn; nvfp4 accepts",
            both("cache", zeros(4, 8, 2, 36).view(torch.float8_e4m3fn)),
        ),
        (
            r"torch.bfloat16; fp8_e4m3 accepts",
            {"kv_cache_dtype": "fp8", **both("cache", 0 * ones(4, 8, 2, 64))},
        ),
        (r"value_cache: got .*the last one contiguous", {"value_cache": zeros(4, 8, 36, 2).mT}),
        (r"k_scale: got 0.0", {"k_scale": 0.0}),
        (r"v_scale: got 1e-50, 0.0 as float32", {"v_scale": 1e-50}),
        (r"v_scale: got 1e\+300, inf as float32", {"v_scale": 1e300}),
        (r"v_scale: got shape \(3,\)", {"v_scale": torch.ones(3)}),
        (r"k_scale: got shape \(3, 2\)", {"k_scale": torch.ones(3, 2)}),
        (r"v_scale: got shape \(1, 1\); accepted: \(\), \(1,\)", {"v_scale": torch.ones(1, 1)}),
        (r"k_scale: got an int too large", {"k_scale": 10**400}),
        (
            r"key: got meta; accepted: a tensor that has memory",
            both("x", ones(3, 2, 64).to("meta")),
        ),
        (r"^key_cache: got strides .*dense NHD or HND", {"key_cache": padded_rows()}),
        (r"^value_cache: got strides .*dense NHD or HND", {"value_cache": padded_rows()}),
        (r"k_scale: got dtype torch.float64", {"k_scale": torch.ones(1).double()}),
        (r"k_scale: got None", {"k_scale": None}),
        (r"key_cache and value_cache: got the same memory", both("cache", zeros(4, 8, 2, 36))),
        (r"key_cache and value_cache: got the same memory", overlapping(zeros(5, 8, 2, 36))),
        (r"value_cache: got strides \(0, .* do not share memory", {"value_cache": EXPANDED}),
    ),
)
def test_refusals(message, changes):
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize("name", ("key", "value"))
@pytest.mark.parametrize("side", ("key_cache", "value_cache"))
def test_what_is_stored_must_not_be_memory_of_the_cache(name, side):
    cache = zeros(4, 8, 2, 36)
    x = cache.view(-1)[: 3 * 2 * 64 * 2].view(torch.bfloat16).view(3, 2, 64)
    with pytest.raises(ValueError, match=f"{name}: got memory of the cache; accepted: memory"):
        call(**{name: x, side: cache})


def test_numbers_of_the_call_must_not_be_memory_of_the_cache():
    cache = zeros(4, 8, 2, 36)
    for name, x in (
        ("slot_mapping", cache.view(-1)[:24].view(torch.int64)),
        ("k_scale", cache.view(-1)[8:12].view(torch.float32)),
    ):
        with pytest.raises(ValueError, match=f"{name}: got memory of the cache"):
            call(**{"value_cache": cache, name: x})


def test_caches_behind_each_other_are_apart():
    """Of different strides between blocks, in one allocation; what is stored may lie between."""
    side = 8 * 2 * 36
    memory = zeros(4 * side + 4 * (side + 64))
    dense = memory[: 4 * side].view(4, 8, 2, 36)
    padded = memory[4 * side :].view(4, side + 64)[:, :side].unflatten(1, (8, 2, 36))
    gap = memory[4 * side + side :][:24].view(torch.int64)
    gap.copy_(torch.arange(3))
    call(key_cache=dense, value_cache=padded, slot_mapping=gap)
    assert dense.any() and padded.any()


def test_heads_of_keys_inside_rows_of_values_are_the_same_memory():
    """Both layouts are dense in their own order; only some of their elements are the same bytes."""
    memory = zeros(5000)
    k = memory.as_strided((2, 2, 2, 16), (256, 16, 32, 1), 1500)
    v = memory.as_strided((2, 2, 2, 16), (256, 64, 32, 1), 1404)
    with pytest.raises(ValueError, match="key_cache and value_cache: got the same memory"):
        call(**both("x", ones(3, 2, 16)), key_cache=k, value_cache=v, kv_cache_dtype="fp8")


def test_split_refuses_blocks_that_are_not_dense():
    padded_rows = zeros(2, 8, 3, 40)[..., :36]
    padded_heads = zeros(2, 8, 4, 36)[:, :, :3]
    interleaved = zeros(2, 8, 3, 72)[..., :36]
    for side in (padded_rows, padded_heads, interleaved):
        with pytest.raises(ValueError, match=r"side: got strides"):
            split_nvfp4(side)


def test_split_of_ambiguous_orders():
    """With one head or one token a block, NHD and HND are the same bytes, whatever the strides."""
    for tokens, heads in ((1, 3), (8, 1), (1, 1)):
        row = tokens * heads * 36
        memory = torch.arange(2 * row + 5).byte()
        strides = {n: s for n, s in zip((tokens, heads), (heads * 36, 36), strict=True) if n > 1}
        stride = (strides.get(tokens, 999), strides.get(heads, 777))
        side = memory.as_strided((2, tokens, heads, 36), (row, *stride, 1), 5)
        data, block_scale = split_nvfp4(side)
        first = memory[5 : 5 + tokens * heads * 32]
        assert torch.equal(data[0].flatten(), first)
        scales = memory[5 + tokens * heads * 32 : 5 + row]
        assert torch.equal(block_scale[0].view(U8).flatten(), scales)


def test_gather_refusals():
    fp8 = zeros(4, 8, 2, 64)
    slots = torch.tensor([0])
    for message, arguments in (
        (r"storage: got 'nvfp4_4over6'; accepted", (fp8, slots, "nvfp4_4over6", 1.0)),
        (r"slots: got 32; the cache has 32", (fp8, torch.tensor([32]), "fp8_e4m3", 1.0)),
        (r"slots: got .*int32", (fp8, slots.int(), "fp8_e4m3", 1.0)),
        (r"scale: got shape \(3,\)", (fp8, slots, "fp8_e4m3", torch.ones(3))),
        (r"rows of 64 bytes", (fp8, slots, "nvfp4", 1.0)),
    ):
        with pytest.raises(ValueError, match=message):
            gather_kv(*arguments)
    with pytest.raises(ValueError, match=r"scale_layout: got 'sm100' for block_size 3"):
        gather_kv(zeros(4, 3, 2, 36), slots, "nvfp4", 1.0, scale_layout="sm100")
