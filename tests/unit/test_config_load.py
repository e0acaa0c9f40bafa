"""Reading configurations: precedence, inheritance, exact types, and what follows from the keys."""

from typing import get_args

import pytest
import yaml
from pydantic import ValidationError

import mrlhf.config
from mrlhf.config import PPOConfig, RewardModelConfig, SFTConfig, dump_yaml, flatten, load_config
from mrlhf.config.load import read_config
from mrlhf.config.sections import RoleSection
from mrlhf.config.unread import unread_keys
from mrlhf.config.yaml_text import parse_yaml
from mrlhf.rl.names import AdvantageEstimator
from mrlhf.roles.policy_loss import PolicyLossSettings
from tests.unit.config_files import PPO, SUPERVISED, load_text, read_cases, write


@pytest.fixture
def ppo_file(tmp_path):
    path = tmp_path / "ppo.yaml"
    path.write_text(PPO)
    return path


@pytest.mark.parametrize(("kind", "_", "arguments", "values"), read_cases("values.txt"))
def test_values(tmp_path, kind, _, arguments, values):
    """A row of `values.txt`: arguments over the file, and below them keys or properties."""
    given = [] if arguments == "(none)" else arguments.split("; ")
    text = PPO if kind == "PPOConfig" else SUPERVISED
    config = load_text(tmp_path, text, *given, root=getattr(mrlhf.config, kind))
    for row in "; ".join(values).split("; "):
        key, _, wanted = row.partition("=")
        value = config
        for name in key.split("."):
            value = value[int(name)] if name.isdecimal() else getattr(value, name)
        assert repr(value) == repr(parse_yaml(wanted, key)), key


def test_all_keys_of_the_reference_are_those_of_the_actor(ppo_file):
    config = load_config(PPOConfig, ppo_file, ["actor.dtype=bfloat16", "actor.cp=2"])
    for key in RoleSection.model_fields:
        assert config.reference.value_of(key) == config.actor.value_of(key)


def test_a_number_is_read_alike_from_a_file(tmp_path):
    text = PPO.replace("lr: 1e-4", "lr: 2.5E-3, clip_grad: 1.e3")
    optim = load_text(tmp_path, text).actor.optim
    assert (optim.lr, optim.clip_grad) == (0.0025, 1000.0)


ESTIMATORS_WITHOUT_CRITIC = [name for name in get_args(AdvantageEstimator) if name != "gae"]


def test_critic_is_built_for_gae_alone(ppo_file):
    config = load_config(PPOConfig, ppo_file, [])
    assert config.needs_critic
    assert list(config.roles()) == list(config.trained()) == ["actor", "critic"]
    for name in ESTIMATORS_WITHOUT_CRITIC:
        config = load_config(PPOConfig, ppo_file, [f"algorithm.adv_estimator={name}"])
        assert not config.needs_critic
        compared = ["reference"] if name == "online_dpo" else []
        assert list(config.roles()) == [*config.trained(), *compared] == ["actor", *compared]
    config = load_config(PPOConfig, ppo_file, ["actor.use_kl_loss=true"])
    assert list(config.roles()) == ["actor", "critic", "reference"]


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
    assert flat.pop("judge.verdicts") == {}  # its words are no keys
    assert not any(isinstance(value, dict) for value in flat.values())


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
