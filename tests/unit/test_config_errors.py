"""What cannot be read as a configuration: one-line errors that name the key or the file."""

import os

import pytest

from mrlhf.config import PPOConfig, SFTConfig, flatten, load_config, verl_names
from mrlhf.config.schema import keys
from mrlhf.errors import ConfigError
from tests.unit.config_files import PPO, load_text, message, write


@pytest.mark.parametrize("text", ["1_000", "1:30", "010"])
def test_what_yaml_1_1_alone_calls_a_number_is_none(tmp_path, text):
    assert message(tmp_path, PPO, f"seed={text}") == (
        f"bad value '{text}' for 'seed': input should be a valid integer"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.clip_rato=1", "unknown key 'actor.clip_rato'; did you mean 'actor.clip_ratio'?"),
        (
            "actor.optim.weight_deca=1",
            "unknown key 'actor.optim.weight_deca'; did you mean 'actor.optim.weight_decay'?",
        ),
        ("actr.tp=2", "unknown key 'actr.tp'; did you mean 'actor.tp'?"),
        ("actor.lr=1", "unknown key 'actor.lr'; did you mean 'actor.optim.lr'?"),
        ("kl_coef=1", "unknown key 'kl_coef'; did you mean 'algorithm.kl_ctrl.kl_coef'?"),
        (
            "reward.terms.0.wait=1",
            "unknown key 'reward.terms.0.wait'; did you mean 'reward.terms.0.weight'?",
        ),
        ("zzzzzz=1", "unknown key 'zzzzzz'; --help lists all keys"),
        (
            "reward.terms.3.weight=1",
            "cannot set 'reward.terms.3.weight': the file's list has 1 items, numbered from 0",
        ),
        ("actor.tp", "argument 'actor.tp' is not of the form key.path=value"),
        (
            "b.yaml",
            "argument 'b.yaml' is not of the form key.path=value; to read it as a file, write "
            "--config b.yaml",
        ),
        (
            "actor.loss_mode=gspo",
            "unknown key 'actor.loss_mode'; did you mean 'actor.policy_loss.loss_mode'?",
        ),
        (
            "actor.loss_aggmode=a",
            "unknown key 'actor.loss_aggmode'; did you mean 'actor.loss_agg_mode'?",
        ),
        (
            "actor_rollout_ref.actor.clip_ratio=0.1",
            "unknown key 'actor_rollout_ref.actor.clip_ratio'; verl's "
            "'actor_rollout_ref.actor.clip_ratio' is 'actor.clip_ratio' here",
        ),
        (
            "actor_rollout_ref.rollout.n=4",
            "unknown key 'actor_rollout_ref.rollout.n'; verl's 'actor_rollout_ref.rollout.n' is "
            "'rollout.n' here",
        ),
        (
            "actor_rollout_ref.ref.dtype=bfloat16",
            "unknown key 'actor_rollout_ref.ref.dtype'; verl's 'actor_rollout_ref.ref.dtype' is "
            "'reference.dtype' here",
        ),
        (
            "actor_rollout_ref.actor.lr=1",
            "unknown key 'actor_rollout_ref.actor.lr'; verl's 'actor_rollout_ref.actor' is "
            "'actor' here; did you mean 'actor.optim.lr'?",
        ),
        (
            "actor_rollout_ref.model.path=m",
            "unknown key 'actor_rollout_ref.model.path'; verl's 'actor_rollout_ref.model.path' is "
            "'actor.path' here",
        ),
        (
            "trainer.default_local_dir=out",
            "unknown key 'trainer.default_local_dir'; verl's 'trainer.default_local_dir' is "
            "'trainer.output_dir' here",
        ),
        (
            "trainer.logger=[wandb]",
            "unknown key 'trainer.logger'; verl's 'trainer.logger' is 'trainer.trackers' here; "
            "the console is "
            "always on; list the others, such as [wandb]",
        ),
        (
            "algorithm.filter_groups.max_inflight_gen_batches=2",
            "unknown key 'algorithm.filter_groups.max_inflight_gen_batches'; verl's "
            "'algorithm.filter_groups.max_inflight_gen_batches' has no counterpart here: all ranks "
            "generate one batch after another and stop as soon as enough prompts are left, as with "
            "1 there",
        ),
        (
            "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
            "unknown key 'actor_rollout_ref.actor.calculate_sum_pi_squared'; verl's "
            "'actor_rollout_ref.actor.calculate_sum_pi_squared' has no counterpart here: it is "
            "computed where algorithm.adv_estimator needs it",
        ),
        (
            "n_gpus_per_node=8",
            "unknown key 'n_gpus_per_node'; verl's 'n_gpus_per_node' has no counterpart here: the "
            "launcher says how many processes run: torchrun --nnodes=... --nproc-per-node=...",
        ),
        (
            "critic.ppo_micro_batch_size_per_gpu=4",
            "unknown key 'critic.ppo_micro_batch_size_per_gpu'; verl's "
            "'critic.ppo_micro_batch_size_per_gpu' is 'critic.micro_batch_tokens' here; it counts "
            "tokens, not samples",
        ),
        (
            "actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather=true",
            "unknown key "
            "'actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather'; verl's "
            "'actor_rollout_ref.actor.megatron.override_ddp_config.overlap_param_gather' is "
            "'actor.optim.overlap_param_gather' here",
        ),
        (
            "critic.model.lora.rank=4",
            "unknown key 'critic.model.lora.rank'; verl's 'critic.model.lora.rank' has no "
            "counterpart here: there is no LoRA",
        ),
        (
            "actor={optim.lr: 1}",
            "unknown key 'actor.optim.lr'; its name holds a dot: nest it, as actor: {optim: {lr: "
            "...}}",
        ),
        ("actor={pth: m}", "unknown key 'actor.pth'; did you mean 'actor.path'?"),
    ],
)
def test_wrong_arguments(tmp_path, override, expected):
    assert message(tmp_path, PPO, override) == expected


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "clip_ratio:",
            "clip_rato:",
            "unknown key 'actor.clip_rato'; did you mean 'actor.clip_ratio'?",
        ),
        ("{lr: 1e-4}", "{l: 1}", "unknown key 'actor.optim.l'; did you mean 'actor.optim.lr'?"),
        ("critic:", "critics:", "unknown key 'critics'; did you mean 'critic'?"),
        (
            "{name: gsm8k}",
            "{name: gsm8k, wait: 1}",
            "unknown key 'reward.terms.0.wait'; did you mean 'reward.terms.0.weight'?",
        ),
    ],
)
def test_unknown_keys_in_the_file(tmp_path, old, new, expected):
    assert message(tmp_path, PPO.replace(old, new)) == f"{tmp_path / 'config.yaml'}: {expected}"


