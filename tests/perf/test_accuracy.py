"""Accuracy by KV cache dtype: estimates and their errors, comparisons, rows, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click import ClickException

from perf.paired import Estimate, over_blocks, relative_perplexity
from tests.requires import requires_module

requires_module("transformers")

from transformers import BertConfig, BertModel  # noqa: E402 - needs transformers

from kvcache.integrations.transformers import (  # noqa: E402
    PagedKVCache,
    cache_keyword,
    forward,
    register,
)
from perf import accuracy, accuracy_decoders, accuracy_embeddings, accuracy_sections  # noqa: E402
from perf.accuracy_decoders import BASELINE, Text  # noqa: E402
from perf.sections import ResultFile  # noqa: E402
from tests.demo import models  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
WINDOWS, LENGTH, NEW = 2, 90, 6


# ---- estimates ---------------------------------------------------------------------------------


def test_blocks_of_one_token_give_the_ordinary_standard_error():
    values = torch.randn(1, 400, generator=torch.Generator().manual_seed(0)).double()
    found = over_blocks(values, 1)
    assert found.value == pytest.approx(values.mean().item())
    assert found.standard_error == pytest.approx(values.std().item() / 20)


def test_neighbours_that_are_alike_are_not_counted_as_independent():
    """Runs of 20 equal values hold one value each: an error from tokens is sqrt(20) too small."""
    drawn = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)).double()
    values = drawn.repeat_interleave(20, dim=1)
    assert over_blocks(values, 20).standard_error == pytest.approx(
        over_blocks(drawn, 1).standard_error
    )
    ratio = over_blocks(values, 20).standard_error / over_blocks(values, 1).standard_error
    assert ratio == pytest.approx(math.sqrt(20), rel=0.01)


def test_blocks_do_not_cross_windows_and_short_ones_weigh_less():
    values = torch.tensor([[1.0, 1.0, 1.0, 4.0]])
    # Blocks of 3 and 1 around the mean of 1.75: sums of deviations -2.25 and 2.25.
    expected = math.sqrt(2 * 2.25**2 * 2 / 1) / 4
    assert over_blocks(values, 3) == Estimate(1.75, pytest.approx(expected))
    assert over_blocks(values, 4) == Estimate(1.75, None)
    assert over_blocks(values.view(2, 2), 4).standard_error is not None
    with pytest.raises(ValueError, match=r"values: got \(0, 3\)"):
        over_blocks(torch.zeros(0, 3), 1)


def test_a_change_of_perplexity_is_that_of_the_means_exponential():
    difference = torch.full((1, 10), math.log(1.1))
    assert relative_perplexity(difference, 2) == Estimate(
        pytest.approx(0.1), pytest.approx(0.0, abs=1e-9)
    )


# ---- decoders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    register("cute_kv", models.reference)
    found = models.llama()
    found.set_attn_implementation("cute_kv")
    return found


@pytest.fixture(scope="module")
def text():
    ids = models.tokens(WINDOWS, LENGTH)
    return Text(ids, ids[:, :30], models.tokens(1, 60, seed=2), NEW, 16)


@pytest.fixture(scope="module")
def rows(model, text):
    return accuracy_decoders.measure(model, text, ("fp8", "nvfp4"), True, 40)


def test_the_perplexity_is_the_models_own(model, text, rows):
    with torch.inference_mode():
        logits = forward(model, text.windows, PagedKVCache(model.config, BASELINE)).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), text.windows[:, 1:].flatten()
    )
    assert rows[0]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-3)
    assert "kl" not in rows[0] and not rows[0]["rotate_keys"] and rows[1]["rotate_keys"]


def test_fewer_bits_are_farther_from_bf16_in_every_figure(rows):
    _, fp8, nvfp4 = rows
    for name in ("kl", "perplexity_change", "top1_agreement"):
        assert fp8[name]["standard_error"] > 0
    assert 0 < fp8["kl"]["value"] < nvfp4["kl"]["value"]
    assert 1 > fp8["top1_agreement"]["value"] > nvfp4["top1_agreement"]["value"]
    assert len(fp8["layer_errors"]) == 2
    for one, other in zip(fp8["layer_errors"], nvfp4["layer_errors"], strict=True):
        assert 0 < one < other
    change = nvfp4["perplexity"] / rows[0]["perplexity"] - 1
    assert nvfp4["perplexity_change"]["value"] == pytest.approx(change)
    assert [row["bytes_per_token_and_layer"] for row in rows] == [512, 256, 144]


def test_scales_per_head_are_other_rows(model, text, rows):
    base, fp8 = accuracy_decoders.measure(model, text, ("fp8",), True, 40, per_head=True)
    assert fp8["per_head"] and not (base["per_head"] or rows[1]["per_head"])
    assert 0 < fp8["kl"]["value"] != rows[1]["kl"]["value"]
    about = {"model": "a", "tokens": 1, "new_tokens": NEW}
    lines = accuracy_sections.accuracy_lines([about | row for row in (*rows[:2], fp8)])
    at = accuracy_sections.COLUMNS.index("keys")
    assert [line[at] for line in lines] == ["", "rotated", "rotated, scales per head"]
    assert not accuracy_sections._same_work(about | rows[1], about | fp8)
    old = {name: value for name, value in rows[1].items() if name != "per_head"}
    assert accuracy_sections._same_work(about | rows[1], about | old)


def test_the_same_cache_twice_has_no_distance(model, text):
    caches = {name: PagedKVCache(model.config, BASELINE) for name in (BASELINE, "again")}
    again = accuracy_decoders.score(model, text.windows, caches, 40)["again"]
    assert torch.cat(again.divergences, 1).abs().max() < 1e-6
    assert torch.cat(again.agreements, 1).min() == 1
    assert again.relative_layer_errors() == [0.0, 0.0]
    assert torch.cat(again.losses, 1).shape == (WINDOWS, LENGTH - 1)


def test_a_divergence_is_kullbacks_and_leiblers(model, text):
    base, other = (torch.randn(1, 3, 7).log_softmax(-1) for _ in range(2))
    hidden = (torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    scores = accuracy_decoders.Scores()
    accuracy_decoders._score(
        scores,
        accuracy_decoders._Output(other, (hidden[0], 1.5 * hidden[1])),
        accuracy_decoders._Output(base, hidden),
        torch.zeros(1, 3, dtype=torch.long),
    )
    expected = torch.nn.functional.kl_div(other, base, log_target=True, reduction="none").sum(-1)
    assert torch.allclose(scores.divergences[0], expected.double(), atol=1e-6)
    assert scores.relative_layer_errors() == [0.0, 0.5]


def test_greedy_continuations_are_those_of_generate(model, text):
    found = accuracy_decoders.greedy(model, text, PagedKVCache(model.config, BASELINE), 17)
    whole = model.generate(
        text.prompts,
        **{cache_keyword(model): PagedKVCache(model.config, BASELINE)},
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )
    assert torch.equal(found, whole[:, 30:])


def test_tokens_before_the_first_difference():
    base = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    other = torch.tensor([[1, 2, 3], [4, 0, 6], [0, 8, 9]])
    assert accuracy_decoders.leading_equal(other, base) == [3, 1, 0]
    assert accuracy_decoders.over_prompts([3, 1]) == Estimate(2.0, pytest.approx(1.0))


def test_windows_and_prompts_come_from_one_text():
    size = accuracy.Size(2, 10, 4, 3, 5, 8)
    ids = torch.arange(100)[None]
    read = accuracy.decoder_text(ids, ids, size)
    assert read.windows.tolist() == [list(range(10)), list(range(10, 20))]
    assert read.prompts[:, 0].tolist() == [0, 5, 10, 15] and read.prompts.shape == (4, 3)
    with pytest.raises(ClickException, match="the text has 19 tokens; asked for: 2 windows of 10"):
        accuracy.decoder_text(ids[:, :19], ids, size)
    begun = accuracy.decoder_text(ids, ids, size, first=0)
    assert begun.windows.tolist() == [[0, *range(1, 10)], [0, *range(10, 19)]]
    assert begun.prompts[:, 0].tolist() == [0] * 4 and begun.prompts.shape == (4, 3)
    assert begun.prompts[:, 1].tolist() == [1, 5, 9, 13]
    one = accuracy.about(read.windows, ids)
    assert one == accuracy.about(read.windows.clone(), ids)
    assert one["ids_sha256"] != accuracy.about(read.windows + 1, ids)["ids_sha256"]


# ---- embeddings --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A random encoder of MiniLM's kind: heads of 32."""
    where = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=96,
    )
    BertModel(config).save_pretrained(where)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(195))]
    (where / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return accuracy_embeddings.Encoder(where, torch.device("cpu"))


def test_an_encoders_attention_is_its_own_but_for_the_rounding(encoder):
    ids = models.tokens(3, 20) % 200
    mine, hidden = encoder.embed(ids, BASELINE)
    encoder.model.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = encoder.model(input_ids=ids).last_hidden_state
    encoder.model.set_attn_implementation(accuracy_embeddings.ATTENTION)
    assert len(hidden) == 2
    assert ((hidden[-1] - theirs).norm() / theirs.norm()).item() < 5e-3
    assert torch.allclose(mine.norm(dim=1), torch.ones(3).double())


def test_embeddings_are_farther_with_fewer_bits(encoder):
    ids = models.tokens(6, 20) % 200
    base, fp8, nvfp4 = accuracy_embeddings.measure(encoder, ids, ids[:2], ("fp8", "nvfp4"))
    assert "cosine_distance" not in base
    assert 0 < fp8["cosine_distance"]["value"] < nvfp4["cosine_distance"]["value"] < 0.1
    assert fp8["layer_errors"][-1] < nvfp4["layer_errors"][-1]
    assert [row["bytes_per_token_and_layer"] for row in (base, fp8, nvfp4)] == [256, 128, 72]


def test_the_nearest_text_is_another_one():
    unit = torch.nn.functional.normalize(torch.tensor([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1]]))
    assert accuracy_embeddings.nearest(unit).tolist() == [1, 0, 3, 2]


