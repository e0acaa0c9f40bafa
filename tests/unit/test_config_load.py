"""Reading configurations: precedence, inheritance, exact types, and what follows from the keys."""

from typing import get_args

import pytest
import yaml
from pydantic import ValidationError

from mrlhf.config import PPOConfig, RewardModelConfig, SFTConfig, dump_yaml, flatten, load_config
from mrlhf.config.load import read_config
from mrlhf.config.sections import ReferenceSection
from mrlhf.config.unread import unread_keys
from mrlhf.rl.names import AdvantageEstimator
from mrlhf.roles.policy_loss import PolicyLossSettings
from tests.unit.config_files import PPO, SUPERVISED, load_text, write


@pytest.fixture
def ppo_file(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    return path


def test_defaults_then_file_then_arguments(ppo_file):
    config = load_config(PPOConfig, ppo_file, ["actor.tp=4", "rollout.n=2", "actor.tp=8"])
    assert config.actor.tp == 8  # the later argument
    assert config.rollout.n == 2  # an argument over an empty section
    assert config.actor.clip_ratio == 0.1  # the file
    assert config.actor.clip_ratio_c == 3.0  # the default
    assert config.data.train_files == ["a.jsonl", "b.parquet"]


def test_role_defaults_of_the_learning_rate_survive_a_partly_given_optimizer(ppo_file):
    config = load_config(
        PPOConfig, ppo_file, ["actor.optim={clip_grad: 2.0}", "critic.optim.clip_grad=3"]
    )
    assert (config.actor.optim.lr, config.actor.optim.clip_grad) == (1e-6, 2.0)
    assert (config.critic.optim.lr, config.critic.optim.clip_grad) == (1e-5, 3.0)


def test_keys_left_out_or_null_inherit(ppo_file):
    config = load_config(
        PPOConfig,
        ppo_file,
        ["actor.ppo_mini_batch_size=32", "critic.ppo_epochs=3", "critic.path=null"],
    )

    assert config.critic.path == config.reference.path == config.data.tokenizer == "models/policy"
    assert (
        config.critic.ppo_mini_batch_size,
        config.critic.ppo_epochs,
        config.actor.ppo_epochs,
    ) == (32, 3, 1)
    assert (config.reference.tp, config.reference.pp, config.critic.tp) == (2, 1, 1)
    assert config.actor.loss_scale_factor == config.critic.loss_scale_factor == 96.0
    assert config.data.gen_batch_size == config.data.train_batch_size == 1024

    staged = ["actor.pp=2", "actor.vpp=2", "actor.pp_layers=[1, 2, 2, 1]"]
    reference = load_config(PPOConfig, ppo_file, staged).reference
    assert (reference.pp, reference.vpp, reference.pp_layers) == (2, 2, [1, 2, 2, 1])
    other = load_config(PPOConfig, ppo_file, [*staged, "reference.pp=1"]).reference
    assert (other.pp, other.vpp, other.pp_layers) == (1, 1, None)

    keys = ["dtype=bfloat16", "micro_batch_tokens=99", "sequence_parallel=true", "recompute=full"]
    keys += ["cp=2", "etp=2"]
    config = load_config(PPOConfig, ppo_file, [f"actor.{key}" for key in keys])
    for key in ReferenceSection.model_fields:  # all of them
        assert config.reference.value_of(key) == config.actor.value_of(key)
    single = load_config(PPOConfig, ppo_file, [*(f"actor.{key}" for key in keys), "reference.tp=1"])
    assert (single.reference.sequence_parallel, single.reference.etp) == (False, None)
    assert (single.reference.cp, single.reference.micro_batch_tokens) == (2, 99)

    own = load_config(
        PPOConfig, ppo_file, ["reference.tp=1", "actor.loss_scale_factor=5", "data.tokenizer=tok"]
    )
    assert (own.reference.tp, own.actor.loss_scale_factor, own.data.tokenizer) == (1, 5.0, "tok")

    assert load_config(PPOConfig, ppo_file, ["data.train_batch_size=8"]).data.gen_batch_size == 8
    assert load_config(PPOConfig, ppo_file, ["data.gen_batch_size=24"]).data.gen_batch_size == 24


def test_clip_bounds(ppo_file):
    config = load_config(PPOConfig, ppo_file, ["actor.clip_ratio_high=0.28"])
    assert (config.actor.clip_low, config.actor.clip_high) == (0.1, 0.28)


@pytest.mark.parametrize(
    ("loss_mode", "given", "mode"),
    [
        ("vanilla", "null", "token-mean"),
        ("cispo", "null", "token-mean"),
        ("gspo", "null", "seq-mean-token-mean"),
        ("sapo", "null", "seq-mean-token-mean"),
        ("geo_mean", "null", "seq-mean-token-mean"),
        ("gspo", "token-mean", "token-mean"),
        ("vanilla", "token-sum", "token-sum"),
    ],
)
def test_aggregation_follows_the_loss_unless_given(ppo_file, loss_mode, given, mode):
    overrides = [f"actor.policy_loss.loss_mode={loss_mode}", f"actor.loss_agg_mode={given}"]
    assert load_config(PPOConfig, ppo_file, overrides).actor.agg_mode == mode


ESTIMATORS_WITHOUT_CRITIC = [name for name in get_args(AdvantageEstimator) if name != "gae"]


def test_critic_is_built_for_gae_alone(ppo_file):
    config = load_config(PPOConfig, ppo_file, [])
    assert config.needs_critic
    assert list(config.roles()) == list(config.trained()) == ["actor", "critic"]
    for name in ESTIMATORS_WITHOUT_CRITIC:
        config = load_config(PPOConfig, ppo_file, [f"algorithm.adv_estimator={name}"])
        assert not config.needs_critic
        assert list(config.roles()) == list(config.trained()) == ["actor"]


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["actor.policy_loss.loss_mode=clip_cov"], True),
        (["actor.policy_loss.loss_mode=kl_cov"], True),
        (["algorithm.rollout_correction.preset=bypass_ppo_clip"], False),
        (["algorithm.rollout_correction.preset=bypass_ppo_clip_geo_rs"], True),
        (["algorithm.rollout_correction={preset: bypass_pg_is}"], False),
        (
            [
                "algorithm.rollout_correction={preset: bypass_pg_is, "
                "rollout_is_batch_normalize: true}"
            ],
            True,
        ),
        (["algorithm.rollout_correction={preset: decoupled_geo_rs}"], False),
    ],
)
def test_which_statistics_need_a_pass_over_the_mini_batch(ppo_file, overrides, needed):
    config = load_config(PPOConfig, ppo_file, overrides)
    loss = PolicyLossSettings.of(config.actor, config.algorithm.rollout_correction)
    assert loss.needs_mini_batch_pass is needed


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["actor.use_kl_loss=true"], True),
        (["actor.kl_loss_coef=1"], False),
    ],
)
def test_reference_is_built_only_for_a_kl(ppo_file, overrides, needed):
    config = load_config(PPOConfig, ppo_file, overrides)
    assert config.needs_reference is needed
    assert ("reference" in config.roles()) is needed


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e-4", 1e-4), ("2.5E+3", 2500.0), ("1.e3", 1000.0), (".5e-1", 0.05), ("3", 3.0)],
)
def test_floats_as_people_write_them(tmp_path, text, number):
    from_file = load_text(tmp_path, PPO.replace("lr: 1e-4", f"lr: 0, clip_grad: {text}"))
    from_argument = load_text(tmp_path, PPO, f"actor.optim.clip_grad={text}")
    assert from_file.actor.optim.clip_grad == from_argument.actor.optim.clip_grad == number


