"""On the GPU: calls from bundles, frozen; replays against plans; several devices and threads."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from cute_kernels import compile_cache
from cute_kernels.compile import obtain
from cute_kernels.compile.cache import KernelCache
from kvcache.cli_common import read_model
from kvcache.warmup import plan_warmup
from tests.attention.helpers import check
from tests.cases import AttentionCase, make_inputs
from tests.compare import assert_bit_equal
from tests.compile_cache.helpers import ROOT
from tests.compile_cache.replay import Q_LENGTHS
from tests.kvcache.helpers import CONFIGS
from tests.requires import requires

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def keep_bundles(monkeypatch, fresh, given_bundles):
    """These tests use the caller's bundles; the user cache stays the empty one of `fresh`."""
    if given_bundles is not None:
        monkeypatch.setenv("CUTE_KERNELS_BUNDLE", given_bundles)


def case(**fields) -> AttentionCase:
    return AttentionCase(**{"id": "x", "kv_lens": (700, 64, 129), "q_lens": (1,) * 3, **fields})


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has made no call before."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_an_unplanned_call_after_freeze_is_a_named_error(monkeypatch):
    monkeypatch.delenv("CUTE_KERNELS_BUNDLE", raising=False)
    code = """
from cute_kernels import compile_cache, flash_attn_varlen_func
from tests.cases import AttentionCase, make_inputs
inputs = make_inputs(AttentionCase(id="x", kv_lens=(700, 64), q_lens=(1, 1)), "cuda")
compile_cache.freeze()
try:
    flash_attn_varlen_func(**inputs)
except compile_cache.UnplannedCompileError as error:
    print(error)
"""
    done = run("-c", code)
    name = "decode_sm90_fp8_e4m3_d128_r8_bf16_box64 for sm_90a"
    assert f"unplanned compile of {name} after freeze()" in done.stdout, done.stderr
    assert "asked for at <string>:7 in <module>" in done.stdout


MODELS = (("gemma-4-31b", 4), ("qwen3-235b-a22b", 1), ("gpt-oss-120b", 8))


@pytest.mark.parametrize("cache", ("fp8", "bf16"))
@pytest.mark.parametrize(("name", "tp_size"), MODELS)
def test_a_replay_of_mixed_traffic_asks_for_the_plan(name, tp_size, cache):
    """No kernel is missing from the plan, and none is there in vain."""
    planned = plan_warmup(
        read_model(CONFIGS / f"{name}.json"),
        ["sm_90a"],
        cache,
        tp_sizes=[tp_size],
        max_query_tokens=Q_LENGTHS[-1],
        text_only=True,
    ).compile_units
    compile_cache.warmup(planned)  # so that the user's cache has what no bundle has
    done = run("-m", "tests.compile_cache.replay", name, str(tp_size), cache)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {unit.name for unit in planned}


def test_only_torch_and_tvm_ffi_are_needed(given_bundles):
    """In a process where nothing of the DSL can be imported. Its bundle is the caller's."""
    if given_bundles is None:
        pytest.fail("this test takes a bundle: set CUTE_KERNELS_BUNDLE")
    code = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ImportError("hidden: " + name)
sys.meta_path.insert(0, Blocker())
from cute_kernels import compile_cache
from tests.attention.helpers import check
from tests.cases import AttentionCase, make_inputs
compile_cache.freeze()
check(make_inputs(AttentionCase(id="x", kv_lens=(700, 64, 129), q_lens=(1,) * 3), "cuda"))
print(len(compile_cache.loaded()), "cutlass" in sys.modules)
"""
    done = run("-c", code)
    assert done.stdout == "1 False\n", done.stderr


def test_eight_threads_share_the_kernels(monkeypatch):
    expected = [check(make_inputs(each, "cuda")) for each in CASES]
    monkeypatch.setattr(obtain, "KERNELS", KernelCache())
    check_in_threads(["cuda"] * 8, expected)


CASES = [case(), case(head_size=512, num_kv_heads=1), case(q_lens=(4,) * 3, head_size=64)]


def check_in_threads(devices: list[str], expected) -> None:
    failures: list[BaseException] = []
    gate = threading.Barrier(len(devices))

    def work(device: str, turn: int) -> None:
        try:
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                gate.wait()
                for i in range(len(CASES)):
                    which = (turn + i) % len(CASES)
                    out, lse = check(make_inputs(CASES[which], device))
                    assert_bit_equal(out.cpu(), expected[which][0].cpu(), f"out on {device}")
                    assert_bit_equal(lse.cpu(), expected[which][1].cpu(), f"LSE on {device}")
        except BaseException as error:
            failures.append(error)
            gate.abort()

    threads = [
        threading.Thread(target=work, args=(device, turn)) for turn, device in enumerate(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_tensors_on_another_device_than_the_current_one():
    requires(gpus=2)
    for each in CASES:
        assert torch.cuda.current_device() == 0
        out, lse = check(make_inputs(each, "cuda:1"))
        assert out.device == lse.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        first_out, first_lse = check(make_inputs(each, "cuda:0"))
        assert_bit_equal(out.cpu(), first_out.cpu(), "out on both devices")
        assert_bit_equal(lse.cpu(), first_lse.cpu(), "LSE on both devices")


def test_eight_threads_on_two_devices(monkeypatch):
    requires(gpus=2)
    expected = [check(make_inputs(each, "cuda:1")) for each in CASES]
    monkeypatch.setattr(obtain, "KERNELS", KernelCache())
    check_in_threads(["cuda:0", "cuda:1"] * 4, expected)
