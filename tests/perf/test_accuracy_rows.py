"""Files of `perf.accuracy`: a model at a time, ids that were read, estimates that are ones."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click.testing import CliRunner

from perf.accuracy_sections import agreement, read_accuracy
from perf.sections import ResultFile
from tests.requires import requires_module

requires_module("transformers")

from perf import (  # noqa: E402 - needs transformers
    accuracy,
    accuracy_decoders,
    accuracy_embeddings,
    accuracy_ids,
)

ESTIMATE = {"value": 0.01, "standard_error": 0.001}
ROW = {
    "model": "smollm2",
    "kv_cache_dtype": "fp8",
    "tokens": 10,
    "window_tokens": 5,
    "bytes_per_token_and_layer": 384,
    "ids_sha256": "ab",
    "perplexity": 10.0,
    "perplexity_change": ESTIMATE,
    "device": "CPU",
    "commit": "c",
    "date": "2026-01-02",
}


def written(tmp_path, *rows):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"perplexity": math.nan}, "NaN is no number"),
        ({"ids_sha256": None}, "missing ids_sha256"),
        ({"tokens": 0}, "missing tokens"),
        ({"kl": {"value": "low", "standard_error": None}}, "kl is .* no estimate"),
        ({"kl": {"value": 1.0, "standard_error": "none"}}, "kl is .* no estimate"),
    ),
)
def test_rows_that_say_less_than_they_seem_to_are_refused(tmp_path, change, message):
    assert read_accuracy(written(tmp_path, ROW)) == [ROW]
    with pytest.raises(ValueError, match=message):
        read_accuracy(written(tmp_path, ROW | change))


def test_two_rows_for_the_same_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two rows"):
        read_accuracy(written(tmp_path, ROW, ROW))
    assert len(read_accuracy(written(tmp_path, ROW, ROW | {"rotate_keys": True}))) == 2


def as_file(row):
    return ResultFile(None, "accuracy", "accuracy_x", "2026-01-02", [row])


def test_runs_are_compared_by_the_ids_that_they_read():
    """Two runs whose texts look alike read other tokens, and are not compared."""
    twin = ROW | {"device": "NVIDIA H200"}
    assert "1 changes of perplexity, the furthest" in agreement(as_file(ROW), as_file(twin))
    apart = twin | {"perplexity_change": ESTIMATE | {"value": 0.02}}
    text = agreement(as_file(ROW), as_file(apart))
    assert "apart by -1.00 percentage points (smollm2 fp8)" in text
    assert agreement(as_file(ROW), as_file(apart | {"ids_sha256": "cd"})) == ""


def test_a_model_at_a_time_makes_one_file(tmp_path, monkeypatch):
    """Rows of other models stay, in the models' order; those of the same are replaced."""
    texts = []

    def measure(name, model_dir, text, dtypes, *others):
        texts.append(text)
        return [{k: v for k, v in ROW.items() if k not in ("model", "device", "commit", "date")}]

    monkeypatch.setattr(accuracy, "measure_decoder", measure)
    monkeypatch.setattr(
        accuracy, "measure_encoder", lambda model_dir, text, *others: measure("", None, text, ())
    )
    text, out = tmp_path / "text", tmp_path / "out.json"
    assert CliRunner().invoke(accuracy.main, ["--write-text", str(text)]).exit_code == 0
    assert text.read_text(encoding="utf-8") == accuracy.default_text()

    def run(model, commit):
        arguments = ["--model", model, "--text", text, "--json", out, "--commit", commit]
        done = CliRunner().invoke(accuracy.main, list(map(str, arguments)))
        assert done.exit_code == 0, done.output
        return [(row["model"], row["commit"]) for row in read_accuracy(out)]

    assert run(accuracy_embeddings.NAME, "a") == [("minilm", "a")]
    assert run("smollm2", "b") == [("smollm2", "b"), ("minilm", "a")]
    assert run("smollm2", "c") == [("smollm2", "c"), ("minilm", "a")]
    assert set(texts) == {accuracy.default_text()}


class Letters:
    """A tokenizer whose ids are the letters' numbers."""

    bos_token_id = 1

    def __call__(self, text, return_tensors):
        return {"input_ids": torch.tensor([[self.bos_token_id, *map(ord, text)]])}


def test_ids_from_a_file_are_read_as_the_text_is(tmp_path, monkeypatch):
    """Without a tokenizer, which one host may read otherwise than another."""
    read = []

    def measured(model, text, *others, **more):
        read.append(text)
        return []

    for name in ("find_gguf", "register"):
        monkeypatch.setattr(accuracy, name, lambda *arguments: None)
    monkeypatch.setattr(accuracy_ids, "find_gguf", lambda *arguments: None)
    monkeypatch.setattr(accuracy_ids, "load_tokenizer", lambda gguf: Letters())
    monkeypatch.setattr(accuracy, "load", lambda *arguments: (Letters(), None))
    monkeypatch.setattr(accuracy, "load_model", lambda *arguments: None)
    monkeypatch.setattr(accuracy_decoders, "measure", measured)
    path, text = tmp_path / "ids.json", tmp_path / "text"
    text.write_text("what is read " * 1000, encoding="utf-8")
    common = ["--model", "smollm2", "--text", str(text)]
    done = CliRunner().invoke(accuracy.main, [*common, "--write-ids", str(path)])
    assert done.exit_code == 0 and not read, done.output
    for more in ([], ["--ids", str(path)]):
        done = CliRunner().invoke(accuracy.main, [*common, *more])
        assert done.exit_code == 0, done.output
    for one, other in zip(*read, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert (read[0].windows[:, 0] == Letters.bos_token_id).all()
    done = CliRunner().invoke(
        accuracy.main, ["--model", "gemma3-270m", "--text", str(text), "--ids", str(path)]
    )
    assert done.exit_code == 1 and "has no ids of gemma3-270m" in done.output