@pytest.mark.parametrize(
    ("key", "text", "number"),
    [
        ("seed", "0", 0),
        ("rollout.top_k", "-1", -1),
        ("seed", "+4", 4),
        ("seed", "0x1F", 31),
        ("seed", "120", 120),
    ],
)
def test_integers(tmp_path, key, text, number):
    value = flatten(load_text(tmp_path, PPO, f"{key}={text}"))[key]
    assert value == number
    assert isinstance(value, int)


def test_a_list_given_as_an_argument_may_be_changed_by_a_later_one(ppo_file):
    whole = "reward.terms=[{name: format}, {name: gsm8k}]"

    def weights(*arguments):
        return [term.weight for term in load_config(PPOConfig, ppo_file, arguments).reward.terms]

    assert weights(whole, "reward.terms.1.weight=0.5") == [1.0, 0.5]
    assert weights("reward.terms.0.weight=0.5", whole) == [1.0, 1.0]


def test_one_file_name_is_a_list_of_one(ppo_file):
    config = load_config(
        PPOConfig, ppo_file, ["data.train_files=one.jsonl", "data.val_files=[x, y]"]
    )
    assert (config.data.train_files, config.data.val_files) == (["one.jsonl"], ["x", "y"])


def test_an_argument_reaches_into_a_list_and_opens_an_absent_section(ppo_file):
    config = load_config(
        PPOConfig,
        ppo_file,
        ["reward.terms.0.weight=0.5", "reward_model.path=rm", "reward_model.tp=2"],
    )
    assert config.reward.terms[0].weight == 0.5
    assert config.reward_model is not None
    assert (config.reward_model.path, config.reward_model.tp) == ("rm", 2)


