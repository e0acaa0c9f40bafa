"""What must hold between keys and the number of ranks, the batch arithmetic and the command line.

The checks that read a model's `config.json` are tested in `test_model_checks`.
"""

import pytest

from mrlhf.config import DryRun, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.config.schema import keys
from mrlhf.errors import ConfigError
from mrlhf.preflight import check, describe
from tests.unit.configurations import ppo, problems, supervised

ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]
WARM = {"lr_warmup_steps": 3}


def test_configurations_that_fit_pass():
    check(ppo(), 8)
    check(ppo(), 4)
    check(
        ppo(critic__ppo_mini_batch_size=32, rollout__n=1), 12
    )  # 32 samples over 6 ranks: uneven, but none is idle
    check(supervised(SFTConfig), 4)
    check(supervised(RewardModelConfig), 4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"critic__tp": 3},
            "critic: world size 8 is not divisible by tp 3 x pp 1 = 3; start a multiple of 3 "
            "processes or change critic.tp or critic.pp",
        ),
        (
            {"actor__sequence_parallel": True, "actor__tp": 1},
            "actor.sequence_parallel is on with actor.tp 1; raise actor.tp or turn it off",
        ),
        (
            {"critic__vpp": 2},
            "critic.vpp 2 takes turns between ranks of a pipeline, but critic.pp is 1; raise "
            "critic.pp or leave critic.vpp at 1",
        ),
        (
            {"actor__vpp": 2, "actor__pp_layers": [3, 3], "actor__use_kl_loss": True},
            "actor.pp_layers [3, 3] has 2 numbers, but actor.pp 2 x actor.vpp 2 = 4; give one for "
            "each virtual stage",
        ),
        (
            {"actor__vpp": 2, "actor__pp_layers": [0, 3, 0, 1]},
            "actor.pp_layers [0, 3, 0, 1] leaves virtual stage 2 nothing to do; only the first and "
            "the last, which have the embedding and the output layer, may have 0 layers",
        ),
        (
            {"critic__micro_batch_tokens": 99},
            "critic.micro_batch_tokens 99 is less than the longest sequence, "
            "data.max_prompt_length 40 + data.max_response_length 60 = 100 tokens; raise "
            "micro_batch_tokens to at least 100 or lower the length",
        ),
        (
            {"critic__cp": 2, "critic__tp": 1, "critic__micro_batch_tokens": 98},
            "critic.micro_batch_tokens 98 is less than the longest sequence, "
            "data.max_prompt_length 40 + data.max_response_length 60 = 100 tokens; raise "
            "micro_batch_tokens to at least 100 or lower the length",
        ),
        (
            {"critic__cp": 4, "critic__tp": 1, "critic__micro_batch_tokens": 100},
            "critic.micro_batch_tokens 100 is less than the longest sequence, "
            "data.max_prompt_length 40 + data.max_response_length 60 = 100 tokens, padded to 104 "
            "for critic.cp 4; raise micro_batch_tokens to at least 104 or lower the length",
        ),
        (
            {"critic__cp": 8},
            "critic: world size 8 is not divisible by tp 2 x cp 8 x pp 1 = 16; start a multiple of "
            "16 processes or change critic.tp, critic.cp or critic.pp",
        ),
        (
            {"critic__ppo_mini_batch_size": 48},
            "data.train_batch_size 64 is not divisible by critic.ppo_mini_batch_size 48; set "
            "critic.ppo_mini_batch_size to 32, or the train batch to a multiple of 48",
        ),
        (
            {"critic__ppo_mini_batch_size": 1},
            "critic.ppo_mini_batch_size 1 x rollout.n 2 = 2 samples are fewer than the "
            "data-parallel size 4 of critic; set critic.ppo_mini_batch_size to at least 2 or "
            "raise critic.tp",
        ),
        (
            {
                "data__train_batch_size": 2,
                "actor__ppo_mini_batch_size": 2,
                "actor__use_kl_loss": True,
                "reference": {"tp": 1, "pp": 1},
            },
            "data.train_batch_size 2 x rollout.n 2 = 4 samples are fewer than the data-parallel "
            "size 8 of reference; set data.train_batch_size to at least 4 or raise reference.tp",
        ),
        (
            {"rollout__tp": 8},
            "rollout.tp 8 does not divide actor.tp 2 x actor.pp 2 = 4; use one of 1, 2, 4",
        ),
        (
            {"rollout__tp": 4, "rollout__ep": 3},
            "rollout.ep 3 does not divide rollout.tp 4; use one of 1, 2, 4",
        ),
        (
            {"rollout__kv_cache_mb": 64, "rollout__gpu_memory_utilization": 0.5},
            "rollout.gpu_memory_utilization 0.5 has no effect, since rollout.kv_cache_mb sizes the "
            "KV cache; leave it at 0.9, or set that to null",
        ),
        (
            {"actor__use_kl_loss": True, "actor__kl_loss_type": "full", "reference__pp": 1},
            "KL 'full' compares whole distributions rank by rank, but reference is tp 2 x pp 1 "
            "and actor tp 2 x pp 2; leave reference.tp, reference.cp, "
            "reference.pp, reference.ep and reference.etp out",
        ),
        (
            {
                "actor__use_kl_loss": True,
                "actor__kl_loss_type": "full",
                "reference__sequence_parallel": True,
            },
            "KL 'full' runs reference on the packs of actor, and without actor.sequence_parallel "
            "these are not padded for reference.sequence_parallel; turn both on or both off",
        ),
        (
            {"reward__terms": [{"name": "gsm8k"}, {"name": "gsm8k"}]},
            "reward.terms holds 'gsm8k' 2 times; keep one and add the weights",
        ),
        (
            {"reward__terms": [{"name": "reward_model"}]},
            "reward.terms holds 'reward_model' but there is no such model; set reward_model.path "
            "or remove the term",
        ),
        (
            {"reward_model": {"path": "rm"}},
            "reward_model is set but no reward term uses it; add {name: reward_model} to "
            "reward.terms or remove it",
        ),
        (
            {"trainer__test_freq": 5},
            "trainer.test_freq 5 needs data to validate on, but data.val_files is empty; give "
            "files, or leave the key out",
        ),
        (
            {"trainer__val_sampled": True},
            "trainer.val_sampled true needs data to validate on, but data.val_files is empty; give "
            "files, or leave the key out",
        ),
        (
            {"trainer__val_n": 4},
            "trainer.val_n 4 has no effect, since trainer.val_sampled is false; leave it at 1, or "
            "turn that on",
        ),
        (
            {
                "data__gen_batch_size": 3,
                "actor__ppo_mini_batch_size": 64,
                "algorithm__filter_groups": {"enable": True, "max_num_gen_batches": 30},
                "reward_model": {"path": "rm"},
                "reward__terms": [{"name": "reward_model"}],
            },
            "data.gen_batch_size 3 x rollout.n 2 = 6 samples are fewer than the data-parallel "
            "size 8 of reward_model; set data.gen_batch_size to at least 4 or raise "
            "reward_model.tp",
        ),
        (
            {"trainer__critic_warmup": 11},
            "trainer.critic_warmup 11 would end after trainer.total_steps 10; lower the first or "
            "raise the second",
        ),
        (
            {"critic__optim": {"lr_warmup_steps": 10}},
            "critic.optim.lr_warmup_steps 10 would end after trainer.total_steps 10; lower the "
            "first or raise the second",
        ),
    ],
)
def test_each_mistake_is_one_line_with_numbers_and_remedy(changes, expected):
    assert problems(ppo(**changes), 8) == [expected]


