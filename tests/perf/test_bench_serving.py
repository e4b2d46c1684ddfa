"""The serving benchmark without a GPU: its trace, its arithmetic, its inputs and its rows."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from cute_kernels import split_nvfp4
from kvcache import can_run
from perf import bench_serving, serving_inputs, trace
from perf.bench_serving import CHECK_STEP, CONFIGS, DTYPES
from perf.inputs import random_codes
from perf.rows import OK, Measurement, check_row, make_row, make_workload
from perf.serving_estimate import Steps, mean_of_all
from perf.serving_inputs import PAGE
from perf.timing import Timing
from perf.trace import Layers, Step, TraceSpec, Work
from tests.perf.helpers import MACHINE, METHOD

SPEC = TraceSpec(requests=20, prompt_median=300, output_median=30, max_sequences=6, token_budget=64)


def model(name):
    return json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))


def small_layers(dtype, window=None):
    (layer,) = trace.layers_of(model("llama-3.1-8b"), dtype, 4)
    config = replace(layer.config, num_q_heads=4, num_kv_heads=2, head_size=64)
    return layer._replace(config=replace(config, sliding_window=window))


def test_a_trace_is_the_same_twice_and_another_with_another_seed():
    assert trace.simulate(SPEC) == trace.simulate(SPEC)
    assert trace.simulate(SPEC) != trace.simulate(replace(SPEC, seed=1))


def test_the_committed_trace_has_all_kinds_of_steps():
    steps = trace.simulate(TraceSpec())
    assert {step.kind for step in steps} == {trace.PLAIN, trace.CHUNKED}
    queries = {query for step in steps for query, _ in step.work}
    assert {1, 4} <= queries and max(queries) > 1000
    assert max(len(step.work) for step in steps) == TraceSpec().max_sequences


@pytest.mark.parametrize("accept", (0.0, 0.7, 1.0))
def test_every_token_is_computed_once(accept):
    spec = replace(SPEC, accept=accept)
    requests, steps = trace.make_requests(spec), trace.simulate(spec)
    assert sum(step.chunk_tokens for step in steps) == sum(r.prompt for r in requests)
    decoded = [item for step in steps for item in step.work if item.query <= 1 + spec.drafts]
    assert all(item.query <= item.keys for item in decoded)
    for step in steps:
        assert sum(query for query, _ in step.work) <= spec.token_budget
        assert 0 < len(step.work) <= spec.max_sequences
    assert max(item.keys for step in steps for item in step.work) <= max(
        request.prompt + request.output for request in requests
    )


def test_drafts_save_steps_as_often_as_they_are_accepted():
    alone = replace(SPEC, requests=1, drafting=1.0, prompt_sigma=0.0, output_sigma=0.0)
    decode_steps = {
        accept: sum(not step.chunk_tokens for step in trace.simulate(replace(alone, accept=accept)))
        for accept in (0.0, 1.0)
    }
    # The prompt's last chunk brings the first of 30 tokens; 29 come one or four at a time.
    assert decode_steps == {0.0: 29, 1.0: 8}


def test_a_budget_that_decoding_may_exceed_is_refused():
    with pytest.raises(ValueError, match="token_budget: 23 is less than decoding may take"):
        trace.simulate(replace(SPEC, token_budget=23))


def test_samples_are_the_middles_of_equal_shares_by_work():
    small, large = (Step((Work(1, keys),), 0) for keys in (10, 1000))
    steps = [large, small, large, small, Step((Work(4, 10),), 4)]
    assert trace.sample(steps, trace.PLAIN, 2) == [small, large]
    few, many = Step((Work(1, 1000), Work(9, 9)), 9), Step((Work(1, 10), Work(99, 500)), 99)
    assert trace.sample([many, few], trace.CHUNKED, 2) == [few, many]


def test_samples_are_spread_and_of_one_kind():
    steps = [Step((Work(1, i),), i % 2) for i in range(1, 101)]
    found = trace.sample(steps, trace.PLAIN, 5)
    assert [step.work[0].keys for step in found] == [12, 32, 52, 72, 92]
    assert trace.sample(steps, trace.CHUNKED, 1000) == steps[::2]
    assert trace.sample(steps[:1], trace.PLAIN, 5) == []


@pytest.mark.parametrize(("tp_size", "heads"), ((1, (16, 4)), (2, (8, 2)), (8, (2, 1))))
def test_layers_of_gemma_are_divided_among_devices(tp_size, heads):
    sliding, full = trace.layers_of(model("gemma-4-31b"), "fp8", tp_size)
    assert (sliding.count, full.count) == (sliding.cached, full.cached) == (50, 10)
    assert (sliding.config.num_kv_heads, full.config.num_kv_heads) == heads
    assert sliding.config.num_q_heads == full.config.num_q_heads == 32 // tp_size
    assert (sliding.config.sliding_window, full.config.sliding_window) == (1024, None)


def test_keys_read():
    work = (Work(1, 100), Work(4, 100), Work(1, 10))
    assert trace.keys_read(work, None) == 210
    assert trace.keys_read(work, 50) == 50 + 53 + 10


def test_capacity():
    (llama,) = trace.layers_of(model("llama-3-70b"), "fp8", 1)
    # 80 layers, 8 heads of 128 elements, K and V, one byte each; 100 tokens take two pages.
    assert trace.sequence_bytes([llama], 100, 64) == 80 * 128 * 8 * 128 * 2
    budget = 10 * 80 * 128 * 8 * 128 * 2
    assert trace.capacity_tokens([llama], budget, 100, 64) == 1000
    assert trace.capacity_tokens([llama], budget - 1, 100, 64) == 900
    (bf16,) = trace.layers_of(model("llama-3-70b"), "bf16", 1)
    assert trace.capacity_tokens([bf16], budget, 100, 64) == 500


def test_a_window_keeps_the_pages_it_may_touch():
    windowed = small_layers("fp8", window=130)
    per_page = windowed.cached * 64 * windowed.config.bytes_per_token
    assert trace.sequence_bytes([windowed], 64, 64) == per_page
    assert trace.sequence_bytes([windowed], 10_000, 64) == 4 * per_page


@pytest.mark.parametrize("dtype", ("bf16", "fp8"))
@pytest.mark.parametrize("window", (None, 100))
def test_a_small_step_is_right_on_the_cpu(dtype, window):
    result = bench_serving.check(small_layers(dtype, window), dtype, "cpu", "attention")
    assert result.status == OK, result
    assert 0 < result.rel_error < bench_serving.MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_of_a_small_step_is_right_on_the_cpu(dtype, monkeypatch):
    layer = small_layers(dtype)
    assert bench_serving.check(layer, dtype, "cpu", "store") == Measurement(OK, 0.0)
    monkeypatch.setattr(bench_serving, "store_call", lambda *_: lambda: None)
    assert bench_serving.check(layer, dtype, "cpu", "store").status.startswith("wrong: ")


def test_the_slow_reference_on_a_gpu_is_a_failure_other_warnings_are_not(monkeypatch):
    reason = "flash_attn_varlen_func runs the slow torch reference: no kernel"
    for text, status in ((reason, f"failed: UserWarning: {reason}"), ("something else", OK)):

        def call(*_, text=text, attend=serving_inputs.flash_attn_varlen_func, **arguments):
            warnings.warn(text, stacklevel=2)
            return attend(**arguments)

        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(serving_inputs, "flash_attn_varlen_func", call)
            found = bench_serving.check(small_layers("fp8"), "fp8", "cpu", "attention")
            assert found.status == status


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_store_writes_the_last_keys_of_each_sequence_and_nothing_else(dtype):
    layer, pages = small_layers(dtype), serving_inputs.pages_of(CHECK_STEP)
    generator = torch.Generator().manual_seed(0)
    pool = serving_inputs.make_pool(layer, dtype, pages + 3, generator)
    order = torch.randperm(pages + 3, generator=generator)[:pages]
    inputs = serving_inputs.make_step(layer, CHECK_STEP, pool, order)
    before = pool.k.clone()
    serving_inputs.store_call(inputs, dtype)()
    codes = split_nvfp4 if dtype == "nvfp4" else lambda side: (side,)
    changed = torch.zeros(before.shape[:2], dtype=torch.bool)
    for now, was in zip(codes(pool.k), codes(before), strict=True):
        changed |= (now.view(torch.uint8) != was.view(torch.uint8)).flatten(2).any(2)
    expected = torch.zeros_like(changed)
    for row, (query, keys) in zip(inputs.attention.block_table, CHECK_STEP, strict=True):
        for token in range(keys - query, keys):
            expected[row[token // PAGE], token % PAGE] = True
    assert torch.equal(changed, expected)


def test_moved_bytes():
    layer = small_layers("fp8", window=50)
    step = (Work(4, 100), Work(1, 10))
    assert serving_inputs.moved_bytes(layer, step, "attention") == (53 + 10) * 2 * 2 * 64
    assert serving_inputs.moved_bytes(layer, step, "store") == 5 * (2 + 1) * 2 * 2 * 64


def test_a_step_is_the_sum_over_layers_and_of_two_the_mean_is_all_there_is():
    layers = [small_layers("fp8")._replace(name=name) for name in ("a", "b")]
    layers = [layers[0]._replace(count=3, cached=2), layers[1]._replace(count=1, cached=1)]
    steps = [
        {"a": Timing(10.0, 9.0, 11.0), "b": Timing(100.0, 90.0, 110.0)},
        {"a": Timing(20.0, 19.0, 21.0), "b": Timing(200.0, 190.0, 210.0)},
    ]
    found = [bench_serving.over_layers(layers, "attention", step) for step in steps]
    assert found == [Timing(130, 117, 143), Timing(260, 247, 273)]
    assert bench_serving.over_layers(layers, "store", steps[0]).median_us == 120
    mean = mean_of_all(found, [1.0, 2.0], 1.4)
    assert mean == (Timing(195.0, 182.0, 208.0), None)


def test_a_dtype_that_no_kernel_reads_gets_a_reason_and_its_store_a_time(monkeypatch):
    layer = small_layers("bf16")
    layer = layer._replace(config=replace(layer.config, head_size=96))
    monkeypatch.setattr(
        bench_serving, "check", lambda *of, check=bench_serving.check: check(*of[:2], "cpu", of[3])
    )
    verdicts = {part: bench_serving.verdict([layer], "bf16", part) for part in bench_serving.PARTS}
    assert verdicts["attention"].status.startswith("full_attention: no kernel: ")
    assert verdicts["store"] == Measurement(OK, 0.0)
    asked = []

    def time_layer(*arguments):
        asked.append(arguments[4])
        return {"store": Timing(1.0, 0.5, 2.0)}

    monkeypatch.setattr(bench_serving, "time_layer", time_layer)
    steps = Steps([Step(CHECK_STEP, 0)])
    found, errors = bench_serving.measure([layer], "bf16", steps, steps, 1, verdicts)
    assert errors == {"attention": {}, "store": {}}
    assert asked == [["store"]]
    assert found["attention"] == verdicts["attention"]
    assert found["store"].rotating.median_us == 1.0 * layer.cached


def test_one_kind_of_layer_that_is_wrong_leaves_the_step_without_a_time(monkeypatch):
    layers = trace.layers_of(model("gemma-4-31b"), "fp8", 1)
    steps = Steps(trace.sample(trace.simulate(SPEC), trace.PLAIN, 3))
    unit = dict.fromkeys(bench_serving.PARTS, Timing(1.0, 0.5, 2.0))
    monkeypatch.setattr(bench_serving, "time_layer", lambda *_: unit)
    right = dict.fromkeys(bench_serving.PARTS, Measurement(OK, 1e-3))
    found, errors = bench_serving.measure(layers, "fp8", steps, steps, 1, right)
    assert found["store"] == Measurement(OK, 1e-3, Timing(60.0, 30.0, 120.0))
    assert errors["attention"] == {"standard_error_us": 0.0}
    results = {"sliding_attention": Measurement(OK, 1e-3), "full_attention": Measurement("wrong")}
    monkeypatch.setattr(bench_serving, "check", lambda layer, *_: results[layer.name])
    wrong = bench_serving.verdict(layers, "fp8", "attention")
    assert wrong == Measurement("full_attention: wrong")
    found, _ = bench_serving.measure(layers, "fp8", steps, steps, 1, right | {"attention": wrong})
    assert found["attention"] == wrong and found["store"].rotating is not None


def rows_of(status=OK):
    layers = trace.layers_of(model("gemma-4-31b"), "fp8", 2)
    steps = trace.simulate(SPEC)
    sampled = Steps(trace.sample(steps, trace.PLAIN, 2))
    plain = Steps([step for step in steps if step.kind == trace.PLAIN])
    facts = bench_serving.facts_of(SPEC, plain, sampled, layers, 40.0)
    rows = []
    for part, us in (("attention", 3000.0), ("store", 500.0)):
        timing = Timing(us, us, us) if status == OK else None
        case = bench_serving.ServingCase(
            "gemma-4-31b", 2, "fp8", trace.PLAIN, part, tuple(facts.items())
        )
        workload = make_workload(case, MACHINE, METHOD)
        result = Measurement(status, 1e-3 if timing else None, timing)
        rows.append(make_row("cute_kernels", case, result, workload, MACHINE, 4.0, 10**9))
    return rows


def test_rows_are_result_rows():
    for row in rows_of():
        check_row(json.loads(json.dumps(row)))
    work = rows_of()[0]["workload"]
    assert work["steps_in_trace"] == sum(not s.chunk_tokens for s in trace.simulate(SPEC))
    assert work["output_tokens"] == sum(r.output for r in trace.make_requests(SPEC))


def test_pools_hold_what_their_dtype_says():
    generator = torch.Generator().manual_seed(0)
    layer: Layers = small_layers("fp8")
    fp8 = serving_inputs.make_pool(layer, "fp8", 2, generator)
    assert fp8.k.dtype is torch.float8_e4m3fn and fp8.k.shape == (2, PAGE, 2, 64)
    assert not fp8.k.float().isnan().any() and not torch.equal(fp8.k.float(), fp8.v.float())
    assert serving_inputs.make_pool(layer, "bf16", 2, generator).v.dtype is torch.bfloat16
    assert len(random_codes(4096, generator).unique()) == 254


def test_kernels_of_all_kinds_of_layers_are_told_once(monkeypatch):
    layers = [small_layers("fp8")._replace(name=name) for name in ("sliding", "full")]
    monkeypatch.setattr(bench_serving, "inputs_of", lambda layer, *others: [layer.name])
    monkeypatch.setattr(bench_serving, "call_of", lambda part, inputs, dtype: (part, inputs))
    ran = {"sliding": ["decode_256", "copy"], "full": ["decode_512", "copy"]}
    monkeypatch.setattr(bench_serving, "kernels_of", lambda call: ran[call[1]])
    step = Step(CHECK_STEP, 0)
    found = bench_serving.kernels_in(layers, "fp8", step, "attention")
    assert found == ["decode_256", "copy", "decode_512"]
    monkeypatch.setattr(bench_serving, "kernels_of", lambda call: None)
    assert bench_serving.kernels_in(layers, "fp8", step, "attention") == []


@pytest.mark.parametrize(
    ("name", "tp_size"), ((n, t) for n in bench_serving.MODELS for t in (1, 8))
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layer_has_a_kernel(name, tp_size, dtype):
    """On SM90: what is compared is what quantizing is worth, not who has a kernel."""
    for layer in trace.layers_of(model(name), dtype, tp_size):
        assert can_run(replace(layer.config, page_size=PAGE)) is None


def test_the_mean_of_all_steps_is_read_off_the_line_through_the_samples():
    times = [Timing(y, y - 1, y + 2) for y in (10.0, 20.0, 30.0)]
    mean = mean_of_all(times, [1.0, 2.0, 3.0], 2.5)
    assert mean.timing == Timing(25.0, 24.0, 27.0) and mean.standard_error == 0.0
    times[1] = Timing(23.0, 22.0, 25.0)
    mean = mean_of_all(times, [1.0, 2.0, 3.0], 2.0)
    # Off the line by -1, 2 and -1; one degree of freedom.
    assert mean.timing.median_us == 21.0 and mean.standard_error == pytest.approx(2**0.5)
    assert mean_of_all(times, [1.0, 1.0, 1.0], 1.0) == (Timing(21.0, 20.0, 23.0), None)


def test_the_estimate_is_surer_than_the_mean_of_as_many_steps():
    """Of times that are proportional to what is read, but for a tenth: over the committed trace."""
    all_steps = trace.simulate(TraceSpec())
    layers = trace.layers_of(model("gemma-4-31b"), "fp8", 1)
    for kind in (trace.PLAIN, trace.CHUNKED):
        steps = Steps([step for step in all_steps if step.kind == kind])
        work = steps.work(layers, "attention")
        true = sum(work) / len(work)
        sampled = Steps(trace.sample(all_steps, kind, 6))
        chosen = sampled.work(layers, "attention")
        times = [Timing(*(3 * [1e6 * x * (1.1 if i % 2 else 0.9)])) for i, x in enumerate(chosen)]
        mean = mean_of_all(times, chosen, true)
        assert abs(mean.timing.median_us / (1e6 * true) - 1) < 0.1
        assert 0 < mean.standard_error < 0.1 * mean.timing.median_us


def test_moved_bytes_of_steps_are_those_of_their_layers():
    layers = [small_layers("fp8", window=50), small_layers("nvfp4")]
    steps = Steps([Step((Work(4, 100), Work(1, 10)), 0), Step((Work(9, 9),), 9)])
    for part in bench_serving.PARTS:
        assert steps.moved(layers, part) == [
            sum(
                trace.calls_of(layer, part) * serving_inputs.moved_bytes(layer, step.work, part)
                for layer in layers
            )
            for step in steps.steps
        ]
    assert steps.most_keys == 110


def test_what_is_measured_is_listed():
    done = CliRunner().invoke(bench_serving.main, ["--list", "--tp", "2", "--dtype", "fp8"])
    assert done.output.splitlines() == ["gemma-4-31b TP2 fp8", "llama-3-70b TP2 fp8"]
