"""Files of `perf.accuracy`: a model at a time, ids that were read, estimates that are ones."""

from __future__ import annotations

import json
import math

import pytest
import torch
from click import ClickException
from click.testing import CliRunner

from perf.accuracy_reading import read_accuracy
from perf.accuracy_sections import agreement
from perf.reading import BadFile
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
BASE = {name: value for name, value in ROW.items() if name != "perplexity_change"}
BASE |= {"kv_cache_dtype": "bf16", "perplexity": 10.0 / 1.01}


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
        ({"kl": {"value": 1.0, "standard_error": -0.1}}, "kl is .* no estimate"),
        ({"kl": {"value": 1.0, "standard_error": 1e-320}}, "kl is .* no estimate"),
        ({"kl": 0.5}, "kl is 0.5, no estimate"),
        ({"top1_agreement": {"value": 1.7, "standard_error": None}}, "top1_agreement is"),
        ({"tokens": "10"}, "tokens is '10'"),
        ({"perplexity": "10"}, "perplexity is '10'"),
        ({"perplexity": 9.0}, "the change is 0.01; of 9.90099 to 9 -0.091"),
        ({"ids_sha256": "cd"}, "ids_sha256 is 'cd', with a bf16 cache 'ab'"),
        ({"calibration_sha256": "ef"}, "calibration_sha256 is 'ef', with a bf16 cache None"),
        ({"block": 1}, "block is 1, with a bf16 cache None"),
        ({"date": "2026-01-03"}, "rows of two runs"),
        ({"layer_errors": ["low"]}, "layer_errors are"),
    ),
)
def test_rows_that_say_less_than_they_seem_to_are_refused(tmp_path, change, message):
    assert read_accuracy(written(tmp_path, BASE, ROW)) == [BASE, ROW]
    with pytest.raises(BadFile, match=f"r.json.*{message}"):
        read_accuracy(written(tmp_path, BASE, ROW | change))


def test_two_rows_for_the_same_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two rows"):
        read_accuracy(written(tmp_path, BASE, ROW, ROW))
    rotated = ROW | {"rotate_keys": True}
    assert len(read_accuracy(written(tmp_path, BASE, ROW, rotated))) == 3


def test_rows_without_their_baseline_are_refused(tmp_path):
    with pytest.raises(BadFile, match="r.json, smollm2, fp8: no row of the bf16 cache"):
        read_accuracy(written(tmp_path, ROW))


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
        own = ("model", "device", "commit", "date")
        return [{k: v for k, v in row.items() if k not in own} for row in (BASE, ROW)]

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
        return [(row["model"], row["commit"]) for row in read_accuracy(out)[::2]]

    assert run(accuracy_embeddings.NAME, "a") == [("minilm", "a")]
    assert run("smollm2", "b") == [("smollm2", "b"), ("minilm", "a")]
    assert run("smollm2", "c") == [("smollm2", "c"), ("minilm", "a")]
    assert set(texts) == {accuracy.default_text()}


class Model:
    """As far as it is asked before it measures."""

    num_embeddings = 1 << 21

    def get_input_embeddings(self):
        return self


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
    monkeypatch.setattr(accuracy, "load", lambda *arguments: (Letters(), Model()))
    monkeypatch.setattr(accuracy, "load_model", lambda *arguments: Model())
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
    text.write_text("what else is read " * 1000, encoding="utf-8")
    done = CliRunner().invoke(accuracy.main, [*common, "--ids", str(path)])
    assert done.exit_code == 1 and "ids of smollm2 are of another text" in done.output
    monkeypatch.setattr(Model, "num_embeddings", 100)
    done = CliRunner().invoke(accuracy.main, common)
    assert done.exit_code == 1 and "ids of smollm2: some are not below 100" in done.output


IDS = {"text": [5, 6], "calibration": [7], "bos": 1}


@pytest.mark.parametrize(
    "change",
    (
        {"text": []},
        {"calibration": []},
        {"text": "hello"},
        {"text": [1.5]},
        {"text": ["a"]},
        {"text": [-5]},
        {"bos": "a"},
        {"more": 1},
    ),
    ids=str,
)
def test_what_are_no_ids_is_refused(tmp_path, change):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps({"m": IDS}), encoding="utf-8")
    assert accuracy_ids.read(path, ["m"], None)["m"].text == [5, 6]
    path.write_text(json.dumps({"m": IDS | change}), encoding="utf-8")
    with pytest.raises(ClickException, match="ids of m"):
        accuracy_ids.read(path, ["m"], None)


def test_what_cannot_be_written_or_read_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(accuracy, "measure_decoder", lambda *arguments: measured.append(1) or [])
    for name, content in (("empty", b""), ("binary", b"\xff\xfe\x00"), ("other.json", b"[3]")):
        (tmp_path / name).write_bytes(content)
    nowhere = str(tmp_path / "nowhere" / "r.json")
    for arguments, message in (
        (["--json", nowhere], "no such folder"),
        (["--write-ids", nowhere], "no such folder"),
        (["--write-text", nowhere], "no such folder"),
        (["--text", str(tmp_path / "empty")], "is empty"),
        (["--text", str(tmp_path / "binary")], "can't decode"),
        (["--json", str(tmp_path / "other.json")], "is kept as it is: other.json, row 1: 3 is no"),
    ):
        done = CliRunner().invoke(accuracy.main, ["--model", "smollm2", *arguments])
        assert done.exit_code == 1 and message in done.output, done.output
    assert not measured
    CliRunner().invoke(accuracy.main, ["--model", "smollm2", "--model", "smollm2"])
    assert len(measured) == 1


def test_other_calibration_is_other_work():
    """Scales come from it: under one hash of what was scored, changes of 4 % and 149 % were."""
    one, two = (accuracy.about(torch.ones(2, 3), torch.full((1, 4), fill)) for fill in (1, 2))
    assert one["ids_sha256"] == two["ids_sha256"]
    assert one["calibration_sha256"] != two["calibration_sha256"]
    files = [as_file(ROW | each | {"device": "x"}) for each in (one, two)]
    assert agreement(*files) == "" and agreement(files[0], files[0])
