"""Cross-field checks, the batch arithmetic and the command line."""

import itertools
import json

import pytest
import torch

from mrlhf.config import DryRun, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.config.schema import keys
from mrlhf.errors import ConfigError
from mrlhf.models.families import load_spec
from mrlhf.preflight import check, check_models, describe, dry_run
from mrlhf.preflight.model_checks import cache_needs
from tests.engine_models import hf_model
from tests.unit.configurations import ppo, problems, supervised

FACTS = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


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
            {"critic__micro_batch_tokens": 99},
            "critic.micro_batch_tokens 99 is less than the longest sequence, "
            "data.max_prompt_length 40 + data.max_response_length 60 = 100 tokens; raise "
            "micro_batch_tokens to at least 100 or lower the length",
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
            {"rollout__kv_cache_mb": 64, "rollout__gpu_memory_utilization": 0.5},
            "rollout.kv_cache_mb 64 and rollout.gpu_memory_utilization 0.5 both size the KV "
            "cache; set rollout.kv_cache_mb to null or leave rollout.gpu_memory_utilization at 0.9",
        ),
        (
            {"actor__use_kl_loss": True, "actor__kl_loss_type": "full", "reference__pp": 1},
            "KL 'full' compares whole distributions rank by rank, but reference is tp 2 x pp 1 "
            "and actor tp 2 x pp 2; leave reference.tp and reference.pp out",
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
        {"algorithm__use_kl_in_reward": True, "reference__pp": 1},
        {"reward_model": {"path": "rm"}, "reward__terms": [{"name": "reward_model"}]},
        {
            "data__val_files": "v.jsonl",
            "trainer__test_freq": 5,
            "trainer__val_sampled": True,
            "trainer__val_n": 4,
        },
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


WARM = {"lr_warmup_steps": 3}


def model_dir(tmp_path, **changes):
    facts = {**FACTS, **changes}
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in facts.items() if value != "absent"})
    )
    return str(tmp_path)


def unchecked(specs):
    return [name for name, spec in specs.items() if spec is None]


def test_vllm_is_refused_for_a_model_that_it_was_not_tested_with(tmp_path):
    hf_model("phi3").config.save_pretrained(tmp_path)
    message = (
        "rollout.engine is vllm, which is not supported for a model with the family phi3; set "
        "rollout.engine=native"
    )
    with pytest.raises(ConfigError) as refusal:
        check_models(ppo(actor__path=str(tmp_path), rollout__engine="vllm"))
    assert message in str(refusal.value).splitlines()


def test_check_models_reads_config_json(tmp_path):
    path = model_dir(tmp_path)
    specs = check_models(ppo(actor__path=path, critic__path="none"))
    assert unchecked(specs) == ["critic"]
    assert list(specs) == ["actor", "critic", "rollout"]

    with pytest.raises(ConfigError, match=r"actor\.pp 4 does not fit the model's 6 layers"):
        check_models(ppo(actor__path=path, actor__pp=4))

    assert unchecked(check_models(ppo(actor__path=path, rollout__tp=8))) == []
    with pytest.raises(
        ConfigError, match=r"rollout\.tp 16 does not fit the model's 8 attention heads"
    ):
        check_models(ppo(actor__path=path, rollout__tp=16))
    with pytest.raises(
        ConfigError, match="257 tokens, is beyond the model's max_position_embeddings 256"
    ):
        check_models(ppo(actor__path=path, data__max_response_length=217))


