"""The command line and the help."""

import pytest

from mrlhf.config import DryRun, PPOConfig, RewardModelConfig, SFTConfig, parse_args
from mrlhf.config.tree import nodes
from mrlhf.errors import ConfigError

ARGUMENTS = [
    "actor.path=m",
    "reward.terms=[{name: gsm8k}]",
    "data.train_files=a.jsonl",
    "trainer.output_dir=o",
]


def test_parse_args_mixes_options_and_keys(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("seed: 5\nactor: {tp: 2, pp: 3}\ncritic: {pp: 4}\n")
    later = tmp_path / "later.yaml"
    later.write_text("actor: {pp: 5}\n")
    files = ["--config", str(file), "--config", str(later)]
    config, dry, _ = parse_args(PPOConfig, ["seed=6", *files, *ARGUMENTS])
    assert (config.seed, config.actor.tp, config.actor.pp, dry) == (6, 2, 5, None)

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