# ---- tables ------------------------------------------------------------------------------------


def result(rows, label="accuracy_cpu", **changes):
    about = {"model": "m", "tokens": 180, "new_tokens": NEW, "window_tokens": 90, "ids_sha256": "a"}
    found = [about | row | changes for row in json.loads(json.dumps(rows))]
    return ResultFile(Path(f"2026-01-02_{label}.json"), "accuracy", label, "2026-01-02", found)


def test_the_table_has_a_line_a_dtype_and_errors_with_two_digits(rows):
    lines = accuracy_sections.accuracy_table(result(rows)).split("\n")
    assert len(lines) == 2 + len(rows)
    assert "1 - cosine" not in lines[0] and "KL, nats" in lines[0]
    assert f"of {NEW}" in lines[3] and "rotated" in lines[3]
    estimate = {"value": 0.123456, "standard_error": 0.00347}
    assert accuracy_sections.figure(estimate) == "0.1235 +- 0.0035"
    assert accuracy_sections.figure(estimate, 100, "+") == "+12.35 +- 0.35"
    assert accuracy_sections.figure({"value": 1.0, "standard_error": 0.0}) == "1.00"
    lone = accuracy_sections.figure({"value": 0.0043, "standard_error": None})
    assert lone == "0.0043 (one block: no error)"