def test_one_mistake_is_reported_once(tmp_path):
    """The reference inherits the actor's layout, and the engine runs the actor's model."""
    path = model_dir(tmp_path, hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    config = ppo(
        actor__path=path, actor__use_kl_loss=True, actor__tp=4, critic__tp=2, rollout__tp=2
    )
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    of_kv_heads = "3 key and value heads (it must divide them or be a multiple of them)"
    assert str(caught.value).splitlines() == [
        "actor.tp 4 does not fit the model's 6 attention heads; use one of 1, 3, 6",
        f"critic.tp 2 does not fit the model's {of_kv_heads}; use one of 1, 3, 6",
        f"rollout.tp 2 does not fit the model's {of_kv_heads}; use one of 1, 3, 6",
    ]

    config = ppo(
        actor__path=path, actor__use_kl_loss=True, actor__tp=6, critic__tp=1, rollout__tp=2
    )
    with pytest.raises(ConfigError, match=r"^rollout\.tp 2 .*; use one of 1, 3, 6$"):
        check_models(config)

    fitting = {"actor__tp": 1, "critic__tp": 1, "rollout__tp": 1}
    long = ppo(actor__path=path, actor__use_kl_loss=True, data__max_response_length=217, **fitting)
    with pytest.raises(ConfigError) as caught:
        check_models(long)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("actor: the data's longest sequence, 257 tokens, is beyond")


def test_the_head_of_a_model_is_that_of_its_role(tmp_path):
    path = model_dir(tmp_path)
    config = ppo(
        actor__path=path,
        actor__use_kl_loss=True,
        reward_model={"path": path, "micro_batch_tokens": 512},
        reward__terms=[{"name": "reward_model"}],
    )

    assert {name: spec.head for name, spec in check_models(config).items()} == {
        "actor": "lm",
        "critic": "scalar",
        "reference": "lm",
        "reward_model": "scalar",
        "rollout": "lm",
    }

    assert check_models(supervised(SFTConfig, model__path=path))["model"].head == "lm"
    assert check_models(supervised(RewardModelConfig, model__path=path))["model"].head == "scalar"


def test_config_json_without_key_and_value_heads(tmp_path):
    path = model_dir(tmp_path, num_key_value_heads="absent")
    assert unchecked(check_models(supervised(SFTConfig, model__path=path, model__tp=8))) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported; supported are"),
        ({"model_type": "my_decoder"}, "my_decoder"),
        ({"hidden_act": "gelu"}, "only silu is supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not"),
        ({"num_hidden_layers": "absent"}, "num_hidden_layers"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_once_in_one_line(tmp_path, changes, what):
    config = ppo(actor__path=model_dir(tmp_path, **changes))  # the critic's path too
    for refuse in (check_models, lambda config: dry_run(config, 8)):
        with pytest.raises(ConfigError) as caught:
            refuse(config)
        (line,) = str(caught.value).splitlines()
        assert line.startswith("actor: ") and what in line


def test_a_refused_model_does_not_hide_the_mistakes_of_others(tmp_path):
    good = tmp_path / "good"
    bad = tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    config = ppo(
        actor__path=model_dir(good),
        actor__pp=4,
        critic__path=model_dir(bad, model_type="gemma2"),
    )
    with pytest.raises(ConfigError) as caught:
        check_models(config)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["critic:", "actor.pp"]


def test_the_kv_cache_holds_one_sequence_at_least(tmp_path):
    path = model_dir(tmp_path, num_hidden_layers=64, head_dim=256)
    changes = {"actor__path": path, "critic__path": "none", "rollout__block_size": 16}
    on_cpu = {"distributed__device": "cpu"}
    changes["distributed__device"] = "cuda"

    with pytest.raises(ConfigError) as caught:
        check_models(ppo(**changes, rollout__kv_cache_mb=13))
    # 100 tokens are 7 blocks of 16; of the 4 KV heads, a rank of 2 has 2; a GPU has bfloat16
    assert str(caught.value) == (
        "rollout.kv_cache_mb 13 = 13631488 bytes is less than one sequence needs, 2 x 64 layers x "
        "2 KV heads x 256 x 2 bytes x 112 tokens = 14680064 bytes; set rollout.kv_cache_mb to at "
        "least 14 or lower the data's maximum lengths"
    )
    check_models(ppo(**changes, rollout__kv_cache_mb=14))
    for float32 in ({"actor__dtype": "float32"}, on_cpu):
        with pytest.raises(
            ConfigError, match=r"= 29360128 bytes; set rollout\.kv_cache_mb to at least 28 or"
        ):
            check_models(ppo(**{**changes, **float32}, rollout__kv_cache_mb=14))

    # with more ranks than heads, each rank holds one head
    with pytest.raises(
        ConfigError, match=r"x 1 KV heads x 256 x 2 bytes x 112 tokens = 7340032 bytes"
    ):
        check_models(ppo(**changes, rollout__tp=8, rollout__kv_cache_mb=6))


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
        "a sample",
        "  a sample: <= 40 prompt + 60 response = 100 tokens; the step: <= 12800 tokens",
        "  actor: 4 mini-batches x 2 epochs = 8 optimizer steps",
        "    a mini-batch: 16 prompts x 2 = 32 samples, at full length 16 a data-parallel rank "
        "and 5 a micro-batch: 4 micro-batches",
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


def test_an_epoch_counts_the_prompts_that_a_step_takes():
    filters = {"algorithm__filter_groups": {"enable": True}, "algorithm__adv_estimator": "grpo"}
    config = ppo(trainer__total_steps=None, data__gen_batch_size=96, **filters)
    assert describe(config, 8).splitlines()[-1] == "  1 epoch x (rows // 96) training steps"


def test_dry_run_checks_first(tmp_path):
    paths = {
        "actor__path": model_dir(tmp_path),
        "critic__path": "none",
        "data__tokenizer": "tokenizer",
    }

    text = dry_run(ppo(**paths), 8)
    assert text.endswith(
        "not checked, not on this machine: critic.path none\n"
        "not checked, not on this machine: data.tokenizer tokenizer\n"
        "not checked, not on this machine: data.train_files a.jsonl\n"
        "not checked, not on this machine: the weights of actor\n"
        "what could be checked fits 8 ranks"
    )
    assert (
        "the KV cache of a rank on a CPU\n"
        "  a sample at full length: 2 x 6 layers x 2 KV heads x 8 x 4 bytes x 112 tokens = 86016 "
        "bytes\n  rollout.kv_cache_mb 1 = 1048576 bytes: 12 samples at full length\n"
    ) in dry_run(ppo(**paths, rollout__kv_cache_mb=1, distributed__device="cpu"), 8)

    on_gpu = dry_run(ppo(**paths, distributed__device="cuda"), 8)
    assert "the KV cache of a rank on a GPU\n" in on_gpu
    assert "2 KV heads x 8 x 2 bytes x 256 tokens = 98304 bytes\n" in on_gpu
    assert "KV cache in blocks of 256 tokens, <= 1 a sample" in on_gpu

    with pytest.raises(ConfigError):
        dry_run(ppo(), 6)


ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]


def test_a_critic_that_is_not_built_is_not_checked(tmp_path):
    wrong = {"critic__tp": 3, "critic__micro_batch_tokens": 1, "critic__ppo_mini_batch_size": 48}
    wrong["critic__optim"] = {"lr_warmup_steps": 10}
    assert len(problems(ppo(**wrong), 8)) == 4
    paths = {"actor__path": model_dir(tmp_path), "data__tokenizer": "tokenizer"}
    text = dry_run(ppo(**wrong, **paths, algorithm__adv_estimator="grpo"), 8)
    assert "critic.path" not in text
    assert "  no critic: grpo needs none\n  rewards: scores\n  advantages: grpo\n" in text
    assert "  critic" not in text


def test_later_files_override(tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 5\nactor: {tp: 2}\n")
    (tmp_path / "b.yaml").write_text("actor: {pp: 3}\n")
    files = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    config, _ = parse_args(PPOConfig, [*files, *ARGUMENTS, "seed=7"])
    assert (config.seed, config.actor.tp, config.actor.pp) == (7, 2, 3)


def test_parse_args_mixes_options_and_keys(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 5\nactor: {tp: 2, pp: 3}\ncritic: {pp: 4}\n")
    config, dry = parse_args(PPOConfig, ["seed=6", "--config", str(file), *ARGUMENTS])
    assert (config.seed, dry) == (6, None)
    assert parse_args(PPOConfig, [*ARGUMENTS, "--dry-run", "--config", str(file), "seed=8"])[
        1
    ] == DryRun(None)
    assert parse_args(PPOConfig, [*ARGUMENTS, "--dry-run", "--world-size", "24"])[1] == DryRun(24)
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


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("bfloat16_instructions", [False, True])
def test_the_cache_is_what_the_engine_takes_on_this_machine(
    tmp_path, monkeypatch, has_gpu, bfloat16_instructions
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16_instructions)

    spec = load_spec(model_dir(tmp_path), "lm")
    widened = not (has_gpu or bfloat16_instructions)
    found = {}
    for dtype, engine in itertools.product(("auto", "bfloat16", "float32"), ("native", "vllm")):
        config = ppo(actor__dtype=dtype, rollout__engine=engine)
        found[dtype, engine] = cache_needs(config, spec).shape.itemsize

    assert found == {
        ("auto", "native"): 2 if has_gpu else 4,
        ("auto", "vllm"): 2 if has_gpu else 4,
        ("bfloat16", "native"): 4 if widened else 2,
        ("bfloat16", "vllm"): 2,
        ("float32", "native"): 4,
        ("float32", "vllm"): 4,
    }


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
