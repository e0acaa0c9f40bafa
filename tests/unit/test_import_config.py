"""Configurations of verl, TRL and OpenRLHF become ours, and what is different is told."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlhf.commands import import_config
from mrlhf.config import PPOConfig, load_config
from mrlhf.config.imports.conversions import CONVERSIONS
from mrlhf.config.imports.source import System, read_source, read_table
from mrlhf.config.imports.translate import name_of, translate
from mrlhf.config.roots import PROGRAMS, Program
from mrlhf.config.tree import nodes
from mrlhf.preflight import dry_run
from tests.oracle import plain_models
from tests.pages import commands_of
from tests.tiny_task import write_tiny_task

VERL_KEYS = Path(__file__).with_name("verl_example_keys.txt")
VERL = """\
#!/usr/bin/env bash
set -x
MODEL=${MODEL:-ROOT/llama}
tp=${TP:-2}
prompt=$((4 + 2))
response=12
micro=${MICRO:-$((2 * (8)))}

DATA=(
    data.train_files="ROOT/data/train.jsonl"
    data.val_files="['ROOT/data/held_out.jsonl']"
    data.max_prompt_length=${prompt}
    data.max_response_length=${response}
    data.filter_overlong_prompts=True   # a remark
    data.train_batch_size=8
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    actor_rollout_ref.model.path="$MODEL" \\
    actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.betas='[0.9, 0.95]' \\
    actor_rollout_ref.actor.optim.optimizer=muon \\
    actor_rollout_ref.actor.optim.muon_momentum=0.9 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp} \\
    actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \\
    trainer.logger='["console","wandb"]' trainer.project_name=test trainer.save_freq=-1 \\
    trainer.total_training_steps=7 trainer.n_gpus_per_node=8 "$@"
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and a tokenizer of a tiny task."""
    root = tmp_path_factory.mktemp("import")
    plain_models.save_models(root)
    write_tiny_task(root / "data")
    return root


def test_a_script_of_verl_becomes_a_run(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL.replace("ROOT", str(task)))
    out = tmp_path / "ours.yaml"
    for ranks in ("8", "64"):
        out.unlink(missing_ok=True)
        [command] = commands_of("docs/coming_from_verl.md", "import_config")
        for old, new in (("SCRIPT.sh", script), ("my.yaml", out), ("size 8", f"size {ranks}")):
            command = command.replace(old, str(new))
        assert import_config.main(shlex.split(command)[2:]) == 0
        said = capsys.readouterr().out
        assert "training always samples" not in said

    config = load_config(PPOConfig, out)
    assert config.actor.path == str(task / "llama")
    assert (config.actor.tp, config.rollout.tp, config.rollout.n) == (2, 2, 5)
    assert config.rollout.engine == "native"
    assert config.data.train_files == [str(task / "data" / "train.jsonl")]
    assert (config.data.max_prompt_length, config.data.overlong_prompts) == (6, "drop")
    assert config.actor.micro_batch_tokens == 4 * (6 + 12)
    assert (config.actor.optim.adam_beta1, config.actor.optim.adam_beta2) == (0.9, 0.95)
    assert (config.actor.optim.name, config.actor.optim.muon_momentum) == ("muon", 0.9)
    assert config.actor.recompute == "full"
    assert (config.trainer.total_steps, config.trainer.save_freq) == (7, 0)
    assert config.trainer.trackers == ["wandb"]
    # What verl means where nothing is said.
    assert (config.seed, config.rollout.max_num_seqs) == (42, 1024)
    assert config.actor.sequence_parallel
    # It means something else here.
    assert config.rollout.gpu_memory_utilization == 0.9

    text = out.read_text()
    assert "seed: 42  # verl's default" in text
    assert "ppo_micro_batch_size_per_gpu: 4; it counts tokens, not samples" in text
    assert "choose it: a rule, or a function of yours" in text
    assert "there it is what the engine may take" in said
    assert "the launcher says how many processes run" in said
    assert "reward.terms" in said  # the function is still to be written


def test_the_dry_run_names_what_does_not_fit(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL.replace("ROOT", str(task)).replace("TP:-2", "TP:-3"))
    assert import_config.main([str(script)]) == 1
    said = capsys.readouterr().out
    assert "# it does not run on 8 ranks as it is:\n# actor: world size 8" in said
    assert said.startswith("seed: 42")
    assert yaml.safe_load(said)["seed"] == 42  # remarks are comments


def test_every_key_of_verls_examples_is_known() -> None:
    keys = [line for line in VERL_KEYS.read_text().splitlines() if not line.startswith("#")]
    assert len(keys) > 300
    assert [key for key in keys if name_of("verl", "ppo", key) is None] == []


def _program(trainer: str) -> Program:
    return next((program for program in PROGRAMS if program == trainer), "ppo")


@pytest.mark.parametrize("system", ["trl", "openrlhf"])
def test_tables_name_keys_and_conversions_that_exist(system: System) -> None:
    table = read_table(system)
    rows = [*table["names"]]
    for of_program in table["by_program"].values():
        rows += of_program
    for trainer, assumed in table["assumed"].items():
        program = _program(trainer)
        for theirs in assumed:
            name = name_of(system, program, theirs, trainer)
            assert name is not None and name.ours is not None, theirs
        for key in table.get("defaults", {}).get(trainer, {}):
            assert key in nodes(PROGRAMS[program]), key

    for theirs in rows:
        trainers = [*PROGRAMS, *table["by_program"]]
        found = [name_of(system, _program(trainer), theirs, trainer) for trainer in trainers]
        names = [name for name in found if name is not None and name.ours is not None]
        assert names, f"{theirs} is no key of ours in any program"
        used = {name.conversion for name in names if isinstance(name.conversion, str)}
        assert used <= CONVERSIONS.keys()
    assert not set(rows) & table["missing"].keys()


def _imported(tmp_path: Path, name: str, text: str, ranks: int = 4) -> dict[str, Any]:
    file = tmp_path / name
    file.write_text(text)
    return translate(read_source(file, None, None), ranks).values


def test_trl_on_the_command_line_and_as_yaml(tmp_path: Path) -> None:
    grpo = _imported(
        tmp_path,
        "grpo.sh",
        "accelerate launch trl grpo --model_name_or_path dir --learning_rate 1e-6 \\\n"
        " --num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \\\n"
        " --beta 0.04 --loss_type dapo --use_vllm --max_completion_length 256 --bf16 \\\n"
        " --scale_rewards none --reward_funcs rewards.py --epsilon_high 0.28\n",
    )
    # 4 ranks x 4 x 8 = 128 completions of 8 to a prompt, all of them in one optimizer step
    assert (grpo["data.train_batch_size"], grpo["actor.ppo_mini_batch_size"]) == (16, 16)
    assert (grpo["actor.kl_loss_coef"], grpo["actor.use_kl_loss"]) == (0.04, True)
    assert grpo["actor.loss_agg_mode"] == "token-mean"
    assert grpo["algorithm.norm_adv_by_std_in_grpo"] is False
    assert (grpo["rollout.engine"], grpo["rollout.n"]) == ("vllm", 8)
    assert grpo["reward.terms"] == [{"name": "rewards.py:reward_func"}]

    keys = {"model_name_or_path": "dir", "per_device_train_batch_size": 2, "beta": 0.1}
    keys |= {"gradient_accumulation_steps": 3, "lora_r": 16, "use_peft": True, "dataset": "a.jsonl"}
    dpo = _imported(tmp_path, "dpo.yaml", "# for trl dpo\n" + yaml.safe_dump(keys))
    assert (dpo["data.batch_size"], dpo["dpo.beta"]) == (24, 0.1)
    assert (dpo["model.lora.rank"], dpo["data.train_files"]) == (16, ["a.jsonl"])


def test_openrlhf(tmp_path: Path) -> None:
    ppo = _imported(
        tmp_path,
        "run.sh",
        "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path dir \\\n"
        "  --reward.model_name_or_path rm --train.batch_size 128 --rollout.batch_size 1024 \\\n"
        "  --rollout.n_samples_per_prompt 4 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \\\n"
        "  --actor.optim muon --muon.momentum 0.9 --muon.ns_steps 5 \\\n"
        "  --actor.adam.betas 0.9 0.95 --algo.kl.init_coef 0.01 --ds.tensor_parallel_size 2 \\\n"
        "  --algo.advantage.estimator group_norm --actor.gradient_checkpointing_enable \\\n"
        "  --data.prompt_dataset a.jsonl --data.max_len 3000 --rollout.max_new_tokens 2000\n",
    )

    assert (ppo["data.max_prompt_length"], ppo["data.max_response_length"]) == (1000, 2000)
    # OpenRLHF's own defaults, but not those of a critic that there is not
    assert ppo["actor.optim.weight_decay"] == 0.0
    assert "critic.optim.weight_decay" not in ppo
    assert (ppo["data.train_batch_size"], ppo["actor.ppo_mini_batch_size"]) == (1024, 32)
    assert (ppo["actor.optim.lr"], ppo["critic.optim.lr"]) == (5e-7, 9e-6)
    assert (ppo["actor.optim.name"], ppo["actor.optim.muon_momentum"]) == ("muon", 0.9)
    assert ppo["actor.optim.adam_beta2"] == 0.95
    assert (ppo["algorithm.adv_estimator"], ppo["actor.recompute"]) == ("grpo", "full")
    assert (ppo["algorithm.kl_ctrl.kl_coef"], ppo["algorithm.use_kl_in_reward"]) == (0.01, True)
    assert ppo["reward.terms"] == [{"name": "reward_model"}]
    assert ppo["actor.tp"] == 2


def test_options_in_an_array_of_a_script(tmp_path: Path) -> None:
    sft = _imported(
        tmp_path,
        "run.sh",
        "MODEL_ARGS=(\n  --model.model_name_or_path dir\n)\n"
        "ARGS=(\n  --ds.tensor_parallel_size 2\n  --model.gradient_checkpointing_enable\n)\n"
        'python -m openrlhf.cli.train_sft "${MODEL_ARGS[@]}" "${ARGS[@]}"\n',
    )
    assert (sft["model.path"], sft["model.tp"], sft["model.recompute"]) == ("dir", 2, "full")
    # What OpenRLHF takes where nothing is said.
    assert (sft["data.batch_size"], sft["optim.lr"], sft["trainer.total_epochs"]) == (128, 5e-6, 2)


def test_the_last_ppo_of_trl_becomes_a_run(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command of its `ppo_tldr.py`, with models and data that are here."""
    script = tmp_path / "my_ppo.sh"
    script.write_text(
        "accelerate launch --config_file zero2.yaml trl/experimental/ppo/ppo_tldr.py \\\n"
        f" --dataset_name {task}/data/train.jsonl \\\n"
        f" --output_dir {tmp_path}/out --per_device_train_batch_size 16 \\\n"
        " --gradient_accumulation_steps 4 --total_episodes 100000 \\\n"
        f" --model_name_or_path {task}/llama --sft_model_path {task}/llama \\\n"
        f" --reward_model_path {task}/llama-critic --local_rollout_forward_batch_size 16 \\\n"
        " --missing_eos_penalty 1.0 --stop_token eos\n"
    )
    out = tmp_path / "ppo.yaml"
    [command] = commands_of("docs/choosing.md", "import-config")
    command = command.replace("my_ppo.sh", str(script)).replace("ppo.yaml", str(out))
    # The tiny models do not reach the prompts' default length, which TRL's command does not say.
    assert import_config.main(shlex.split(command)[2:]) == 1
    assert "a response ends at the tokenizer's end token" in capsys.readouterr().out

    config = load_config(
        PPOConfig, out, ["data.max_prompt_length=6", "data.max_response_length=12"]
    )
    assert dry_run(config, 8).missing == ()
    assert config.critic.path == config.reward_model.path == str(task / "llama-critic")
    assert config.actor.path == str(task / "llama")
    assert (config.data.train_batch_size, config.trainer.total_steps) == (512, 196)
    assert config.algorithm.missing_eos_penalty == 1.0