def test_two_runs_on_the_same_tokens_are_as_far_apart_as_they_are(rows):
    """Not so many standard errors: both read the same tokens, so their errors are no noise."""
    one, other = result(rows), result(rows, "accuracy_h200")
    text = accuracy_sections.agreement(one, other)
    assert text.startswith("Against accuracy_h200, 2026-01-02, on the same tokens: 2 changes")
    other.rows[2]["perplexity_change"]["value"] += 0.03
    text = accuracy_sections.agreement(one, other)
    assert "the furthest apart by -3.00 percentage points (m nvfp4)" in text
    assert accuracy_sections.agreement(one, result(rows, ids_sha256="b")) == ""


def test_the_documented_table_is_the_committed_result():
    rows = json.loads((ROOT / "perf/results/2026-11-30_perplexity_kv_cpu.json").read_text("utf-8"))
    text = (ROOT / "docs/integrations.md").read_text(encoding="utf-8")
    table = text.split("<!-- perplexity:begin -->")[1].split("<!-- perplexity:end -->")[0]
    lines = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.split("\n")[3:-1]
    ]
    for kv_cache_dtype, sizes, *cells in lines:
        mine = [row for row in rows if row["kv_cache_dtype"] == kv_cache_dtype]
        assert sizes == ", ".join(
            str(row["bytes_per_token_and_layer"]) for row in mine if not row["rotate_keys"]
        )
        if kv_cache_dtype == BASELINE:
            assert cells == [f"{mine[0]['perplexity']:.3f}", "", f"{mine[1]['perplexity']:.3f}", ""]
        else:
            assert cells == [
                f"{100 * row['change']:+.2f} % +- {100 * row['change_standard_error']:.2f}"
                for row in mine
            ]
    assert [line[0] for line in lines] == [BASELINE, *accuracy.DTYPES]
