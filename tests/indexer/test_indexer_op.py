"""The host side of the indexer's kernels, on CPU tensors that stand in for a GPU's."""

from __future__ import annotations

from typing import get_type_hints

import pytest
import torch

from cute_kernels import arch, compress_norm_rope_insert, fused_indexer_q_rope_quant
from cute_kernels.arch import DeviceArch
from cute_kernels.indexer import interface, op
from cute_kernels.indexer.arguments import check_k, check_q
from cute_kernels.indexer.config import (
    HEAD_SIZES,
    MAX_HEAD_SIZE,
    TARGETS,
    TURNS,
    k_config,
    k_support_table,
    q_config,
    q_support_table,
)
from cute_kernels.prepared import PreparedCalls
from cute_kernels.registry import indexer_contract, indexer_table_markdown
from cute_kernels.store.op import aligned
from tests.indexer.helpers import BF16, KCall, KCase, q_arguments
from tests.indexer.test_q import queries
from tests.test_house import README, between

CASE = KCase("default", "mxfp4", 4, 1, lengths=(21, 8))


class Recorder:
    """A launch function that keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *groups) -> None:
        self.calls.append(groups)


class Compiled(dict):
    """{kernel: (variant, recorder)}; claims: memory for them, by its number of words."""

    claims: dict[int, torch.Tensor]


@pytest.fixture
def compiled(monkeypatch):
    """What is compiled, on a device of 132 SMs."""
    found = Compiled()
    found.claims = {}

    def zeros(device, stream, count):
        return found.claims.setdefault(count, torch.zeros(count, dtype=torch.int32))

    def stand_in(kernel, config, device, target):
        return found.setdefault(kernel, (config, Recorder()))[1]

    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 132))
    monkeypatch.setattr(arch, "current_device", lambda: None)
    monkeypatch.setattr(op, "_compiled", stand_in)
    monkeypatch.setattr(op, "current_stream", lambda index: 7)
    monkeypatch.setattr(op, "counters_for", zeros)
    return found


def checked_q(arguments: dict, use_fp4: bool = True):
    return check_q(**arguments, use_fp4=use_fp4)


def fits(values, kind) -> bool:
    """Whether nested numbers have the shape of a NamedTuple of DSL numbers."""
    hints = get_type_hints(kind)
    return len(values) == len(hints) and all(
        fits(value, hint) if hasattr(hint, "_fields") else isinstance(value, (int, float))
        for value, hint in zip(values, hints.values(), strict=True)
    )


# ---- Q -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_fp4", (True, False))
def test_a_launch_of_q(compiled, use_fp4):
    from cute_kernels.indexer import q_kernel

    arguments = q_arguments(queries(5, 64, 128))
    call = checked_q(arguments, use_fp4)
    launch = op.prepare_q(call)
    codes, scales, weights = launch.go(*call[:4])
    config, recorder = compiled["indexer_q_sm90"]
    assert config == q_config(call.cache_format, 128, 32, 5 * 64 / 132, "sm_90a")
    ((mWeights, *groups),) = recorder.calls
    assert mWeights is weights and weights.shape == (5, 64)
    kinds = (q_kernel.Addresses, q_kernel.Strides, q_kernel.Sizes, q_kernel.Factors)
    assert all(fits(group, kind) for group, kind in zip(groups, kinds, strict=True))
    at = q_kernel.Addresses(*groups[0], *[0] * (len(q_kernel.Addresses._fields) - len(groups[0])))
    assert (at.positions, at.q) == (call.positions.data_ptr(), call.index_q.data_ptr())
    assert at.codes == codes.data_ptr()
    assert at.scales == (scales.data_ptr() if use_fp4 else 0)
    assert groups[3] == (call.softmax_scale, call.head_scale)
    assert codes.dtype is (torch.uint8 if use_fp4 else torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("head_size", "rope_dim", "lanes", "early", "partly"),
    ((32, 2, 4, 1, 1), (64, 32, 4, 0, 0), (96, 32, 8, 0, 0), (96, 96, 8, 1, 0), (128, 64, 8, 0, 0),
     (128, 66, 8, 1, 0), (160, 10, 16, 0, 1), (288, 286, 32, 1, 0), (512, 64, 32, 0, 1)),
)  # fmt: skip
def test_lanes_of_a_head(compiled, head_size, rope_dim, lanes, early, partly):
    from cute_kernels.indexer import q_kernel

    launch = op.prepare_q(checked_q(q_arguments(queries(3, 70, head_size), rope_dim)))
    sizes = q_kernel.Sizes(*launch.sizes)
    assert (1 << sizes.team, sizes.pairs) == (lanes, rope_dim // 2)
    assert (sizes.early, sizes.partly) == (early, partly)
    config = compiled["indexer_q_sm90"][0]
    assert config.fixed_sizes == ((head_size, rope_dim) == (128, 64))
    assert sizes.groups * 32 == head_size
    heads_of_cta = 128 // lanes
    assert (sizes.parts - 1) * heads_of_cta < 70 <= sizes.parts * heads_of_cta


def test_many_rows_share_rotations(compiled):
    for tokens, heads in ((131, 1), (132, 4)):
        launch = op.prepare_q(checked_q(q_arguments(queries(tokens, 64, 128))))
        assert compiled["indexer_q_sm90"][0].heads_per_thread == heads
        assert launch.sizes[5] == 64 // (16 * heads)
        compiled.clear()


def test_queries_are_copied_where_chunks_are_not_aligned(compiled):
    wide = queries(4, 3, 144)
    for x, same in (
        (wide[..., :128], True),
        (wide[..., 8:136], True),
        (wide[..., 1:129], False),
        (wide[..., ::2][..., :64], False),
        (torch.zeros(3, 4, 33, dtype=BF16)[..., 1:], False),
    ):
        queries_in = aligned(x, len(x))
        assert (queries_in is x) == same and torch.equal(queries_in, x)
    call = checked_q(q_arguments(wide[..., :128]))
    launch = op.prepare_q(call)
    assert launch.go(*call[:4]) is not None
    assert launch.go(call.positions, wide[..., 1:129], *call[2:4]) is None


# ---- K -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_format", ("mxfp4", "fp8_e4m3"))
@pytest.mark.parametrize("ratio", (4, 128))
def test_a_launch_of_k(compiled, ratio, cache_format):
    from cute_kernels.indexer import k_kernel

    case = KCase("case", cache_format, ratio, int(ratio == 4), lengths=(300, 9))
    call = check_k(**KCall(case).arguments)
    op.prepare_k(call).go(*interface._k_tensors(call))
    config, recorder = compiled["indexer_k_sm90"]
    assert config == k_config(cache_format, 128, 8 if ratio == 4 else 128, "sm_90a")
    ((slots, *groups),) = recorder.calls
    assert slots is call.slot_mapping
    kinds = (
        k_kernel.Tokens, k_kernel.Claims, k_kernel.State, k_kernel.Rotary, k_kernel.Norm,
        k_kernel.Cache,
    )  # fmt: skip
    assert all(fits(group, kind) for group, kind in zip(groups, kinds, strict=True))
    state = k_kernel.State(*groups[2])
    assert (state.window, state.late_rows) == (8 if ratio == 4 else 128, ratio)
    assert (state.vector, state.element) == (1, 4)
    # Blocks at odd addresses, as KCall has them.
    assert k_kernel.Cache(*groups[5]).aligned == 0


def test_states_that_do_not_allow_16_byte_loads_have_a_variant_of_their_own(compiled):
    call = check_k(**KCall(CASE).arguments)
    launch = op.prepare_k(call)
    assert not compiled.pop("indexer_k_sm90")[0].loop
    tensors = list(interface._k_tensors(call))
    assert launch.go(*tensors)
    room = torch.zeros(call.state_cache.numel() + 1)
    tensors[0] = room[1:].view(call.state_cache.shape)
    assert not launch.go(*tensors)
    launch = op.prepare_k(call._replace(state_cache=tensors[0]))
    assert compiled["indexer_k_sm90"][0].loop and launch.go(*tensors)


def test_tokens_are_dealt_to_what_is_resident(compiled):
    """As many spans as there is room for: a CTA an SM."""
    for ratio, count, span in ((4, 132, 1), (4, 133, 2), (128, 132, 1), (128, 265, 3)):
        case = KCase("case", "mxfp4", ratio, int(ratio == 4), lengths=(count - 1,))
        launch = op.prepare_k(check_k(**KCall(case).arguments))
        assert launch.tokens[:2] == (count, span)
        compiled.clear()


@pytest.mark.parametrize(
    "count, buckets", ((257, 2048), (1024, 4096), (4097, 16384), (9000, 32768))
)
def test_memory_for_claims(compiled, count, buckets):
    """A word for each CTA and two tables."""
    case = KCase("case", "mxfp4", 4, 1, lengths=(9000,))
    arguments = KCall(case).arguments
    call = check_k(**arguments | {"slot_mapping": arguments["slot_mapping"][:count]})
    op.prepare_k(call).go(*interface._k_tensors(call))
    ((_, tokens, claims, *_),) = compiled["indexer_k_sm90"][1].calls
    assert claims == (compiled.claims[TURNS + 2 * buckets].data_ptr(), buckets)
    assert -(-tokens[0] // tokens[1]) <= TURNS


def test_calls_that_each_cta_looks_at_as_a_whole_claim_nothing(compiled):
    for ratio, threads in ((4, 256), (128, 512)):
        case = KCase("case", "mxfp4", ratio, int(ratio == 4), lengths=(threads - 1,))
        call = check_k(**KCall(case).arguments)
        op.prepare_k(call).go(*interface._k_tensors(call))
        config, recorder = compiled.pop("indexer_k_sm90")
        assert (config.threads, recorder.calls[0][2]) == (threads, (0, 0))
        assert config.buckets(threads + 1) > 0 and not compiled.claims


def test_tables_are_at_most_half_full():
    config = k_config("mxfp4", 128, 8, "sm_90a")
    for tokens in range(config.threads + 1, 40_000, 7):
        buckets = config.buckets(tokens)
        assert 2 * tokens <= buckets < 8 * tokens and buckets & (buckets - 1) == 0


def test_a_gpu_of_many_sms_has_no_more_ctas_than_words(compiled, monkeypatch):
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((9, 0), "sm_90a", 400))
    call = check_k(**KCall(KCase("case", "mxfp4", 4, 1, lengths=(4096,))).arguments)
    count, span = op.prepare_k(call).tokens[:2]
    assert TURNS - 64 < -(-count // span) <= TURNS


# ---- both ----------------------------------------------------------------------------------------


def test_the_second_call_is_not_checked_again(compiled, monkeypatch):
    monkeypatch.setattr(op, "why_not", lambda call: None)
    for name in ("_PREPARED_Q", "_PREPARED_K"):
        monkeypatch.setattr(interface, name, PreparedCalls())
    q = q_arguments(queries(5, 64, 128)) | {"use_fp4": True}
    k = KCall(CASE).arguments
    fused_indexer_q_rope_quant(**q)
    compress_norm_rope_insert(**k)
    checks = []
    monkeypatch.setattr(interface, "check_q", lambda *a: checks.append("q") or check_q(*a))
    monkeypatch.setattr(interface, "check_k", lambda *a: checks.append("k") or check_k(*a))
    fresh = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in q.items()}
    assert fused_indexer_q_rope_quant(**fresh)[0].shape == (5, 64, 64)
    compress_norm_rope_insert(**k)
    assert checks == []
    assert compiled["indexer_q_sm90"][1].calls[1][1][1] == fresh["index_q"].data_ptr()
    fused_indexer_q_rope_quant(**q | {"head_scale": 2.0})
    compress_norm_rope_insert(**k | {"slot_mapping": k["slot_mapping"][:-1]})
    assert checks == ["q", "k"]
    with pytest.raises(ValueError, match="index_weights: got"):
        fused_indexer_q_rope_quant(**q | {"index_weights": q["index_weights"].half()})


def test_empty_calls_launch_nothing(compiled, monkeypatch):
    monkeypatch.setattr(op, "why_not", lambda call: None)
    q = q_arguments(torch.zeros(0, 64, 128, dtype=BF16))
    assert fused_indexer_q_rope_quant(**q)[1] is None
    k = KCall(CASE).arguments
    compress_norm_rope_insert(**k | {"slot_mapping": k["slot_mapping"][:0]})
    compress_norm_rope_insert(**k | {"k_cache": k["k_cache"][:0]})
    assert compiled == {}


class OnGpu:
    type, index = "cuda", 0


def on_gpu(call):
    """The call with positions that say they are on a GPU."""

    class Positions:
        device = OnGpu

    return call._replace(positions=Positions())


@pytest.mark.parametrize("target", (*TARGETS, "sm_80"))
def test_why_not(monkeypatch, target):
    q, k = checked_q(q_arguments(queries(3, 2, 128))), check_k(**KCall(CASE).arguments)
    for call in (q, k):
        assert "tensors are on cpu" in op.why_not(call)
    monkeypatch.setattr(op, "device_arch", lambda index: DeviceArch((8, 0), target, 108))
    served = target in indexer_contract().architectures
    for call in (q, k):
        assert (op.why_not(on_gpu(call)) is None) == served
    if not served:
        return
    wide = checked_q(q_arguments(queries(1, 1, MAX_HEAD_SIZE + 32)))
    assert "head size 544" in op.why_not(on_gpu(wide))
    assert "without any position" in op.why_not(
        on_gpu(q._replace(cos_sin_cache=q.cos_sin_cache[:0]))
    )
    for name in ("state_cache", "state_block_table"):
        assert f"{name} is empty" in op.why_not(on_gpu(k._replace(**{name: getattr(k, name)[:0]})))


@pytest.mark.parametrize("target", TARGETS)
def test_the_support_tables_have_what_calls_ask_for(target):
    q, k = set(q_support_table(target)), set(k_support_table(target))
    for cache_format in ("mxfp4", "fp8_e4m3"):
        for rows in (0.1, 63, 64, 1e6):
            for size in ((128, 32), (128, 31), (96, 32)):
                assert q_config(cache_format, *size, rows, target) in q
        for head_size in HEAD_SIZES:
            for window in (1, 8, 32, 33, 128, 4096):
                config = k_config(cache_format, head_size, window, target)
                assert config in k
                assert config.vectors * 128 >= head_size
                assert config.shared_bytes <= 99 * 1024
    assert len({config.name for config in q | k}) == len(q) + len(k)


def test_the_readme_has_the_table():
    table = indexer_table_markdown()
    assert between(README, "indexer-table") == table, f"paste this into README.md:\n{table}"