def test_trainers_of_trl_that_are_not_grpo(tmp_path: Path) -> None:
    ppo = _imported(
        tmp_path,
        "run.sh",
        "python examples/scripts/ppo/ppo.py --model_name_or_path dir --reward_model_path rm \\\n"
        " --per_device_train_batch_size 64 --num_mini_batches 2 --missing_eos_penalty 1.0\n",
    )
    assert "algorithm.adv_estimator" not in ppo  # gae
    assert (ppo["data.train_batch_size"], ppo["actor.ppo_mini_batch_size"]) == (512, 256)
    assert (ppo["actor.ppo_epochs"], ppo["rollout.n"]) == (4, 1)
    assert ppo["actor.optim.lr"] == ppo["critic.optim.lr"] == 3e-6
    assert (ppo["algorithm.use_kl_in_reward"], ppo["algorithm.lam"]) == (True, 0.95)

    rloo = _imported(
        tmp_path, "rloo.sh", "trl rloo --model_name_or_path dir --beta 0.1 --max_steps 9"
    )
    assert (rloo["algorithm.adv_estimator"], rloo["rollout.n"]) == ("rloo", 2)
    assert (rloo["algorithm.kl_ctrl.kl_coef"], rloo["algorithm.use_kl_in_reward"]) == (0.1, True)
    assert rloo["trainer.total_steps"] == 9 and "trainer.total_epochs" not in rloo


