"""The presets: laid over anything, each is the same method as alone, as a file and by its name."""

from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from mrlhf.config import PPOConfig, flatten, load_config
from mrlhf.config.algorithm import AlgorithmSection
from mrlhf.config.load import read_config
from mrlhf.config.presets import _METHOD, _TASK, PresetName
from mrlhf.config.tree import nodes
from mrlhf.config.unread import contradictions, unread_keys
from mrlhf.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted((CONFIGS / "algorithms").glob("*.yaml"))
ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "data.max_response_length=20480",
    "actor.ppo_mini_batch_size=1024",  # one optimizer step a batch, for online_dpo
    "trainer.output_dir=o",
]
# A PPO run that has moved every number of its method.
USED = """
algorithm:
  adv_estimator: gae
  gamma: 0.99
  lam: 0.9
  lam_critic: 0.8
  whiten_rewards: true
  use_kl_in_reward: true
  kl_penalty: k3
  kl_placement: terminal
  kl_ctrl: {type: adaptive, kl_coef: 0.3}
  reward_clip: 5.0
  reward_norm: running
  overlong_buffer: {enable: true, len: 9, penalty_factor: 0.5}
  filter_groups: {enable: true}
actor:
  policy_loss: {loss_mode: clip_cov}
  clip_ratio: 0.1
  clip_ratio_high: 0.3
  loss_agg_mode: token-sum
  positive_lm_coef: 0.3
  use_kl_loss: true
  kl_loss_type: k2
  kl_loss_coef: 0.3
critic: {cliprange_value: 0.3}
rollout: {n: 3}
trainer: {critic_warmup: 7}
"""
METHOD = ("algorithm.", "actor.", "critic.", "rollout.n", "rollout.partial", "trainer.critic_")
OF_THE_TASK = ("algorithm.reward_clip", "algorithm.reward_norm")


def load(*files: Path) -> PPOConfig:
    return load_config(PPOConfig, files, ARGUMENTS)


