"""Files that cannot be read as a configuration, and keys of verl: errors name the file or the key.

What a key and its value are refused for is a row of `refusals.txt`.
"""

import os

import pytest

from mrlhf.config import PPOConfig, SFTConfig, flatten, load_config, verl_names
from mrlhf.config.roots import DPOConfig
from mrlhf.config.tree import nodes
from mrlhf.errors import ConfigError
from tests.unit.config_files import PPO, message, write


def test_dots_in_the_keys_of_a_file(tmp_path):
    dotted = PPO + "critic.tp: 2\ntrainer.save_frq: 3\n"
    file = tmp_path / "config.yaml"
    assert message(tmp_path, dotted).splitlines() == [
        f"{file}: unknown key 'critic.tp'; its name holds a dot: nest it, as critic: {{tp: ...}}",
        f"{file}: unknown key 'trainer.save_frq'; did you mean 'trainer.save_freq'?",
    ]


@pytest.mark.parametrize(
    "ours", ["actor.optim.lrr", "rollout.stp", "data.train_file", "critic.tpp"]
)
def test_a_misspelt_key_of_ours_is_not_taken_for_one_of_verl(ours):
    assert verl_names.verl_hint(ours, nodes(PPOConfig)) is None


def test_each_key_of_verl_leads_to_one_that_exists():
    known = {*nodes(PPOConfig), *nodes(SFTConfig)}
    tables = verl_names.read_names()
    names = [ours for row in tables.elsewhere.values() for ours in row.ours.split(" | ")]
    names += [f"actor.{row.ours}" for row in tables.below_a_role.values()]
    assert set(names) <= known


def test_an_unknown_key_names_its_file(tmp_path):
    first = write(tmp_path / "ppo.yaml", PPO)
    second = write(tmp_path / "second.yaml", "actor: {clip_rato: 1}\nalgoritm: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(PPOConfig, [first, second])
    assert str(caught.value).splitlines() == [
        f"{second}: unknown key 'actor.clip_rato'; did you mean 'actor.clip_ratio'?",
        f"{second}: unknown key 'algoritm'; did you mean 'algorithm'?",
    ]


def test_pairs_that_are_drawn_are_told_where_online_dpo_is(tmp_path):
    file = write(tmp_path / "dpo.yaml", "rollout: {n: 2}\n")
    with pytest.raises(ConfigError, match="unknown key 'rollout'; online DPO is train_ppo with"):
        load_config(DPOConfig, file)


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
        "missing key 'actor.path' (Hugging Face directory, or org/name of the Hub: config.json "
        "and safetensors; with init: random, config.json alone); set it in the file or as "
        "actor.path=..."
    )


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
        ("critic: {freeze: [*.self_attn.*]}\n", "quotes around a text that begins with *"),
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
    "teacher.path=m",
    "judge_model.path=m",
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
    ("judge.unparsed", -1),
    ("rollout.top_k", -1),
}

# What no key takes beside those of free text: each is refused in one line, or fits.
ODD = (".nan", "-1", "1e23", f"{10**23}", "' '", "{a: 1}")


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_odd_values_are_refused_in_one_line_or_kept(root):
    base = SUPERVISED_KEYS if root is SFTConfig else PPO_KEYS
    numbers = []

    for key in nodes(root):
        name = key.replace("*", "0")
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


def test_what_is_no_file_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", tmp_path, "/dev/zero"):
        with pytest.raises(ConfigError, match="it is a directory, a pipe or a device; give a file"):
            load_config(PPOConfig, path)
