"""Host side of the store kernels: routing, what can run, launch arguments. No GPU."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import cute_kernels
from cute_kernels import arch, reshape_and_cache
from cute_kernels.arch import TARGETS, DeviceArch
from cute_kernels.formats import KV_CACHE_DTYPES, ScaleSearch
from cute_kernels.prepared import PreparedCalls
from cute_kernels.reference import store as reference
from cute_kernels.registry import store_contract, store_table_markdown
from cute_kernels.store import config, interface, op
from tests.store.pools import NVFP4_POOLS, Pool
from tests.store.test_store_arguments import overlapping
from tests.test_house import README, between


def store_call(
    heads: int = 2, head_size: int = 64, dtype: str = "nvfp4", **changes
) -> op.StoreCall:
    x = torch.ones(3, heads, head_size, dtype=torch.bfloat16)
    storage = KV_CACHE_DTYPES[dtype].storage
    row = head_size if storage == "fp8_e4m3" else head_size * 9 // 16
    cache = torch.zeros(4, 8, heads, row, dtype=torch.uint8)
    slots = torch.arange(3)
    call = op.StoreCall(x, x, cache, cache.clone(), slots, dtype, 1.0, 1.0, "linear", storage)
    return call._replace(**changes)


def on_a_gpu(call: op.StoreCall) -> op.StoreCall:
    """The call, its key claiming to be on cuda:0."""
    key = SimpleNamespace(
        device=torch.device("cuda:0"),
        shape=call.key.shape,
        dtype=call.key.dtype,
        stride=call.key.stride,
        element_size=call.key.element_size,
    )
    return call._replace(key=key)


@pytest.fixture
def sm90(monkeypatch):
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))


# ---- what runs ---------------------------------------------------------------------------------


def test_cpu_tensors_take_the_reference():
    pool = NVFP4_POOLS[0]
    x = torch.randn(5, pool.heads, pool.head_size).half()
    memories = []
    for function in (reshape_and_cache, reference.reshape_and_cache):
        memories.append(pool.allocate())
        sides = [pool.side(memories[-1], side) for side in (0, 1)]
        assert function(x, x.flip(0), *sides, torch.arange(5), "nvfp4_mse", 0.1, 0.2) is None
    assert torch.equal(*memories)
    assert op.can_run(store_call()) == "tensors are on cpu, the kernels run on cuda"


def test_public_names():
    for name in ("split_nvfp4", "quantize_nvfp4", "dequantize_nvfp4", "quantize_mxfp4"):
        assert getattr(cute_kernels, name) is getattr(reference, name)
    assert cute_kernels.reshape_and_cache is interface.reshape_and_cache


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), *sorted(TARGETS), (12, 1)])
def test_architectures(monkeypatch, capability):
    """Those of the contract and no others; a refusal names the device's."""
    target = TARGETS.get(capability, "sm_other")
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch(capability, target, 132))
    call = on_a_gpu(store_call())
    reason = op.can_run(call)
    assert (reason is None) == (target in store_contract().architectures)
    if reason is not None:
        monkeypatch.setattr(op, "run", lambda call: pytest.fail("launched"))
        message = rf"no kernel for this call \(compute capability {capability[0]}\.{capability[1]},"
        with pytest.raises(NotImplementedError, match=message):
            interface._run(call)


def test_head_sizes(sm90):
    sizes = [d for d in range(8, 700, 8) if op.can_run(on_a_gpu(store_call(1, d, "fp8"))) is None]
    assert sizes == list(range(16, 700, 16))
    assert set(config.HEAD_SIZES) <= set(sizes)


