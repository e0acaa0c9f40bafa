"""What is said of a configuration before a run, the command line, and the help.

What is refused is a row of `refusals.txt`.
"""

import pytest

from mrlhf.config import DryRun, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.config.tree import nodes
from mrlhf.errors import ConfigError
from mrlhf.preflight import describe
from tests.unit.configurations import ppo, supervised

ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]


def test_describe_ppo():
    assert describe(ppo(trainer__critic_warmup=3, actor__ppo_epochs=2), 8).splitlines() == [
        "PPO on 8 ranks",
        "  actor        tp 2 x pp 2 x dp 2, 512 tokens a micro-batch",
        "  critic       tp 2 x pp 1 x dp 4, 512 tokens a micro-batch",
        "  rollout      tp 2 x 4 replicas, native engine",
        "the method",
        "  advantages: gae, whitened",
        "  policy loss: vanilla, aggregation: token-mean",
        "  with all other keys at their defaults",
        "each training step",
        "  64 prompts x 2 = 128 samples, 32 a replica if equally long, 256 decoded at once",
        "  prompts are computed in steps of <= 8192 tokens; KV cache in blocks of 16 tokens, <= 7 "
        "blocks per sample",
        "  a sample: <= 40 prompt + 60 response = 100 tokens; the step: <= 12800 tokens",
        "  actor: 4 mini-batches x 2 epochs = 8 optimizer steps",
        "    a mini-batch: 16 prompts x 2 = 32 samples, at full length 16 a data-parallel rank "
        "and 5 a micro-batch: 4 micro-batches, pipeline bubble 20%",
        "  critic: 4 mini-batches x 2 epochs = 8 optimizer steps",
        "    a mini-batch: 16 prompts x 2 = 32 samples, at full length 8 a data-parallel rank "
        "and 5 a micro-batch: 2 micro-batches",
        "the run",
        "  10 training steps (trainer.total_steps)",
        "  the actor is trained from step 3 on (trainer.critic_warmup)",
    ]


def test_describe_supervised():
    lines = describe(supervised(RewardModelConfig, trainer__total_epochs=3), 4).splitlines()

    assert lines == [
        "RewardModel on 4 ranks",
        "  model        tp 2 x pp 1 x dp 2, 256 tokens a micro-batch",
        "each optimizer step",
        "  16 pairs of <= 256 tokens, at full length 8 a data-parallel rank and 1 a micro-batch: "
        "8 micro-batches",
        "the run",
        "  3 epochs x (rows // 16) training steps",
    ]

    assert (
        describe(supervised(SFTConfig), 4).splitlines()[-1]
        == "  1 epoch x (rows // 16) training steps"
    )
    assert (
        describe(supervised(SFTConfig, trainer__min_steps=9), 4).splitlines()[-1]
        == "  1 epoch x (rows // 16), at least 9 training steps"
    )


def test_an_epoch_counts_the_prompts_that_a_step_takes():
    filters = {"algorithm__filter_groups": {"enable": True}, "algorithm__adv_estimator": "grpo"}
    config = ppo(trainer__total_steps=None, data__gen_batch_size=96, **filters)
    assert describe(config, 8).splitlines()[-1] == "  1 epoch x (rows // 96) training steps"


def test_later_files_override(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 5\nactor: {tp: 2}\n")
    (tmp_path / "b.yaml").write_text("actor: {pp: 3}\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    config, *_ = parse_args(PPOConfig, [*files, *ARGUMENTS, "seed=7"])
    assert (config.seed, config.actor.tp, config.actor.pp) == (7, 2, 3)


def test_parse_args_mixes_options_and_keys(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 5\nactor: {tp: 2, pp: 3}\ncritic: {pp: 4}\n")
    config, dry, _ = parse_args(PPOConfig, ["seed=6", "--config", str(file), *ARGUMENTS])
    assert (config.seed, dry) == (6, None)
    assert parse_args(PPOConfig, [*ARGUMENTS, "--dry-run", "--config", str(file), "seed=8"])[
        1
    ] == DryRun(None)
    assert parse_args(PPOConfig, [*ARGUMENTS, "--dry-run", "--world-size", "24"])[1] == DryRun(24)
    asked = parse_args(PPOConfig, [*ARGUMENTS, "--dry-run", "--allow-missing"])[1]
    assert asked == DryRun(None, allow_missing=True)
    with pytest.raises(ConfigError, match="--allow-missing goes with --dry-run only"):
        parse_args(PPOConfig, [*ARGUMENTS, "--allow-missing"])
    with pytest.raises(ConfigError, match="--world-size goes with --dry-run only"):
        parse_args(PPOConfig, [*ARGUMENTS, "--world-size", "2"])


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, RewardModelConfig])
def test_help_lists_every_key_with_its_doc(root, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(root, ["--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    for key in nodes(root).values():
        assert key.name in said
        assert key.doc, f"{key.name} has no description"
        assert key.doc in said
    assert "trainer.output_dir = required  (str)" in said


def test_help_shows_defaults_and_where_they_come_from(capsys):
    with pytest.raises(SystemExit):
        parse_args(PPOConfig, ["--help"])
    said = capsys.readouterr().out
    assert "  actor.clip_ratio = 0.2  (float)" in said
    assert "  critic.path = actor.path  (str)" in said
    assert "  actor.dtype = auto  (auto | float32 | bfloat16)" in said
    assert "  trainer.total_steps = null  (int | null)" in said
