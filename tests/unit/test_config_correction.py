"""The section algorithm.rollout_correction: presets, and thresholds read from text."""

from typing import get_args

import pytest

from mrlhf.config import PPOConfig, dump_yaml, load_config
from mrlhf.config.correction import CorrectionPreset, RolloutCorrectionSection
from mrlhf.errors import ConfigError

ARGUMENTS = ["actor.path=m", "reward.terms=[{name: gsm8k}]", "data.train_files=a.jsonl", "trainer.output_dir=o"]
KEY = "algorithm.rollout_correction"

OFF = (None, (None, 2.0), (), False, "ppo_clip")
TOKEN, SEQUENCE, ICEPOP = ("token", (None, 2.0)), ("sequence", (None, 2.0)), ("token", (0.5, 5.0))
NO_WEIGHTS = (None, (None, 2.0))
GEO = (("seq_mean_k1", 0.999, 1.001),)
K3 = (("seq_mean_k3", None, 0.01),)
PRESETS = {  # weights and their bounds, what is rejected, bypass, loss
    "decoupled_token_is": (*TOKEN, (), False, "ppo_clip"),
    "decoupled_seq_is": (*SEQUENCE, (), False, "ppo_clip"),
    "decoupled_token_icepop": (*ICEPOP, (), False, "ppo_clip"),
    "decoupled_seq_is_rs": (*SEQUENCE, (("seq_sum_k1", 0.5, 2.0),), False, "ppo_clip"),
    "decoupled_geo_rs": (*NO_WEIGHTS, GEO, False, "ppo_clip"),
    "geo_rs_seq_tis": (*SEQUENCE, GEO, False, "ppo_clip"),
    "geo_rs_token_tis": (*TOKEN, GEO, False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": (*SEQUENCE, GEO, False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": (*TOKEN, GEO, False, "ppo_clip"),
    "decoupled_k3_rs": (*NO_WEIGHTS, K3, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": (*SEQUENCE, K3, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": (*TOKEN, K3, False, "ppo_clip"),
    "bypass_ppo_clip": (*NO_WEIGHTS, (), True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (*NO_WEIGHTS, GEO, True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (*NO_WEIGHTS, K3, True, "ppo_clip"),
    "bypass_pg_is": (*SEQUENCE, (), True, "reinforce"),
    "bypass_pg_token_icepop": (*ICEPOP, (), True, "reinforce"),
    "bypass_pg_geo_rs": (*NO_WEIGHTS, GEO, True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": (*SEQUENCE, GEO, True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": (*TOKEN, GEO, True, "reinforce"),
    "disabled": OFF,
}


def load(*settings):
    config = load_config(PPOConfig, None, [*ARGUMENTS, *(f"{KEY}.{setting}" for setting in settings)])
    return config.algorithm.rollout_correction


def told(section):
    return (section.rollout_is, section.bounds, section.criteria, section.bypass_mode, section.loss_type)


def message(*settings):
    with pytest.raises(ConfigError) as caught:
        load(*settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("preset", get_args(CorrectionPreset))
def test_presets(preset):
    section = load(f"preset={preset}")
    assert told(section) == PRESETS[preset]
    assert section.active is (preset != "disabled")
    assert section.rollout_is_batch_normalize is False


def test_off_by_default():
    assert told(RolloutCorrectionSection()) == OFF
    assert not RolloutCorrectionSection().active
    assert not load("rollout_is_threshold=3").active
    for setting in ("rollout_is=token", "bypass_mode=true"):
        assert load(setting).active
    assert load("rollout_rs=token_k1", "rollout_rs_threshold=2").active


def test_a_key_beside_the_preset_wins():
    settings = ("rollout_is=token", "rollout_is_threshold=0.5_5", "bypass_mode=false", "loss_type=ppo_clip")
    for order in (("preset=bypass_pg_is", *settings), (*settings, "preset=bypass_pg_is")):
        assert told(load(*order)) == ("token", (0.5, 5.0), (), False, "ppo_clip")
    without = load("preset=bypass_pg_geo_rs_seq_tis", "rollout_is=null")
    assert told(without) == (None, (None, 2.0), GEO, True, "reinforce")


@pytest.mark.parametrize("preset", get_args(CorrectionPreset))
def test_a_dump_reloads_equal(preset, tmp_path):
    config = load_config(PPOConfig, None, [*ARGUMENTS, f"{KEY}={{preset: {preset}, rollout_is: token}}"])
    (tmp_path / "dump.yaml").write_text(dump_yaml(config))
    assert load_config(PPOConfig, tmp_path / "dump.yaml") == config


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("3", (None, 3.0)),
        ("1.5", (None, 1.5)),
        ("'2.0'", (None, 2.0)),
        ("1e1", (None, 10.0)),
        ("0.5_5.0", (0.5, 5.0)),
        ("0.5_5", (0.5, 5.0)),  # to YAML 1.1 this is the number 0.55
        ("1_2", (1.0, 2.0)),  # and this 12
        ("'0.5_2'", (0.5, 2.0)),
    ],
)
def test_bounds_of_the_weights(text, bounds):
    assert load("rollout_is=token", f"rollout_is_threshold={text}").bounds == bounds


@pytest.mark.parametrize(
    "text", ["0", "-1", "abc", "2_1", "1_1", "0_2", "_2", "1_", "1_2_3", "1,2", "[1]", "true", "''"]
)
def test_bad_bounds_of_the_weights(text):
    said = message("rollout_is=token", f"rollout_is_threshold={text}")
    assert (
        f"for '{KEY}.rollout_is_threshold': should be a number above 0, or lower_upper with 0 < lower < upper" in said
    )


@pytest.mark.parametrize(
    ("names", "threshold", "criteria"),
    [
        ("token_k1", "2.0", (("token_k1", 0.5, 2.0),)),
        ("token_k1", "0.25_2.0", (("token_k1", 0.25, 2.0),)),
        ("seq_max_k2", "0.1", (("seq_max_k2", None, 0.1),)),
        ("seq_mean_k1,seq_max_k3", "4", (("seq_mean_k1", 0.25, 4.0), ("seq_max_k3", None, 4.0))),
        ("'token_k1, seq_sum_k3'", "'0.5_2, 0.01'", (("token_k1", 0.5, 2.0), ("seq_sum_k3", None, 0.01))),
        ("token_k2,token_k2", "3", (("token_k2", None, 3.0),)),
    ],
)
def test_criteria(names, threshold, criteria):
    assert load(f"rollout_rs={names}", f"rollout_rs_threshold={threshold}").criteria == criteria


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            ("rollout_rs=seq_max_k1", "rollout_rs_threshold=2"),
            f"bad value 'seq_max_k1' for '{KEY}.rollout_rs': should be a comma-joined list of token_k1, token_k2, "
            "token_k3, seq_sum_k1, seq_sum_k2, seq_sum_k3, seq_mean_k1, seq_mean_k2, seq_mean_k3, seq_max_k2, "
            "seq_max_k3; did you mean 'seq_max_k3'?",
        ),
        (
            ("rollout_rs=token_k1", "rollout_rs_threshold=a_b"),
            f"bad value 'a_b' for '{KEY}.rollout_rs_threshold': should be a number above 0, or lower_upper with 0 < "
            "lower < upper, such as 0.5_2.0, or several of these joined by commas",
        ),
        (
            ("rollout_rs=token_k1",),
            f"'{KEY}': rollout_rs token_k1 is given without rollout_rs_threshold; give one",
        ),
        (
            ("rollout_rs_threshold=2",),
            f"'{KEY}': rollout_rs_threshold 2.0 is given without rollout_rs; name the statistic in rollout_rs or leave "
            "the threshold out",
        ),
        (
            ("rollout_rs='token_k1,token_k2'", "rollout_rs_threshold='1.5,2,3'"),
            f"'{KEY}': rollout_rs_threshold 1.5,2,3 holds 3 thresholds for the 2 statistics of rollout_rs; give one "
            "for all, or one each",
        ),
        (
            ("rollout_rs=token_k3", "rollout_rs_threshold=0.5_2"),
            f"'{KEY}': rollout_rs_threshold 0.5_2.0 of token_k3 has a lower bound; give 2.0 alone",
        ),
        (
            ("rollout_rs=token_k1", "rollout_rs_threshold=0.5"),
            f"'{KEY}': rollout_rs_threshold 0.5 of token_k1 stands for 2_0.5, which holds nothing; give a number above "
            "1, or lower_upper",
        ),
    ],
)
def test_bad_criteria(settings, expected):
    assert message(*settings) == expected


def test_an_unknown_preset_is_told_with_the_known_ones():
    said = message("preset=tis")
    assert said.startswith(f"bad value 'tis' for '{KEY}.preset': input should be 'decoupled_token_is', ")
    assert said.endswith("or 'disabled'")
