"""What a directory holds: its form, which policy of a run is taken, and whether it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrlhf.checkpoint.conversion.convert import SourceOptions, open_source
from mrlhf.checkpoint.conversion.identify import examine, identify
from mrlhf.checkpoint.manifest import checkpoint_name
from mrlhf.checkpoint.output_files import write_summary
from mrlhf.commands import convert_checkpoint
from mrlhf.errors import CheckpointError, MrlhfError
from mrlhf.models.families import load_spec
from tests.models.checkpoints import assert_same_tensors, convert_quietly, save_model
from tests.models.training_checkpoints import save_training


def test_what_a_directory_is(tmp_path: Path) -> None:
    save_model("qwen2-tied", tmp_path / "hf")
    convert_quietly(tmp_path / "hf", tmp_path / "megatron", "megatron")
    save_training(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step_000000")

    facts = dict(examine(tmp_path / "hf", every_byte=True).facts)
    assert facts["what"] == "Hugging Face model (policy)"
    assert facts["model"].startswith("qwen2, 4 layers, hidden 32, 8 heads, 4 KV heads, vocabulary")
    assert facts["model"].endswith("37, language model, tied embeddings")

    facts = dict(examine(tmp_path / "megatron", every_byte=True).facts)
    assert facts["what"] == "Megatron-LM checkpoint"
    assert "num_layers 4, hidden_size 32" in facts["model"]

    facts = dict(examine(tmp_path / "run", every_byte=True).facts)
    assert facts["what"] == "output directory of a run"
    assert "tp 1, pp 1, dp 1; stored: weight" in facts["actor"]
    assert identify(tmp_path / "run").path.name == "step_000000"

    for source in ("hf", "megatron", "run/checkpoints/step_000000"):
        opened = open_source(tmp_path / source, SourceOptions())
        assert opened.spec == load_spec(tmp_path / "hf", "lm")
        assert next(iter(opened.tensors)) == "model.embed_tokens.weight"

    with pytest.raises(CheckpointError, match="is no Hugging Face model, training checkpoint, out"):
        examine(tmp_path)
    (tmp_path / ".step_000004.saving" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"is no whole checkpoint: it has no manifest.json"):
        examine(tmp_path / ".step_000004.saving")


def _run(directory: Path, model: Path, steps: list[int], ended: int | None) -> None:
    """The output directory of a run with checkpoints of these steps, which ended or not."""
    for step in steps:
        path = directory / "checkpoints" / checkpoint_name(step, unfinished_step=False)
        save_training(model, path, step=step)
    if ended is not None:
        shutil.copytree(model, directory / "actor")
        write_summary(directory, {"checkpoint": "elsewhere/actor", "steps": ended})


def test_a_finished_run_gives_the_policy_of_its_end(tmp_path: Path) -> None:
    """And any other run its newest whole checkpoint; what is older is taken if it is named."""
    save_model("llama", tmp_path / "hf")
    ended = tmp_path / "ended"
    _run(ended, tmp_path / "hf", [2, 3], ended=4)
    assert identify(ended).path == ended / "actor" and identify(ended).step == 4
    assert identify(ended, role="actor").path == ended / "actor"
    assert identify(ended, step=2).path.name == "step_000002"
    with pytest.raises(CheckpointError, match=r"ended with step 4, .* --step 3 takes; .*/actor"):
        identify(ended, role="critic")
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; it has step_000002, step_"):
        identify(ended, step=4)
    assert dict(examine(ended).facts)["policy"] == f"{ended / 'actor'}, of its last step 4"
    assert dict(examine(ended).facts)["not examined"].endswith(": step_000003, step_000002")

    write_summary(ended, {"checkpoint": "elsewhere/actor", "steps": 3})
    assert identify(ended, role="critic").path.name == "step_000003"
    assert identify(ended).path == ended / "actor"
    (ended / "actor").rename(tmp_path / "moved")
    assert identify(ended).path.name == "step_000003"
    write_summary(ended, {"checkpoint": "elsewhere/actor", "steps": 2})
    assert identify(ended).path.name == "step_000003"  # it has gone on since
    write_summary(ended, {"checkpoint": "elsewhere/actor", "steps": 4})
    with pytest.raises(CheckpointError, match="newest checkpoint is step_000003, which --step 3"):
        identify(ended)

    (ended / "summary.json").write_text('{"checkpoint": "elsewhere/act')
    assert identify(ended, step=2).path.name == "step_000002"
    with pytest.raises(CheckpointError, match=r"summary\.json is damaged"):
        identify(ended)

    (ended / "summary.json").unlink()
    (ended / "checkpoints" / "step_000003").rename(ended / "checkpoints" / "step_000009")
    assert identify(ended).path.name == "step_000002"
    (reason,) = examine(ended).problems
    assert "step_000009 holds step_000003" in reason


def test_a_run_without_a_checkpoint_says_where_its_policy_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model("llama", tmp_path / "hf")
    _run(tmp_path / "run", tmp_path / "hf", [], ended=4)
    convert = [str(tmp_path / "run"), "--to", "huggingface", "--out", str(tmp_path / "out")]
    assert convert_checkpoint.main(convert) == 0
    policy = tmp_path / "run" / "actor"
    assert f"{policy}: Hugging Face model (policy), of step 4\n" in capsys.readouterr().out
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")

    with pytest.raises(CheckpointError, match=rf"no whole checkpoint; the policy .* is {policy}"):
        identify(tmp_path / "run", role="critic")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(CheckpointError, match="the models in it are actor: give one of these"):
        identify(tmp_path / "run")


@pytest.mark.parametrize("format", ["huggingface", "megatron", "training"])
def test_damage_is_found(format: str, tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    if format == "training":
        save_training(tmp_path / "hf", tmp_path / "ck")
    else:
        convert_quietly(tmp_path / "hf", tmp_path / "ck", format)
    (file,) = (
        path
        for path in (tmp_path / "ck").rglob("*")
        if path.suffix == ".distcp" or (path.suffix == ".safetensors" and path.stem != "state")
    )
    content = file.read_bytes()
    assert examine(tmp_path / "ck", every_byte=True).problems == []

    file.write_bytes(content[:-100])
    (problem, *_) = examine(tmp_path / "ck").problems
    assert file.name in problem
    with pytest.raises(MrlhfError, match=file.name):
        convert_quietly(tmp_path / "ck", tmp_path / "out", "huggingface")

    file.unlink()
    assert examine(tmp_path / "ck").problems if format != "huggingface" else True
    with pytest.raises(MrlhfError):
        convert_quietly(tmp_path / "ck", tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_flipped_bit_does_not_pass_as_whole(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "hf")
    save_training(tmp_path / "hf", tmp_path / "ck")
    file = tmp_path / "ck" / "actor" / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert examine(tmp_path / "ck").problems == []
    assert "hashes; --verify" in dict(examine(tmp_path / "ck").facts)["not verified"]
    (problem,) = examine(tmp_path / "ck", every_byte=True).problems
    assert "rank_00000.safetensors is not what was written" in problem
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is not what was written"):
        convert_quietly(tmp_path / "ck", tmp_path / "out", "huggingface")