def test_what_does_not_fit_32_bits(sm90):
    cache = torch.zeros(1, dtype=torch.uint8).expand(1 << 20, 1 << 12, 2, 36)
    reason = op.can_run(on_a_gpu(store_call(key_cache=cache, value_cache=cache)))
    assert reason == f"{1 << 32} slots, the kernels count to 2^31"
    slots = torch.zeros(1, dtype=torch.int64).expand(1 << 30)
    reason = op.can_run(on_a_gpu(store_call(slot_mapping=slots)))
    assert reason == "more than 2^31 groups of 16 elements"
    x = torch.empty_strided((3, 2, 64), (1 << 30, 64, 1), dtype=torch.bfloat16, device="meta")
    for name in ("key", "value"):
        call = store_call(**{name: x})
        assert op.can_run(on_a_gpu(call)).startswith(f"{name} with strides ")
    for token, refused in ((1 << 31, True), (72, False)):  # pages may be far apart, tokens not
        strides = (1 << 40, token, 36, 1)
        far = torch.empty_strided((4, 8, 2, 36), strides, dtype=torch.uint8, device="meta")
        reason = op.can_run(on_a_gpu(store_call(value_cache=far)))
        assert (reason is not None and "value_cache with strides" in reason) == refused


def test_refusals_name_the_argument_and_write_nothing():
    x = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    cache = torch.zeros(4, 8, 2, 36, dtype=torch.uint8)
    arguments = [x, x, cache, cache.clone(), torch.arange(3), "nvfp4", 1.0, 1.0]
    for place, bad, message in (
        (0, None, "key: got a NoneType"),
        (4, [0, 1, 2], "slot_mapping: got a list"),
        (5, "nvfp4_foo", "kv_cache_dtype: got 'nvfp4_foo'"),
        (6, 1e300, "k_scale: got 1e\\+300, inf as float32"),
        (7, torch.ones(1, device="meta"), "tensors: got meta and cpu"),
        (3, cache.to("meta"), "value_cache: got meta; accepted: a tensor that has memory"),
    ):
        changed = [*arguments[:place], bad, *arguments[place + 1 :]]
        with pytest.raises(ValueError, match=message):
            reshape_and_cache(*changed)
    assert not cache.any() and not arguments[3].any()


# ---- launch arguments --------------------------------------------------------------------------


def unsigned(n: int) -> int:
    return n & 0xFFFFFFFF


def divide(n: int, by: tuple[int, int, int]) -> int:
    """`kernel.divided`, in unsigned 32-bit arithmetic."""
    _, magic, shift = by
    return (unsigned(2 * n) * unsigned(magic) >> 32) >> shift


def test_division_by_multiplication():
    generator = random.Random(0)
    ends = (1 << 30, (1 << 30) + 1, (1 << 31) - 1)
    for d in (*range(1, 600), *(generator.randrange(1, 1 << 31) for _ in range(300)), *ends):
        by = op.divisor(d)
        assert -(1 << 31) <= by[1] < 1 << 31
        last = ((1 << 31) - 1) // d * d
        near = (0, 1, d - 1, d, 2 * d - 1, last - 1, last, (1 << 31) - 1)
        for n in (*near, *(generator.randrange(1 << 31) for _ in range(10))):
            if 0 <= n < 1 << 31:
                assert divide(n, by) == n // d, (n, d)


def operands(x: torch.Tensor, cache: torch.Tensor, scale, storage: str) -> tuple:
    """`kernel.Side` of a call."""
    return op.side_plan(x, cache, scale, storage).at(x.data_ptr(), cache.data_ptr(), scale)


@pytest.mark.parametrize("pool", NVFP4_POOLS, ids=lambda pool: pool.id)
def test_addresses_of_a_side(pool: Pool):
    """The kernel's address arithmetic on the launch arguments, against the byte map."""
    memory = pool.allocate()
    x = torch.zeros(3, pool.heads, pool.head_size).bfloat16()
    for side in (0, 1):
        values = operands(x, pool.side(memory, side), 1.0, "nvfp4")
        data, block_scale, page = values[3:6], values[6:9], values[9]
        for region, (at, token, head) in enumerate((data, block_scale)):
            for slot, h in ((0, 0), (pool.tokens + 3, pool.heads - 1)):
                offset = slot // pool.tokens * page + slot % pool.tokens * token + h * head
                expected = pool.offset(side, slot, h, region, 0)
                assert at - memory.data_ptr() + offset == expected