def test_later_files_override_earlier_ones_key_by_key(tmp_path, ppo_file):
    second = write(
        tmp_path / "second.yaml",
        "actor: {clip_ratio: 0.3, optim: {clip_grad: 2.0}}\n"
        "critic:\n"
        "data: {train_files: [c.jsonl]}\n"
        "algorithm: {kl_ctrl: {kl_coef: 0.5}}\n",
    )

    third = write(
        tmp_path / "third.yaml",
        "actor: {clip_ratio: 0.4}\nalgorithm: {kl_ctrl: {horizon: 7}, kl_penalty: k2}\n",
    )

    config = load_config(PPOConfig, [ppo_file, second, third], ["actor.tp=4"])
    assert (config.actor.clip_ratio, config.actor.tp, config.actor.path) == (
        0.4,
        4,
        "models/policy",
    )
    assert (config.actor.optim.lr, config.actor.optim.clip_grad) == (1e-4, 2.0)
    assert config.critic.pp == 2  # a section with nothing under it says nothing

    assert config.data.train_files == ["c.jsonl"]  # a list is replaced as a whole
    assert config.algorithm.kl_ctrl.model_dump() == {
        "type": "fixed",
        "kl_coef": 0.5,
        "target_kl": 0.1,
        "horizon": 7,
    }

    assert load_config(PPOConfig, [third, second, ppo_file]).actor.clip_ratio == 0.1
    assert load_config(PPOConfig, [ppo_file]) == load_config(PPOConfig, ppo_file)


def test_a_later_null_takes_an_optional_section_away(tmp_path, ppo_file):
    second = write(tmp_path / "second.yaml", "reward_model: {path: rm}\n")
    third = write(tmp_path / "third.yaml", "reward_model:\n")
    assert load_config(PPOConfig, [ppo_file, second]).reward_model is not None
    assert load_config(PPOConfig, [ppo_file, second, third]).reward_model is None


def test_yaml_anchors_may_share_a_section(tmp_path):
    text = PPO.replace("actor: {", "actor: &model {").replace(
        "critic: {pp: 2}", "critic: {<<: *small, pp: 2, tp: 4}"
    )
    config = load_text(tmp_path, "reward_model: &small {path: rm, tp: 2}\n" + text)
    assert (config.critic.path, config.critic.tp, config.critic.pp) == ("rm", 4, 2)


