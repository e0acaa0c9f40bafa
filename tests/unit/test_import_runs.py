"""Runs of other systems keep their meaning, key by key, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mrlhf.commands import import_config
from mrlhf.config.imports.source import Source, read_source
from mrlhf.config.imports.translate import as_yaml, translate
from mrlhf.errors import ConfigError

RUNS = yaml.safe_load(Path(__file__).with_name("import_runs.yaml").read_text())


def _source(run: dict, folder: Path) -> Source:
    is_verls = "verl" in run["start"] or "recipe" in run["start"] or run.get("hydra", False)
    words = [
        f"{key}={value}".replace("=True", "=true") if is_verls else f"--{key} {value}"
        for key, value in run["keys"].items()
    ]
    words = [word if "[" not in word else word.replace("=", "='", 1) + "'" for word in words]
    file = folder / "run.sh"
    before = run.get("before", "")
    file.write_text(f"{before}\n{run['start']} {' '.join(words)} {run.get('end', '')}\n".lstrip())
    return read_source(file, None, None)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["name"].replace(" ", "_"))
def test_a_run_keeps_its_meaning(run: dict, tmp_path: Path) -> None:
    if "refused" in run:
        with pytest.raises(ConfigError, match=run["refused"]) as refusal:
            translate(_source(run, tmp_path), 8)
        assert "\n" not in str(refusal.value)
        return

    source = _source(run, tmp_path)
    result = translate(source, 8)
    assert source.world_size == run.get("ranks")
    for key, value in run.get("ours", {}).items():
        assert result.values.get(key) == value, key
    for key in run.get("told", []):
        assert result.missing.get(key), key
    notes = "\n".join(result.notes)
    assert run.get("first", "") in notes
    assert ("first" in run) == bool(notes)
    assert all(f"# first: {note}" in as_yaml(result, source.system) for note in result.notes)


@pytest.mark.parametrize(
    ("name", "text", "program"),
    [
        ("a.yaml", "packing: true\nmax_length: 9", "sft"),
        ("a.yaml", "num_generations: 4", "ppo"),
        ("a.yaml", "center_rewards_coefficient: 0.01", "rm"),
        ("a.yaml", "precompute_ref_log_probs: true\nbeta: 0.1", "dpo"),
        ("config_dpo.yaml", "beta: 0.1", "dpo"),
        ("a.yaml", "# for trl reward\nlearning_rate: 1", "rm"),
        ("a.yaml", "beta: 0.1\nmax_length: 9", None),
        ("a.yaml", "desirable_weight: 2.0\nbeta: 0.1", None),
        ("orpo.yaml", "beta: 0.1", None),
        ("a.yaml", "learning_rate: 1.0e-5", None),
    ],
)
def test_the_program_of_a_recipe_is_that_of_its_keys(
    name: str, text: str, program: str | None, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(f"model_name_or_path: /m\n{text}\n")
    if program is not None:
        assert read_source(file, None, None).program == program
        return
    with pytest.raises(ConfigError, match="--program"):
        read_source(file, None, None)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "actor_rollout_ref: &a {actor: *a}", "holds itself"),
        ("a.yaml", "actor_rollout_ref: {k: &a [*a]}", "holds itself"),
        ("a.yaml", "actor_rollout_ref: {k: " + "[" * 9000 + "]" * 9000 + "}", "recursion"),
        ("a.yaml", "policy:\n  model_name: m\ngrpo: {num_prompts_per_step: 4}", "NeMo-RL"),
        ("a.sh", "python train.py --num-rollout 3 --hf-checkpoint m", "slime"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    name: str, text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert import_config.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_values_of_another_type_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "actor_rollout_ref: {model: {path: /m}, actor: {ppo_micro_batch_size_per_gpu: .nan,"
        " optim: {betas: .nan, lr_warmup_steps_ratio: x}}}\n"
        "trainer: {save_freq: [1], total_training_steps: .inf, default_local_dir: '${now:%d}'}\n"
    )
    missing = translate(read_source(file, None, None), 8).missing
    for key in ("actor.ppo_micro_batch_size_per_gpu", "actor.optim.betas"):
        assert "no value" in missing[f"actor_rollout_ref.{key}"]
    for key in ("save_freq", "total_training_steps"):
        assert "no value" in missing[f"trainer.{key}"]
    assert "only a run could tell" in missing["trainer.default_local_dir"]