def test_dots_in_the_keys_of_a_file(tmp_path):
    dotted = PPO + "critic.tp: 2\ntrainer.save_frq: 3\n"
    file = tmp_path / "config.yaml"
    assert message(tmp_path, dotted).splitlines() == [
        f"{file}: unknown key 'critic.tp'; its name holds a dot: nest it, as critic: {{tp: ...}}",
        f"{file}: unknown key 'trainer.save_frq'; did you mean 'trainer.save_freq'?",
    ]


@pytest.mark.parametrize(
    ("theirs", "hint"),
    [
        ("critic.enable", "algorithm.adv_estimator decides whether there is a critic"),
        ("actor_rollout_ref.actor.optim.muon_momentum", "the optimizer is AdamW"),
        ("actor_rollout_ref.rollout.do_sample", "training always samples; validation is greedy"),
        ("actor_rollout_ref.model.use_liger", ""),
        ("distillation.enabled", ""),
        ("reward.num_workers", "each rank scores its share of the responses"),
        ("actor_rollout_ref.ref.megatron.param_offload", verl_names._NO_OFFLOAD),
        ("+actor_rollout_ref.actor.megatron.use_mbridge", verl_names._WEIGHTS),
        ("model_engine", verl_names._MEGATRON),
    ],
)
def test_a_key_of_verl_without_counterpart_suggests_no_other(theirs, hint):
    known = {key.name for key in keys(PPOConfig)}
    wanted = f"verl's '{theirs}' has no counterpart here" + (f": {hint}" if hint else "")
    assert verl_names.verl_hint(theirs, known) == wanted


@pytest.mark.parametrize(
    "ours", ["actor.optim.lrr", "rollout.stp", "data.train_file", "critic.tpp"]
)
def test_a_misspelt_key_of_ours_is_not_taken_for_one_of_verl(ours):
    assert verl_names.verl_hint(ours, {key.name for key in keys(PPOConfig)}) is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity",
            "'actor.recompute' here; none, full, core_attn or mlp",
        ),
        ("data.truncation", "'data.overlong_prompts' here; nothing is truncated; what is too"),
        ("data.filter_overlong_prompts", "'data.overlong_prompts' here; true there is drop here"),
        (
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
            "'actor.optim.lr_warmup_steps' here; it counts steps, not a share of the run",
        ),
        ("trainer.logger", "'trainer.trackers' here; the console is always on"),
        ("actor_rollout_ref.actor.optim.betas", "'actor.optim.adam_beta1' here"),
    ],
)
def test_a_key_of_verl_with_a_counterpart_says_what_else_changes(theirs, ours):
    hint = verl_names.verl_hint(theirs, {key.name for key in keys(PPOConfig)})
    assert hint is not None and hint.startswith(f"verl's '{theirs}' is {ours}")