@pytest.mark.parametrize(
    "changes",
    [
        {"reference__pp": 1},  # no KL in use
        {"actor__use_kl_loss": True, "actor__kl_loss_type": "full"},
        {
            "actor__use_kl_loss": True,
            "actor__kl_loss_type": "full",
            "actor__sequence_parallel": True,
            "reference__sequence_parallel": True,
        },
        {"algorithm__use_kl_in_reward": True, "reference__pp": 1},
        {"reward_model": {"path": "rm"}, "reward__terms": [{"name": "reward_model"}]},
        {
            "data__val_files": "v.jsonl",
            "trainer__test_freq": 5,
            "trainer__val_sampled": True,
            "trainer__val_n": 4,
        },
        {"data__test_files": "t.jsonl", "trainer__val_sampled": True},
        {"trainer__critic_warmup": 10},
        {"rollout__max_prefill_tokens": 1},  # longer prompts are computed in chunks
        {"rollout__kv_cache_mb": 64},
        {"rollout__gpu_memory_utilization": 0.5, "rollout__stop": ["</answer>", "\n\n"]},
    ],
)
def test_what_resembles_a_mistake_passes(changes):
    check(ppo(**changes), 8)


def test_full_kl_in_the_reward_needs_equal_layouts_too():
    config = ppo(algorithm__use_kl_in_reward=True, algorithm__kl_penalty="full", reference__tp=1)
    assert problems(config, 8)[0].startswith("KL 'full'")


