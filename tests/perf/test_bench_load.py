"""What `perf.bench_load` asks of each kernel, and how it judges. The measuring takes a GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from cute_kernels.attention.arguments import validate
from cute_kernels.attention.decode_sm90.config import (
    KV_FORMATS,
    box_tokens_for_page,
    row_bucket,
    support_table,
)
from perf.bench_load import Q_DTYPES, case_for, main, missed, summary
from perf.inputs import KVPool, make_input_sets
from perf.providers import varlen_arguments


@pytest.mark.parametrize("config", support_table(), ids=lambda config: config.name)
def test_the_call_reaches_its_kernel(config):
    case = case_for(config)
    assert row_bucket(case.head_size, case.group * case.q_len) == config.rows
    assert box_tokens_for_page(case.page_size) == config.box_tokens
    assert case.q_dtype == Q_DTYPES[config.q_dtype] and case.head_size == config.head_size
    assert case.kv_cache_dtype == config.kv_format


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_its_cache_has_the_kernels_format(kv_format):
    config = next(config for config in support_table() if config.kv_format == kv_format)
    case = case_for(config)
    (inputs,) = make_input_sets(case, KVPool([case], "cpu"), count=1)
    assert validate(**varlen_arguments(inputs)).kv_format == kv_format


def row(name: str, load: float, extra: float) -> dict[str, object]:
    return {
        "kernel": name,
        "load_ms": load,
        "first_call_ms": extra + 0.1,
        "first_call_extra_ms": extra,
        "later_call_ms": 0.1,
    }


def test_judgement():
    rows = [row("a", 1.0, 0.5), row("b", 51.0, 0.5), row("c", 1.0, 5.5)]
    assert missed(rows) == ["b", "c"] and missed(rows[:1]) == []
    text = summary(rows)
    assert text.startswith("3 kernels\n")
    assert text.splitlines()[2].split() == ["load_ms", "1.000", "51.000", "50.0"]
    assert text.splitlines()[3].split() == ["first_call_extra_ms", "0.500", "5.500", "5.0"]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 1 and done.output == "Error: the benchmark needs a CUDA device\n"