def test_sft_of_verl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sft.sh"
    file.write_text(
        "save=$2\n"
        "torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=dir \\\n"
        " optim=megatron optim.lr=2e-5 optim.min_lr=2e-6 optim.lr_warmup_init=0 \\\n"
        " engine=megatron engine.tensor_model_parallel_size=2 engine.optimizer_offload=True \\\n"
        " engine.override_transformer_config.recompute_granularity=full \\\n"
        " data.pad_mode=no_padding data.num_workers=3 +data.unheard_of=1 \\\n"
        " trainer.default_local_dir=$save\n"
    )
    result = translate(read_source(file, None, None), 8)
    ours = result.values
    assert (ours["model.tp"], ours["model.recompute"]) == (2, "full")
    assert ours["optim.min_lr_ratio"] == 0.1
    assert result.missing["trainer.default_local_dir"] == "the script gets it as an argument"
    assert ours["model.offload"] == ["optimizer"]

    assert import_config.main([str(file)]) == 1  # the output directory is still to be named
    said = capsys.readouterr().out
    assert "not in the table of names:\n#     data.unheard_of" in said


def test_score_centering_of_verl(tmp_path: Path) -> None:
    """It is named twice there, and bypass mode a loss of its own."""
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.rollout_correction.bypass_mode=true \\\n"
        " algorithm.rollout_correction.loss_type=reinforce \\\n"
        " algorithm.rollout_correction.score_centering=true \\\n"
        " actor_rollout_ref.actor.policy_loss.rollout_correction.score_centering=true \\\n"
        " actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode \\\n"
        " actor_rollout_ref.rollout.topk_log_probs=64\n"
    )
    ours = _imported(tmp_path, "a.sh", script)
    assert ours["algorithm.rollout_correction.score_centering"] is True
    assert ours["rollout.topk_log_probs"] == 64
    assert "actor.policy_loss.loss_mode" not in ours


def test_own_rewards_have_the_names_of_their_system(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo custom_reward_function.path=own.py\n"
    assert _imported(tmp_path, "a.sh", script)["reward.terms"] == [{"name": "own.py:compute_score"}]
    script = script.strip() + " custom_reward_function.name=mine\n"
    assert _imported(tmp_path, "b.sh", script)["reward.terms"] == [{"name": "own.py:mine"}]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("absent.sh", None, "cannot be read"),
        ("other.sh", "echo hello\n", "of no system that is known"),
        ("half.sh", "python3 -m verl.trainer.main_ppo\n", "sets no key of verl"),
    ],
)
def test_what_cannot_be_imported(
    name: str, text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    assert import_config.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
