"""The section algorithm.rollout_correction: presets, and thresholds read from text."""

from typing import get_args

import pytest

from mrlhf.config import PPOConfig, dump_yaml, load_config
from mrlhf.config.correction import CorrectionPreset, RolloutCorrectionSection

ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]
KEY = "algorithm.rollout_correction"

OFF = (None, (None, 2.0), (), False, "ppo_clip")
TOKEN = ("token", (None, 2.0))
SEQUENCE = ("sequence", (None, 2.0))
ICEPOP = ("token", (0.5, 5.0))
NO_WEIGHTS = (None, (None, 2.0))
GEO = (("seq_mean_k1", 0.999, 1.001),)
K3 = (("seq_mean_k3", None, 0.01),)
NO_ICEPOP = (*NO_WEIGHTS, (), True, "reinforce")
NO_REJECTION = (*SEQUENCE, (), True, "reinforce")
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
    "bypass_pg_sc": (*NO_WEIGHTS, (), True, "reinforce"),
    "bypass_pg_token_tis_sc": (*TOKEN, (), True, "reinforce"),
    "bypass_pg_token_icepop_sc": (*ICEPOP, (), True, "reinforce"),
    "disabled": OFF,
}


def load(*settings):
    config = load_config(
        PPOConfig, None, [*ARGUMENTS, *(f"{KEY}.{setting}" for setting in settings)]
    )
    return config.algorithm.rollout_correction


def summary(section):
    return (
        section.rollout_is,
        section.bounds,
        section.criteria,
        section.bypass_mode,
        section.loss_type,
    )


@pytest.mark.parametrize("preset", get_args(CorrectionPreset))
def test_presets(preset, tmp_path):
    section = load(f"preset={preset}")
    assert summary(section) == PRESETS[preset]
    assert section.active is (preset != "disabled")
    assert section.rollout_is_batch_normalize is False

    given = f"{KEY}={{preset: {preset}, rollout_is: token}}"
    config = load_config(PPOConfig, None, [*ARGUMENTS, given])
    (tmp_path / "dump.yaml").write_text(dump_yaml(config))
    assert load_config(PPOConfig, tmp_path / "dump.yaml") == config


def test_off_by_default():
    assert summary(RolloutCorrectionSection()) == OFF
    assert not RolloutCorrectionSection().active
    assert not load("rollout_is_threshold=3").active
    for setting in ("rollout_is=token", "bypass_mode=true"):
        assert load(setting).active
    assert load("rollout_rs=token_k1", "rollout_rs_threshold=2").active


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
        ("1", (None, 1.0)),  # these just hold the ratio 1
        ("0.5_1", (0.5, 1.0)),
        ("1_1.5", (1.0, 1.5)),
    ],
)
def test_bounds_of_the_weights(text, bounds):
    assert load("rollout_is=token", f"rollout_is_threshold={text}").bounds == bounds


@pytest.mark.parametrize(
    ("names", "threshold", "criteria"),
    [
        ("token_k1", "2.0", (("token_k1", 0.5, 2.0),)),
        ("token_k1", "0.25_2.0", (("token_k1", 0.25, 2.0),)),
        ("token_k1", "0.25_1", (("token_k1", 0.25, 1.0),)),
        ("token_k1", "1_2", (("token_k1", 1.0, 2.0),)),
        ("seq_max_k2", "0.1", (("seq_max_k2", None, 0.1),)),
        ("seq_mean_k1,seq_max_k3", "4", (("seq_mean_k1", 0.25, 4.0), ("seq_max_k3", None, 4.0))),
        (
            "'token_k1, seq_sum_k3'",
            "'0.5_2, 0.01'",
            (("token_k1", 0.5, 2.0), ("seq_sum_k3", None, 0.01)),
        ),
        ("token_k2,token_k2", "3", (("token_k2", None, 3.0),)),
    ],
)
def test_criteria(names, threshold, criteria):
    assert load(f"rollout_rs={names}", f"rollout_rs_threshold={threshold}").criteria == criteria


def sources(tmp_path, texts, *settings):
    """The section from one file a text, each with the keys of the section alone, then arguments."""
    files = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(f"algorithm: {{rollout_correction: {text}}}\n")
    config = load_config(
        PPOConfig, files, [*ARGUMENTS, *(f"{KEY}.{setting}" for setting in settings)]
    )
    return config.algorithm.rollout_correction


WEIGHTS = (
    "{rollout_is: token, rollout_is_threshold: 7.0, rollout_is_batch_normalize: true, "
    "bypass_mode: true}"
)
ICEPOP_FILE = "{preset: bypass_pg_token_icepop}"
REJECTS = "{preset: bypass_pg_geo_rs_seq_tis}"