def test_operands_of_a_side():
    call = store_call(heads=3, dtype="fp8")
    x, cache = call.key, call.key_cache
    assert operands(x, cache, 0.25, "fp8_e4m3")[-4:] == (0, 0, 0.25, 1)
    one, per_head = torch.ones(1), torch.ones(6)[::2]
    assert operands(x, cache, one, "fp8_e4m3")[-4:-2] == (one.data_ptr(), 0)
    assert operands(x, cache, per_head, "fp8_e4m3")[-4:-2] == (per_head.data_ptr(), 8)
    assert operands(x, cache, one.expand(3), "fp8_e4m3")[-4:-2] == (one.data_ptr(), 0)
    odd = torch.zeros(4 * 8 * 3 * 64 + 1, dtype=torch.uint8)[1:].view(4, 8, 3, 64)
    assert operands(x, odd, 1.0, "fp8_e4m3")[-1] == 0
    alone = cache[:, :, :1].as_strided((4, 8, 1, 64), (cache.stride(0), cache.stride(1), 7, 1))
    assert operands(x, alone, 1.0, "fp8_e4m3")[-1] == 1, "the stride of one head says nothing"


def test_inputs_are_copied_only_where_they_must_be():
    wide = torch.zeros(4, 6, 2, 129, dtype=torch.bfloat16)
    for x in (wide[:, 1, :, :128].contiguous(), torch.zeros(4, 6, 2, 64).bfloat16()[:, 3]):
        assert op.aligned(x, 3) is x
    for x in (
        wide[:, 1, :, :128],
        wide[:, 1, :, :128:2],
        wide[:, 0, :, 1:129].contiguous()[..., 1:],
    ):
        copy = op.aligned(x, 3)
        assert copy.data_ptr() != x.data_ptr() and torch.equal(copy, x[:3])
        assert copy.data_ptr() % 16 == 0


class Counted:
    """How often a function was called."""

    def __init__(self, function) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


class Kernel:
    """In a kernel's place: what it is launched with."""

    def __init__(self) -> None:
        self.calls = []

    def __call__(self, slots, key, value, shape) -> None:
        self.calls.append((slots, key, value, shape))


@pytest.fixture
def kernel(monkeypatch, sm90):
    """CPU tensors are stored by this."""
    kernel = Kernel()
    monkeypatch.setattr(interface, "PREPARED", PreparedCalls())
    monkeypatch.setattr(op, "launcher", lambda unit: kernel)
    monkeypatch.setattr(op, "can_run", lambda call: None)
    monkeypatch.setattr(arch, "current_device", lambda: None)  # a CPU tensor's index
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(interface, "_run", op.run)
    return kernel


def test_the_second_call_launches_at_its_own_addresses(kernel, monkeypatch):
    call = store_call(k_scale=torch.ones(2), slot_mapping=torch.arange(3))
    reshape_and_cache(*call[:-1])
    checks = []
    monkeypatch.setattr(interface, "_check", lambda *call: checks.append(call) or "nvfp4")
    again = store_call(k_scale=torch.ones(2), slot_mapping=torch.arange(3))
    again = again._replace(key=again.key + 1, value_cache=again.value_cache.clone())
    reshape_and_cache(*again[:-1])
    assert not checks
    slots, key, value, shape = kernel.calls[1]
    assert slots is again.slot_mapping and shape == kernel.calls[0][3]
    assert key == operands(again.key, again.key_cache, again.k_scale, "nvfp4")
    assert value == operands(again.value, again.value_cache, 1.0, "nvfp4")
    shifted = torch.zeros(3 * 2 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 2, 64)
    for changes in (
        {"k_scale": 1.0}, {"k_scale": torch.ones(1)}, {"v_scale": 2.0}, {"v_scale": 1},
        {"kv_cache_dtype": "nvfp4_mse"}, {"slot_mapping": torch.arange(2)}, {"key": shifted},
        {"key": again.key.half(), "value": again.value.half()}, {"v_scale_layout": "sm100"},
        {"value_cache": again.key_cache}, overlapping(torch.zeros(5, 8, 2, 36, dtype=torch.uint8)),
    ):  # fmt: skip
        before = len(checks)
        reshape_and_cache(*again._replace(**changes)[:-1])
        assert len(checks) == before + 1, changes