def method(config: PPOConfig) -> dict[str, Any]:
    """The values that are in use."""
    algorithm = config.algorithm
    unused = list(OF_THE_TASK)
    if not algorithm.use_kl_in_reward:
        unused.append("algorithm.kl_")
    if not config.actor.use_kl_loss:
        unused.append("actor.kl_loss_")
    if not config.needs_critic:
        unused.append("critic.")

    for name, section in (
        ("overlong_buffer", algorithm.overlong_buffer),
        ("filter_groups", algorithm.filter_groups),
    ):
        if not section.enable:
            numbers = section.model_dump(exclude={"enable"})
            unused += [f"algorithm.{name}.{key}" for key in numbers]

    values = {}
    for key, value in flatten(config).items():
        if key.startswith(METHOD) and not key.startswith(tuple(unused)):
            values[key] = value
    return values


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_over_any_other_is_the_method_that_it_is_alone(file: Path) -> None:
    alone = method(load(file))
    for other in FILES:
        over = load(other, file)
        assert method(over) == alone, other.stem
        assert not [*contradictions(over), *unread_keys(over)], other.stem


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_over_a_used_configuration_is_the_method_that_it_is_alone(
    file: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(USED)
    over = load(base, file)
    # what no preset sets stays; gdpo alone has no sum of terms to clip
    assert over.algorithm.reward_clip == (None if file.stem == "gdpo" else 5.0)
    assert method(over) == method(load(file))
    assert not list(unread_keys(over))
    assert not list(contradictions(over))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("base", ["arithmetic_cpu", "demo_cpu", "recipes/rlhf_gsm8k/ppo"])
def test_a_preset_over_a_shipped_configuration_leaves_no_key_without_effect(
    base: str, file: Path
) -> None:
    config = load_config(PPOConfig, [CONFIGS / f"{base}.yaml", file])
    assert not list(unread_keys(config))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_preset_by_its_name_is_its_file(file: Path) -> None:
    base = CONFIGS / "recipes/rlhf_gsm8k/ppo.yaml"
    named = load_config(PPOConfig, base, [f"algorithm.preset={file.stem}"])
    assert named == load_config(PPOConfig, [base, file])
    assert named.algorithm.preset is None


def test_every_preset_has_a_file() -> None:
    assert {*get_args(PresetName)} == {"defaults", *(file.stem for file in FILES)}
    keys = nodes(PPOConfig)
    for start in (*_METHOD, *_TASK):
        assert any(key.startswith(start) for key in keys), start


def test_keys_beside_a_preset_win_and_those_of_earlier_files_do_not(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(USED)
    over = tmp_path / "over.yaml"
    over.write_text("algorithm: {preset: grpo, gamma: 1.0}\nactor: {kl_loss_coef: 0.5}\n")
    config, said = read_config(PPOConfig, [base, over], ARGUMENTS)
    assert (config.actor.kl_loss_coef, config.actor.use_kl_loss, config.rollout.n) == (
        0.5,
        True,
        64,
    )
    assert config.algorithm.lam == 1.0 and config.algorithm.reward_clip == 5.0
    assert "algorithm.lam 0.9 (now 1.0), " in said and "rollout.n 3 (now 64)" in said
    assert "actor.kl_loss_coef" not in said  # given beside the preset
    assert f" of {base} have no effect, since algorithm.preset of {over} is grpo" in said
    assert "algorithm.adv_estimator" not in said.replace("algorithm.adv_estimator gae", "")

    # a later preset replaces an earlier one
    later = load_config(PPOConfig, over, [*ARGUMENTS, "algorithm.preset=dr_grpo"])
    assert method(later) == method(load(CONFIGS / "algorithms" / "dr_grpo.yaml"))


MINE = """
actor: {path: m, use_kl_loss: true, kl_loss_coef: 0.001, loss_agg_mode: seq-mean-token-mean}
algorithm:
  adv_estimator: grpo
  kl_ctrl: {target_kl: 0.2, type: adaptive}
  rollout_correction: {rollout_is: token, rollout_is_threshold: 3.0}
rollout: {n: 8}
"""
GRPO = "actor.kl_loss_coef 0.001 (now 0.04), "
OF_GRPO = "algorithm.kl_ctrl.target_kl 0.2 (now 0.1), algorithm.kl_ctrl.type adaptive (now fixed)"
CORRECTION = "algorithm.rollout_correction"
THRESHOLD = f"{CORRECTION}.rollout_is_threshold 3.0 (now 2.0)"
# The arguments; what is named, and as whose doing.
REPLACED = {
    "preset": (
        ["algorithm.preset=grpo"],
        f"{GRPO}{OF_GRPO}, rollout.n 8 (now 64)",
        "since algorithm.preset of the command line is grpo",
    ),
    "keys beside it": (
        ["algorithm.preset=grpo", "rollout.n=16", "actor.kl_loss_coef=0.2"],
        OF_GRPO,
        "since algorithm.preset of the command line is grpo",
    ),
    "its file": (
        [f"--config={CONFIGS / 'algorithms' / 'grpo.yaml'}"],
        f"{GRPO}{OF_GRPO}, rollout.n 8 (now 64)",
        f"since algorithm.preset of {CONFIGS / 'algorithms' / 'grpo.yaml'} is defaults",
    ),
    "correction": (
        [f"{CORRECTION}.preset=decoupled_token_is"],
        THRESHOLD,
        f"since {CORRECTION}.preset of the command line is decoupled_token_is",
    ),
    "section": (
        ["algorithm.kl_ctrl={type: adaptive}"],
        "algorithm.kl_ctrl.target_kl 0.2 (now 0.1)",
        "since the command line replaces algorithm.kl_ctrl as a whole",
    ),
    "no section": (["reward_model=null"], "", ""),
    "nothing": (["rollout.n=4"], "", ""),
}


@pytest.mark.parametrize("case", REPLACED)
def test_each_replaced_key_is_named_with_both_values(case: str, tmp_path: Path) -> None:
    base = tmp_path / "mine.yaml"
    base.write_text(f"{MINE}reward_model: {{path: r}}\n")
    arguments, named, why = REPLACED[case]
    files = [base, *(Path(text[9:]) for text in arguments if text.startswith("--config="))]
    overrides = [text for text in arguments if not text.startswith("--config=")]
    _, said = read_config(PPOConfig, files, [*ARGUMENTS, *overrides])
    if not named:
        assert said.count("(now") == 0
        return
    first, *_ = said.removeprefix("left out: ").split(" of ")
    assert sorted(first.split(", ")) == sorted(named.split(", "))
    assert why in said and str(base) in said


def test_a_key_without_effect_beside_a_preset_is_refused() -> None:
    arguments = [*ARGUMENTS, "algorithm.preset=grpo"]
    config, said = read_config(PPOConfig, None, [*arguments, "algorithm.lam=0.9"])
    assert [unread.key for unread in unread_keys(config)] == ["algorithm.lam"]
    assert said == ""

    # what the preset sets, and a key beside it switches off, is told
    config, said = read_config(PPOConfig, None, [*arguments, "actor.use_kl_loss=false"])
    assert not list(unread_keys(config))
    assert said == (
        "left out: actor.kl_loss_coef 0.04 of the preset grpo has no effect, since "
        "actor.use_kl_loss is false"
    )


def test_a_name_that_is_no_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'algorithm\.preset': did you mean 'grpo'"):
        load_config(PPOConfig, None, [*ARGUMENTS, "algorithm.preset=grpoo"])
    with pytest.raises(ValidationError, match="load_config"):
        AlgorithmSection.model_validate({"preset": "grpo"})


def test_the_presets_differ() -> None:
    methods = [method(load(file)) for file in FILES]
    assert len(methods) == 15
    assert all(
        first != second for number, first in enumerate(methods) for second in methods[:number]
    )