@pytest.mark.parametrize(
    ("root", "text"), [(PPOConfig, PPO), (SFTConfig, SUPERVISED), (RewardModelConfig, SUPERVISED)]
)
def test_a_dump_reloads_equal(tmp_path, root, text):
    config = load_text(tmp_path, text, "seed=11", root=root)
    again = load_text(tmp_path, dump_yaml(config), root=root)
    assert again == config
    assert load_text(tmp_path, dump_yaml(config), "seed=12", root=root) != config


def test_flatten_gives_every_leaf(ppo_file):
    flat = flatten(load_config(PPOConfig, ppo_file, []))
    assert flat["actor.optim.lr"] == 1e-4
    assert flat["algorithm.kl_ctrl.horizon"] == 10000
    assert flat["reward_model"] is None
    assert flat["reward.terms"] == [{"name": "gsm8k", "weight": 1.0}]
    assert not any(isinstance(value, dict) for value in flat.values())


def test_supervised_roots(tmp_path):
    sft = load_text(tmp_path, SUPERVISED, "model.init=random", root=SFTConfig)
    assert (sft.model.init, sft.data.tokenizer, sft.data.max_length, sft.optim.lr) == (
        "random",
        "models/policy",
        1024,
        1e-5,
    )

    preference = load_text(tmp_path, SUPERVISED, root=RewardModelConfig)
    assert preference.data.held_out_fraction == 0.1


def test_sections_are_frozen(ppo_file):
    config = load_config(PPOConfig, ppo_file, [])
    with pytest.raises(ValidationError):
        config.actor.tp = 4


def test_a_root_built_from_sections_inherits_too(ppo_file):
    parts = yaml.safe_load(PPO.replace("1e-4", "0.0001"))
    loaded = load_config(PPOConfig, ppo_file, [])
    parts["actor"] = loaded.actor
    assert PPOConfig.model_validate(parts) == loaded


@pytest.mark.parametrize(("rows", "batch", "steps"), [(100, 32, 6), (31, 32, 0), (64, 32, 4)])
def test_steps_from_epochs(tmp_path, rows, batch, steps):
    assert load_text(tmp_path, PPO, "trainer.total_epochs=2").trainer.steps(rows, batch) == steps
    assert load_text(tmp_path, PPO, "trainer.total_steps=5").trainer.steps(rows, batch) == 5


@pytest.mark.parametrize(("rows", "steps"), [(31, 5), (64, 5), (100, 6), (320, 20)])
def test_little_data_is_repeated_until_the_fewest_steps(tmp_path, rows, steps):
    trainer = load_text(tmp_path, PPO, "trainer.total_epochs=2", "trainer.min_steps=5").trainer
    assert trainer.steps(rows, 32) == steps


BASE = (
    PPO.replace("clip_ratio: 0.1", "use_kl_loss: true, kl_loss_coef: 0.3")
    + """
algorithm:
  adv_estimator: gae
  lam: 0.95
  use_kl_in_reward: true
  kl_ctrl: {type: adaptive, kl_coef: 0.2}
"""
)


