"""Checkpoints that were damaged on disk: refused by name, or passed over for the last good one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mrlhf.checkpoint.manifest import seal
from tests.faults import settings
from tests.faults.runs import Sequel, Undisturbed, assert_same_run

WEIGHTS = "actor/rank_00001.safetensors"


def truncate(checkpoint: Path) -> None:
    file = checkpoint / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1000] ^= 4
    file.write_bytes(content)


def change(file: Path) -> None:
    """Change one bit."""
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def delete_half(checkpoint: Path) -> None:
    for file in sorted(checkpoint.rglob("*.safetensors"))[::2]:
        file.unlink()


def lead_outside(checkpoint: Path) -> None:
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"][0]["path"] = "../../run.json"
    del manifest["xxh3"]
    file.write_bytes(seal(manifest))


def test_the_last_good_checkpoint_is_taken(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    run = Sequel(whole.setting, tmp_path / "run")
    shutil.copytree(whole.directory, run.directory)
    checkpoints = run.directory / "checkpoints"
    truncate(checkpoints / "step_000004")
    flip_a_bit(checkpoints / "step_000003")
    (checkpoints / "step_000002" / "state.json").unlink()

    ended = run.finish()
    main_rank = ended.outputs[0]
    for name, what in (
        ("step_000004", f"is damaged: {WEIGHTS} has "),
        ("step_000003", f"is damaged: {WEIGHTS} is not what was written"),
        ("step_000002", "is not whole: state.json is missing or cannot be read"),
    ):
        (line,) = [
            line for line in main_rank.splitlines() if f"{checkpoints / name} {what}" in line
        ]
        assert line.endswith("the checkpoint before it is tried")
    assert f"going on from {checkpoints / 'step_000001'}: step 1" in main_rank
    assert_same_run(run, whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, f"is damaged: {WEIGHTS} has "),
        (flip_a_bit, f"is damaged: {WEIGHTS} is not what was written"),
        (delete_half, ".safetensors is missing or cannot be read"),
        (lead_outside, "names the file '../../run.json', which is outside of the checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(
    damage: Callable[[Path], None],
    message: str,
    inputs: Path,
    undisturbed: Undisturbed,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "step_000002"
    whole = undisturbed(settings.ppo(inputs))
    shutil.copytree(whole.directory / "checkpoints" / checkpoint.name, checkpoint)
    damage(checkpoint)

    run = Sequel(whole.setting, tmp_path / "run")
    ended = run.run(keys=[f"trainer.resume={checkpoint}"])
    assert ended.codes == [2, 2], ended.text
    (error,) = [line for line in ended.text.splitlines() if " ERROR " in line]
    assert f"CheckpointError: {checkpoint}" in error
    assert message in error
    assert "Traceback" not in ended.text


def test_a_run_without_a_whole_checkpoint_is_not_begun_anew(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    run = Sequel(whole.setting, tmp_path / "run")
    shutil.copytree(whole.directory, run.directory)
    for checkpoint in (run.directory / "checkpoints").iterdir():
        flip_a_bit(checkpoint)

    for _ in range(2):
        ended = run.run()
        assert ended.codes == [2, 2], ended.text
        assert "no checkpoint in" in ended.text
        assert "trainer.overwrite=true" in ended.text
        assert run.rows() == whole.rows()


def test_a_frozen_model_that_has_changed_is_refused(
    inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.ppo(inputs))
    reference = tmp_path / "reference"
    shutil.copytree(inputs / "llama-ref", reference)
    change(reference / "model.safetensors")

    run = Sequel(whole.setting, tmp_path / "run")
    checkpoint = whole.directory / "checkpoints" / "step_000002"
    ended = run.run(keys=[f"trainer.resume={checkpoint}", f"reference.path={reference}"])
    assert ended.codes == [2, 2], ended.text
    assert f"CheckpointError: reference.path {reference} does not hold the weights" in ended.text


def test_an_adapter_is_an_input_as_a_model_is(inputs: Path, tmp_path: Path) -> None:
    """Neither another one, nor another scale, is taken when a run goes on."""
    first = tmp_path / "adapter"
    shutil.copytree(inputs / "llama-adapter", first)
    # Every layer of the adapter trains, so none is frozen.
    whole = settings.sft(inputs)
    whole = replace(whole, arguments=[*whole.arguments, "model.freeze=[]"])
    started = Sequel(whole, tmp_path / "run")
    started.finish(keys=[f"model.lora.path={first}", "trainer.total_steps=1"])
    new = Sequel(whole, tmp_path / "new")
    of_new = ["model.lora.rank=2", "trainer.total_steps=1"]
    new.finish(keys=of_new)

    flipped = tmp_path / "flipped"
    shutil.copytree(first, flipped)
    change(flipped / "adapter_model.safetensors")
    scaled = tmp_path / "scaled"
    shutil.copytree(first, scaled)
    config = json.loads((scaled / "adapter_config.json").read_text())
    (scaled / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 5}))
    cases = (
        (started, [f"model.lora.path={flipped}"], (f"model.lora.path {flipped}", str(first))),
        (started, [f"model.lora.path={scaled}"], (f"model.lora.path {scaled}", str(first))),
        (started, ["model.lora.rank=3"], ("model.lora.alpha 32.0", str(first))),
        (new, [*of_new[:1], "model.lora.alpha=16"], ("lora.alpha 16.0", "lora.alpha 32.0")),
        (new, [*of_new[:1], "model.lora.use_rslora=true"], ("rslora True", "rslora False")),
    )
    for run, keys, words in cases:
        ended = run.run(keys=["trainer.total_steps=2", *keys])
        assert ended.codes == [2, 2], ended.text
        (line,) = [line for line in ended.text.splitlines() if " ERROR " in line]
        assert "the adapter with which the run began" in line, line
        assert all(word in line for word in words), line

    elsewhere = tmp_path / "elsewhere"
    shutil.move(first, elsewhere)
    started.finish(keys=[f"model.lora.path={elsewhere}", "trainer.total_steps=2"])