def test_every_layer_of_a_model_is_a_second_call(kernel, monkeypatch):
    """Caches lie as far apart as the allocator put them."""
    monkeypatch.setattr(interface, "_check", checked := Counted(interface._check))
    for distance in range(1, 9):
        sides = torch.zeros(distance + 1, 4, 8, 2, 36, dtype=torch.uint8)
        call = store_call(key_cache=sides[0], value_cache=sides[-1])
        reshape_and_cache(*call[:-1])
    assert checked.calls == 1 and len(kernel.calls) == 8


def test_long_calls_store_both_sides_a_thread():
    few, many = (op._shape(store_call(), n, 32, 132)[-1] for n in (100, 50_000))
    assert (few, many) == (0, 1)


# ---- what is declared --------------------------------------------------------------------------


def test_variants_are_what_the_contract_declares():
    contract = store_contract()
    for target in contract.architectures:
        table = config.support_table(target)
        assert len({variant.name for variant in table}) == len(table)
        for dtype in contract.kv_cache_dtypes:
            for x_dtype in contract.x_dtypes:
                assert config.make_config(dtype, x_dtype, target) in table
    assert set(contract.kv_cache_dtypes) == set(reference._STORAGE)


def test_the_instruction_is_used_where_there_is_one():
    for target in config.TARGETS:
        for variant in config.support_table(target):
            wanted = variant.storage == "nvfp4" and target != "sm_90a"
            assert variant.e2m1_instruction == wanted


def test_searches():
    by_dtype = {v.kv_cache_dtype: v.searches for v in config.support_table("sm_90a")}
    four = ScaleSearch.FOUR_OVER_SIX
    assert by_dtype["nvfp4_4over6_k"] == (four, ScaleSearch.DEFAULT)
    assert by_dtype["nvfp4_4over6"] == (four, four)
    assert by_dtype["nvfp4"] == (ScaleSearch.DEFAULT,) * 2
    assert by_dtype["fp8_e4m3"] == (None, None)
    assert replace(config.support_table("sm_90a")[0], x_dtype="fp16").name.endswith("_fp16")


def test_the_readme_table_is_the_contract():
    table = store_table_markdown()
    assert between(README, "store-table") == table, f"paste this into README.md:\n{table}"


# ---- traced calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", (0.1, torch.tensor(0.1), torch.tensor([0.1, 0.2, 0.3])))
@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_a_compiled_call_stores_the_same(backend, scale):
    """K and V caches are views of one allocation, which functionalization must get right."""
    pool = NVFP4_POOLS[0]
    x = torch.randn(5, pool.heads, pool.head_size).bfloat16()
    memories = []

    def store(memory, key, value, slots):
        sides = [pool.side(memory, side) for side in (0, 1)]
        reshape_and_cache(key, value, *sides, slots, "nvfp4_4over6", scale, 0.2)

    torch._dynamo.reset()
    for function in (store, torch.compile(store, backend=backend, fullgraph=True)):
        memories.append(pool.allocate())
        function(memories[-1], x, x.flip(0), torch.arange(5))
    assert torch.equal(*memories)


def test_fake_tensors_and_gradients():
    call = store_call()
    with torch._subclasses.FakeTensorMode() as mode:
        tensors = [mode.from_tensor(x) for x in call[:5]]
        assert reshape_and_cache(*tensors, "nvfp4", 1.0, 1.0) is None
        with pytest.raises(ValueError, match="kv_cache_dtype"):
            reshape_and_cache(*tensors, "nvfp5", 1.0, 1.0)
    assert not call.key_cache.any()
    store = torch.compile(reshape_and_cache, backend="eager", fullgraph=True)
    key = call.key.clone().requires_grad_()
    for run in (store, reshape_and_cache):
        with pytest.raises(Exception, match="reshape_and_cache: key: got requires_grad=True"):
            run(key, call.value, *call[2:5], "nvfp4", 1.0, 1.0)
    assert not call.key_cache.any()