def test_hydras_signs_are_told(tmp_path):
    said = message(tmp_path, PPO, "++trainer.save_freq=3", "~critic.tp=1")
    assert said.splitlines() == [
        "unknown key '++trainer.save_freq'; write 'trainer.save_freq': + and ~ are Hydra's",
        "unknown key '~critic.tp'; write 'critic.tp': + and ~ are Hydra's",
    ]


def test_each_key_of_verl_leads_to_one_that_exists():
    known = [key.name for root in (PPOConfig, SFTConfig) for key in keys(root)]
    names = [ours for entry in verl_names._ELSEWHERE.values() for ours in entry]
    names += [f"actor.{ours}" for ours in verl_names._BELOW_A_ROLE.values()]
    assert set(names) <= set(known)


def test_verls_section_of_actor_rollout_and_reference_is_told(tmp_path):
    said = message(tmp_path, PPO + "actor_rollout_ref: {actor: {ppo_epochs: 2}}\n")
    assert said == (
        f"{tmp_path / 'config.yaml'}: unknown key 'actor_rollout_ref'; verl's "
        f"'actor_rollout_ref.actor', '.rollout' "
        "and '.ref' are 'actor', 'rollout' and 'reference' here"
    )


def test_an_unknown_key_names_its_file(tmp_path):
    first = write(tmp_path / "ppo.yaml", PPO)
    second = write(tmp_path / "second.yaml", "actor: {clip_rato: 1}\nalgoritm: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [first, second])
    assert str(caught.value).splitlines() == [
        f"{second}: unknown key 'actor.clip_rato'; did you mean 'actor.clip_ratio'?",
        f"{second}: unknown key 'algoritm'; did you mean 'algorithm'?",
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor.dtype=fp8",
            "bad value 'fp8' for 'actor.dtype': input should be 'auto', 'float32' or 'bfloat16'",
        ),
        ("actor.tp=0", "bad value 0 for 'actor.tp': input should be greater than or equal to 1"),
        ("actor.tp=two", "bad value 'two' for 'actor.tp': input should be a valid integer"),
        ("actor.tp=true", "bad value True for 'actor.tp': input should be a valid integer"),
        (
            "actor.use_kl_loss=1",
            "bad value 1 for 'actor.use_kl_loss': input should be a valid boolean",
        ),
        (
            "actor.clip_ratio_c=1.0",
            "bad value 1.0 for 'actor.clip_ratio_c': input should be greater than 1",
        ),
        (
            "actor.optim.lr=.nan",
            "bad value nan for 'actor.optim.lr': input should be a finite number",
        ),
        ("critic=3", "bad value 3 for 'critic': should be a section with keys of its own"),
        ("rollout.top_k=0", "'rollout': top_k 0 is neither -1 (off) nor at least 1"),
        ("seed=", "bad value None for 'seed': input should be a valid integer"),
        (
            "actor.policy_loss={clip_cov_lb: 5, clip_cov_ub: 5}",
            "'actor.policy_loss': clip_cov_lb 5.0 is not below clip_cov_ub 5.0; lower the first "
            "or raise the second",
        ),
    ],
)
def test_bad_values_name_key_value_and_what_is_allowed(tmp_path, override, expected):
    assert message(tmp_path, PPO, override) == expected


def test_reward_term_names(tmp_path):
    bad = message(tmp_path, PPO, "reward.terms=[{name: exactmatch}]")
    assert bad.startswith(
        "bad value 'exactmatch' for 'reward.terms.0.name': should be exact_match, gsm8k, "
    )
    assert bad.endswith("did you mean 'exact_match'?")
    assert "\n" not in bad
    assert (
        load_text(tmp_path, PPO, "reward.terms=[{name: 'my/r.py:score'}]").reward.terms[0].name
        == "my/r.py:score"
    )
    for malformed in ("my/r.py", "my/r.py:", "my/r.txt:score", "my/r.py:1x"):
        assert "for 'reward.terms.0.name'" in message(
            tmp_path, PPO, f"reward.terms=[{{name: '{malformed}'}}]"
        )


def test_every_missing_key_is_named_once_with_its_meaning():
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, None, [])
    lines = str(caught.value).splitlines()
    assert [line.split("'")[1] for line in lines] == [
        "actor.path",
        "reward.terms",
        "data.train_files",
        "trainer.output_dir",
    ]
    assert lines[0] == (
        "missing key 'actor.path' (Hugging Face directory: config.json and safetensors; "
        "with init: random, config.json alone); set it in the file or as actor.path=..."
    )