@pytest.mark.parametrize(
    ("texts", "settings", "expected"),
    [
        # a key beside the preset wins
        (
            [],
            ["preset=bypass_pg_is", "rollout_is=token", "rollout_is_threshold=0.5_5"],
            (*ICEPOP, (), True, "reinforce"),
        ),
        (
            [],
            ["preset=bypass_pg_is", "bypass_mode=false", "loss_type=ppo_clip"],
            (*SEQUENCE, (), False, "ppo_clip"),
        ),
        # a preset of a later file overrides earlier files
        (
            [WEIGHTS, "{preset: decoupled_geo_rs_seq_tis, rollout_is_threshold: 5.0}"],
            [],
            ("sequence", (None, 5.0), GEO, False, "ppo_clip"),
        ),
        (
            ["{preset: bypass_pg_geo_rs}", "{preset: decoupled_token_is}"],
            [],
            (*TOKEN, (), False, "ppo_clip"),
        ),
        (["{preset: bypass_pg_geo_rs}", "{preset: disabled}"], [], OFF),
        # a key of a later file overrides an earlier preset
        (
            ["{preset: bypass_pg_is}", "{rollout_is: token}", "{rollout_is_threshold: 0.5_2}"],
            [],
            ("token", (0.5, 2.0), (), True, "reinforce"),
        ),
        (["{preset: bypass_pg_is}"], ["rollout_is=token"], (*TOKEN, (), True, "reinforce")),
        # a preset among the arguments overrides files but not arguments
        (
            [WEIGHTS],
            ["preset=decoupled_k3_rs_seq_tis", "rollout_is_threshold=4"],
            ("sequence", (None, 4.0), K3, False, "ppo_clip"),
        ),
        ([WEIGHTS], ["preset=disabled"], OFF),
        # no weights or no rejection beside a preset drop their threshold
        (["{preset: bypass_pg_token_icepop, rollout_is: null}"], [], NO_ICEPOP),
        ([ICEPOP_FILE, "{rollout_is: null}"], [], NO_ICEPOP),
        ([ICEPOP_FILE], ["rollout_is=null"], NO_ICEPOP),
        (["{preset: bypass_pg_geo_rs_seq_tis, rollout_rs: null}"], [], NO_REJECTION),
        ([REJECTS, "{rollout_rs: null}"], [], NO_REJECTION),
        ([REJECTS], ["rollout_rs=null"], NO_REJECTION),
        ([REJECTS], ["rollout_is=null"], (*NO_WEIGHTS, GEO, True, "reinforce")),
    ],
)
def test_which_source_wins(tmp_path, texts, settings, expected):
    for order in (settings, settings[::-1]):
        section = sources(tmp_path, texts, *order)
        assert summary(section) == expected
        assert section.rollout_is_batch_normalize is False
        assert (section.rollout_rs is None) == (section.rollout_rs_threshold is None)


def test_a_whole_section_may_hold_a_preset(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("algorithm: {gamma: 0.5, rollout_correction: {rollout_is: token}}\n")
    preset = [f"{KEY}={{preset: decoupled_geo_rs}}", f"{KEY}.rollout_rs_threshold=1.5"]
    algorithm = load_config(PPOConfig, file, [*ARGUMENTS, *preset]).algorithm
    criteria = (("seq_mean_k1", 1 / 1.5, 1.5),)
    assert summary(algorithm.rollout_correction) == (*NO_WEIGHTS, criteria, False, "ppo_clip")
    assert algorithm.gamma == 0.5

    # It drops the threshold of what is off.
    section = RolloutCorrectionSection(preset="bypass_pg_token_icepop", rollout_is=None)
    assert summary(section) == NO_ICEPOP
    section = RolloutCorrectionSection(preset="bypass_pg_geo_rs_seq_tis", rollout_rs=None)
    assert summary(section) == NO_REJECTION


def test_a_preset_is_expanded_in_the_section_and_in_dumps(tmp_path):
    section = RolloutCorrectionSection(preset="bypass_pg_geo_rs_seq_tis", rollout_is_threshold=3.0)
    assert section.model_dump() == {
        "preset": None,
        "rollout_is": "sequence",
        "rollout_is_threshold": 3.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
        "bypass_mode": True,
        "loss_type": "reinforce",
        "score_centering": False,
    }

    config = load_config(PPOConfig, None, [*ARGUMENTS, f"{KEY}.preset=bypass_pg_geo_rs_seq_tis"])
    (tmp_path / "dump.yaml").write_text(dump_yaml(config))
    again = load_config(
        PPOConfig, tmp_path / "dump.yaml", [f"{KEY}.rollout_is=token", f"{KEY}.loss_type=ppo_clip"]
    )
    assert summary(again.algorithm.rollout_correction) == (*TOKEN, GEO, True, "ppo_clip")

    other = load_config(PPOConfig, tmp_path / "dump.yaml", [f"{KEY}.preset=decoupled_k3_rs"])
    assert summary(other.algorithm.rollout_correction) == (*NO_WEIGHTS, K3, False, "ppo_clip")