def test_several_mistakes_are_all_told():
    lines = problems(ppo(rollout__top_p=0.5, rollout__tp=3, trainer__test_freq=1), 6)
    assert [line.split()[0] for line in lines] == [
        "actor:",
        "rollout.tp",
        "rollout.top_k",
        "trainer.test_freq",
    ]
    assert problems(ppo(), 0) == ["world size 0 is below 1; start at least one process"]


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        (
            {"data__max_prompt_length": 9000},
            8,
            "actor.micro_batch_tokens 512 and critic.micro_batch_tokens 512 are less than the "
            "longest sequence, data.max_prompt_length 9000 + data.max_response_length 60 = 9060",
        ),
        ({"data__train_batch_size": 65}, 8, "data.train_batch_size 65 is not divisible by actor."),
        ({"actor__tp": 3, "rollout__tp": 1, "critic__tp": 1}, 8, "actor: world size 8 is not "),
        (
            {"actor__tp": 3, "critic__tp": 1, "rollout__tp": 1, "actor__use_kl_loss": True},
            8,
            "actor: world size 8 is not divisible",
        ),
        ({"critic__ppo_mini_batch_size": 4, "critic__tp": 3}, 8, "critic: world size 8 is not"),
        (
            {"actor__ppo_mini_batch_size": 1, "critic__tp": 1, "critic__pp": 1},
            8,
            "critic.ppo_mini_batch_size 1 x rollout.n 2 = 2 samples are fewer than the "
            "data-parallel size 8 of critic",
        ),
        (
            {"trainer__total_steps": 1, "trainer__critic_warmup": 5, "actor__optim": WARM},
            8,
            "trainer.critic_warmup 5 and actor.optim.lr_warmup_steps 3 would end after "
            "trainer.total_steps 1; ",
        ),
        (
            {
                "rollout__n": 1,
                "algorithm__adv_estimator": "grpo",
                "algorithm__reward_norm": "group",
                "algorithm__filter_groups": {"enable": True},
            },
            8,
            "algorithm.adv_estimator grpo compares the answers to a prompt, but rollout.n is 1",
        ),
    ],
)
def test_one_cause_is_one_line(changes, world_size, expected):
    (line,) = problems(ppo(**changes), world_size)
    assert line.startswith(expected)


def test_supervised_checks():
    check(supervised(SFTConfig, data__batch_size=5), 8)
    assert problems(supervised(SFTConfig, data__batch_size=3), 8) == [
        "data.batch_size 3 is less than the data-parallel size 4 of model; set data.batch_size to "
        "at least 4 or raise model.tp"
    ]

    pair = supervised(RewardModelConfig, model__micro_batch_tokens=255)
    assert problems(pair, 2)[0].startswith(
        "model.micro_batch_tokens 255 is less than the longest pair of sequences, 2 x "
        "data.max_length 128 = 256 tokens; "
    )

    check(supervised(SFTConfig, model__micro_batch_tokens=255), 2)
    check(supervised(RewardModelConfig, trainer__test_freq=1), 2)
    assert (
        len(
            problems(
                supervised(RewardModelConfig, trainer__test_freq=1, data__held_out_fraction=0.0), 2
            )
        )
        == 1
    )


def test_describe_ppo():
    assert describe(ppo(trainer__critic_warmup=3, actor__ppo_epochs=2), 8).splitlines() == [
        "PPO on 8 ranks",
        "  actor        tp 2 x pp 2 x dp 2, 512 tokens a micro-batch",
        "  critic       tp 2 x pp 1 x dp 4, 512 tokens a micro-batch",
        "  rollout      tp 2 x 4 replicas, native engine",
        "the method",
        "  rewards: scores",
        "  advantages: gae, gamma 1.0, lambda 1.0",
        "  policy loss: vanilla, clip -0.2 +0.2, dual clip 3",
        "  aggregation: token-mean",
        "  rollout correction: none, the mismatch is only measured",
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
    for key in keys(root):
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


@pytest.mark.parametrize("key", ["keep_best", "export_best"])
@pytest.mark.parametrize("name", ["foo", "acc@1", "val", "val/", "/val/x", "vall/x", "sft/loss"])
def test_names_that_no_metric_has(key, name):
    said = problems(ppo(**{f"trainer__{key}": name}), 8)
    assert len(said) == 1
    start = f"trainer.{key} is {name}, which is no metric of this run; their names begin with actor"
    assert said[0].startswith(start)


def test_no_step_is_chosen_by_the_test_files():
    said = problems(ppo(trainer__keep_best="test_sampled/sum/acc@1"), 8)
    assert len(said) == 1 and said[0].endswith("use val_sampled/sum/acc@1")


def test_names_that_a_metric_may_have():
    for name in ("val/openai/gsm8k/acc@1", "val_sampled/x/acc@1", "response_length/mean"):
        check(ppo(trainer__keep_best=name), 8)
    check(supervised(SFTConfig, trainer__export_best="sft/loss"), 2)
    check(supervised(RewardModelConfig, trainer__export_best="rm/accuracy"), 2)
    said = problems(supervised(SFTConfig, trainer__export_best="rm/loss"), 2)
    assert said == [
        "trainer.export_best is rm/loss, which is no metric of this run; their names begin with "
        "sft/, perf/, timing_s/, val/"
    ]