def test_an_inherited_mistake_is_told_once(tmp_path):
    assert message(tmp_path, PPO, "actor.tp=0").count("\n") == 0


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml' does not exist"):
        load_config(PPOConfig, tmp_path / "absent.yaml", [])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(PPOConfig, tmp_path, [])
    (tmp_path / "latin.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(PPOConfig, tmp_path / "latin.yaml", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "seed: 1\nactor:\n  tp: 1\n  tp: 2\n",
            "line 4: key 'tp' is given twice; keep one of them",
        ),
        ("1: 2\n", "line 1: key 1 is not text; quote it or remove it"),
        ("[1, 2]\n", "holds a list, not sections with keys"),
        ("actor: [\n", "not YAML: "),
        ("[" * 3000, "not YAML: maximum recursion depth exceeded"),
        (f"seed: {'9' * 5000}\n", "not YAML: Exceeds the limit"),
        ("seed: 2020-99-99\n", "not YAML: month must be in 1..12"),
    ],
)
def test_files_that_are_not_sections(tmp_path, text, expected):
    said = message(tmp_path, text)
    assert expected in said
    assert "config.yaml" in said
    assert "\n" not in said


def test_a_scalar_is_no_section(tmp_path):
    said = message(tmp_path, PPO.replace("critic: {pp: 2}", "critic: 3"), "critic.tp=2")
    assert said == "cannot set 'critic.tp': the file has the value 3 where a section should be"


PPO_KEYS = [
    "actor.path=m",
    "reward_model.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]
SUPERVISED_KEYS = ["model.path=m", "data.train_files=a.jsonl", "trainer.output_dir=o"]
# the numbers of ODD that are in the range of a key
SENSIBLE = {
    ("actor.policy_loss.clip_cov_lb", -1),
    ("actor.entropy_coeff", -1),
    ("reward.terms.0.weight", -1),
    ("rollout.top_k", -1),
}

# What no key takes beside those of free text: each is refused in one line, or fits.
ODD = (".nan", "-1", "1e23", f"{10**23}", "' '", "{a: 1}")


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_odd_values_are_refused_in_one_line_or_kept(root):
    base = SUPERVISED_KEYS if root is SFTConfig else PPO_KEYS
    numbers = []

    for key in keys(root):
        name = key.name.replace("*", "0")
        for value in ODD:
            try:
                config = load_config(root, None, [*base, f"{name}={value}"])
            except ConfigError as error:
                assert "\n" not in str(error), f"{name}={value}: {error}"
                assert name.split(".")[0] in str(error)
            else:
                kept = flatten(config).get(name)
                if isinstance(kept, int | float):
                    numbers.append((name, kept))

    assert set(numbers) <= SENSIBLE


@pytest.mark.parametrize(
    ("override", "shown", "key", "scheme"),
    [
        ("actor.path=s3://b/m", "s3://b/m", "actor.path", "s3://"),
        ("trainer.output_dir=hdfs://b/m", "hdfs://b/m", "trainer.output_dir", "hdfs://"),
        ("data.train_files=[http://h/a]", "http://h/a", "data.train_files.0", "http://"),
        ("data.tokenizer=file:///t", "file:///t", "data.tokenizer", "file://"),
        ("trainer.resume=gs://b", "gs://b", "trainer.resume", "gs://"),
        (
            "reward.terms=[{name: 's3://b/f.py:f'}]",
            "s3://b/f.py:f",
            "reward.terms.0.name",
            "s3://",
        ),
    ],
)
def test_addresses_are_no_paths(tmp_path, override, shown, key, scheme):
    assert message(tmp_path, PPO, override) == (
        f"bad value '{shown}' for '{key}': should be a path of the file system, and '{scheme}' "
        "begins an address; copy what is there into a directory, and name that"
    )


def test_other_forms_than_sections_and_lists(tmp_path):
    assert message(tmp_path, PPO, "reward.terms=[exact_match]") == (
        "bad value 'exact_match' for 'reward.terms.0': should be a section with keys of its own: "
        "{name: exact_match}"
    )
    assert message(tmp_path, PPO.replace("critic: {pp: 2}", "critic: [1]")) == (
        "bad value [1] for 'critic': should be a section with keys of its own"
    )
    assert message(tmp_path, PPO.replace("[{name: gsm8k}]", "{name: gsm8k}")) == (
        "bad value {'name': 'gsm8k'} for 'reward.terms': input should be a valid list"
    )


def test_what_is_no_file_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path, "/dev/zero"):
        with pytest.raises(ConfigError, match="it is a directory, a pipe or a device; give a file"):
            load_config(PPOConfig, path)