@pytest.mark.parametrize(
    ("overlay", "arguments", "named"),
    [
        (
            "algorithm: {adv_estimator: grpo}",
            [],
            "algorithm.lam 0.95 of BASE has no effect with algorithm.adv_estimator grpo",
        ),
        (
            "algorithm: {gamma: 0.5, f_norm: 2.0}",
            ["algorithm.adv_estimator=gpg"],
            "algorithm.gamma 0.5 of OVERLAY has no effect with algorithm.adv_estimator gpg; "
            "algorithm.lam 0.95 of BASE has no effect with algorithm.adv_estimator gpg",
        ),
        (  # the number comes after the choice, from elsewhere
            "actor: {policy_loss: {loss_mode: gspo}}",
            ["actor.clip_ratio_c=9", "algorithm.lam=1.0"],
            "actor.clip_ratio_c 9.0 of the command line has no effect with "
            "actor.policy_loss.loss_mode gspo",
        ),
        (
            "actor: {use_kl_loss: false}\nalgorithm: {use_kl_in_reward: false}",
            [],
            "actor.kl_loss_coef 0.3 of BASE has no effect, since actor.use_kl_loss is false; "
            "algorithm.kl_ctrl.type adaptive, algorithm.kl_ctrl.kl_coef 0.2 of BASE have no "
            "effect, since algorithm.use_kl_in_reward is false",
        ),
        (  # what is left out may leave others without effect
            "algorithm: {adv_estimator: gdpo, lam: 1.0}\nreference: {tp: 1}",
            [],
            "algorithm.use_kl_in_reward true of BASE has no effect with algorithm.adv_estimator "
            "gdpo, which compares the scores of single terms and not their sum; "
            "algorithm.kl_ctrl.type adaptive, algorithm.kl_ctrl.kl_coef 0.2 of BASE have no "
            "effect, since algorithm.use_kl_in_reward is false",
        ),
        ("", ["trainer.total_steps=3"], None),
        ("trainer: {total_epochs: 3}", ["algorithm.lam=0.9"], None),
    ],
)
def test_a_key_without_effect_is_left_out_where_another_source_decides(
    tmp_path, overlay, arguments, named
):
    base = write(tmp_path / "base.yaml", BASE)
    over = write(tmp_path / "over.yaml", overlay)
    config, said = read_config(PPOConfig, [base, over], arguments)
    assert not list(unread_keys(config))

    if named is None:
        assert said == ""
    else:
        named = named.replace("BASE", str(base)).replace("OVERLAY", str(over))
        assert said == f"left out: {named}"


@pytest.mark.parametrize(
    ("overlay", "arguments", "key"),
    [
        ("algorithm: {adv_estimator: grpo, lam: 0.9}", [], "algorithm.lam"),
        ("", ["algorithm.adv_estimator=grpo", "algorithm.lam=0.9"], "algorithm.lam"),
        ("", ["algorithm={adv_estimator: grpo, lam: 0.9}"], "algorithm.lam"),
        # nobody chose the loss
        ("actor: {tau_pos: 2.0}", [], "actor.tau_pos"),
        (
            "actor: {policy_loss: {loss_mode: gpg}}",
            ["actor={path: m, tau_pos: 2}"],
            "actor.tau_pos",
        ),
        ("", ["actor.use_kl_loss=false", "actor.kl_loss_coef=0.4"], "actor.kl_loss_coef"),
    ],
)
def test_a_key_without_effect_stays_for_the_checks_where_its_own_source_decides(
    tmp_path, overlay, arguments, key
):
    files = [write(tmp_path / "base.yaml", BASE), write(tmp_path / "over.yaml", overlay)]
    config, said = read_config(PPOConfig, files, arguments)
    assert [unread.key for unread in unread_keys(config)] == [key]
    assert key not in said


def test_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    config = load_text(
        tmp_path,
        PPO,
        "actor.path=~/policy",
        'data.train_files=["${DATA}/a.jsonl", $DATA/b.jsonl]',
        "data.chat_template=~/chat.jinja",
        "trainer.output_dir=${DATA}/runs/$$",
        "trainer.resume=~/runs/old",
        "reward.terms=[{name: '~/rewards.py:score'}]",
        "actor.policy_loss.loss_mode=${DATA}/loss.py:f",
    )

    assert config.actor.path == config.critic.path == config.data.tokenizer == "/home/me/policy"
    assert config.data.train_files == ["/data/a.jsonl", "/data/b.jsonl"]
    assert config.data.chat_template == "/home/me/chat.jinja"
    assert config.trainer.output_dir == "/data/runs/$$"
    assert config.trainer.resume == "/home/me/runs/old"
    assert config.reward.terms[0].name == "/home/me/rewards.py:score"
    assert config.actor.policy_loss.loss_mode == "/data/loss.py:f"
    assert "/home/me/policy" in dump_yaml(config)
