"""What a run reads beside its models: it is checked before anything is built, and in a dry run."""

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import mrlhf
from mrlhf.config import RewardModelConfig, SFTConfig
from mrlhf.errors import MrlhfError
from mrlhf.inputs import read_ppo_inputs, read_row_inputs
from mrlhf.preflight import dry_run, preflight
from tests.unit.config_files import read_cases
from tests.unit.configurations import holds, read_changes
from tests.unit.run_inputs import MODEL, ppo, refusal, supervised, write_inputs

PACKAGE = Path(mrlhf.__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    write_inputs(root)
    return root


@pytest.fixture(autouse=True)
def _in_place(place, monkeypatch):
    monkeypatch.chdir(place)


EPISODES = {"data__chat_template": "chat.jinja", "data__max_prompt_length": 10}


def test_episodes_are_shown():
    shown = dry_run(ppo(**EPISODES, rollout__environment="rewards.py:Asks"), 1).text
    assert "an episode, as tokens; what the policy says trains" in shown
    assert re.search(r"prompt +\d+ '0\+1=='\n +trains +\d+ ", shown)

    shown = dry_run(ppo(**EPISODES, rollout__environment="greets.py:Greets"), 1).text
    assert re.search(r"prompt +\d+ '0\+1==2=1='\n", shown)
    shown = dry_run(ppo(**EPISODES, rollout__environment="greets.py:Fails"), 1).text
    assert "reset fails here" in shown and "no server here" in shown

    alternates = EPISODES | {"data__chat_template": "alternates.jinja"}
    with pytest.raises(MrlhfError, match=r"rollout\.environment: what reset returns .*alternate"):
        dry_run(ppo(**alternates, rollout__environment="greets.py:Greets"), 1)
    dry_run(ppo(**alternates, rollout__environment="rewards.py:Asks"), 1)
    shown = dry_run(ppo(**EPISODES, rollout__environment="rewards.py:leads"), 1).text
    assert "a rollout function leads the episodes" in shown


def test_a_data_source_has_its_environment_or_none(caplog):
    pays = ppo(**EPISODES, rollout__environment={"train": "rewards.py:Pays"})
    environments = read_ppo_inputs(pays).environments
    assert environments.leads("train") and not environments.leads("val")
    assert environments.program_of("train") == "train" and environments.program_of("val") == ""
    assert environments.programs["train"].has_reward and not environments.programs[""].has_reward

    Path("hidden.jsonl").write_text('{"prompt": "0+1=", "answer": "2"}\n')
    caplog.clear()  # the environment tells rows of the same prompt apart
    files = {"data__val_files": "hidden.jsonl"}
    read_ppo_inputs(ppo(**EPISODES, **files, rollout__environment="rewards.py:Pays"))
    assert not [line for line in caplog.messages if "rows" in line]


def test_the_inputs_of_each_program():
    inputs = read_ppo_inputs(ppo())
    assert (len(inputs.prompts), inputs.steps) == (8, 6)
    assert {split: prompts.text for split, prompts in inputs.held_out.items()} == {"val": ["9+1="]}
    assert list(inputs.reward.weights) == ["score"]
    inputs.reward.close()

    sft = read_row_inputs(supervised(SFTConfig, "train.jsonl"))
    assert (len(sft.examples), len(sft.held_out), sft.steps) == (8, 0, 6)
    pairs = read_row_inputs(supervised(RewardModelConfig, "pairs.jsonl"))
    assert (len(pairs.examples), len(pairs.held_out), pairs.steps) == (9, 1, 6)
    assert pairs.examples.margins is pairs.held_out.margins is None


def test_the_margins_of_a_reward_models_pairs(place):
    lines = (place / "pairs.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"by": number} for number, line in enumerate(lines)]
    (place / "apart.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = supervised(RewardModelConfig, "apart.jsonl", rm__margin_column="by")
    inputs = read_row_inputs(config)
    assert sorted(inputs.examples.margins + inputs.held_out.margins) == list(range(10))

    config = supervised(RewardModelConfig, "pairs.jsonl", rm__margin_column="by")
    for read in (read_row_inputs, lambda config: dry_run(config, 1)):
        with pytest.raises(MrlhfError, match=r"^pairs\.jsonl:\d+: no value for 'by'; the row has"):
            read(config)


def test_a_column_without_a_number_in_any_row_is_refused(place):
    rows = [{"prompt": f"{x}+1=", "response": "2", ("a", "b")[x % 2]: x} for x in range(10)]
    (place / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"rm__rows": "targets", "data__held_out_fraction": 0}
    config = supervised(RewardModelConfig, "rated.jsonl", rm__target_column=["b", "a"], **changes)
    inputs = read_row_inputs(config)
    assert inputs.examples.losses(range(10)) == 10 and not inputs.held_out
    config = supervised(RewardModelConfig, "rated.jsonl", rm__target_column=list("abc"), **changes)
    for read in (read_row_inputs, lambda config: dry_run(config, 1)):
        with pytest.raises(MrlhfError, match=r"^rm\.target_column names 'c', and no row .*:1 has "):
            read(config)


def test_data_that_are_read_twice_are_told(place, caplog):
    shutil.copy(place / "train.jsonl", place / "copy.jsonl")
    os.link(place / "train.jsonl", place / "linked.jsonl")
    (place / "other.jsonl").write_text('{"prompt": "9+1=", "answer": "1"}\n' * 2)

    files = {
        "data__train_files": ["train.jsonl", "linked.jsonl"],
        "data__val_files": ["copy.jsonl", "other.jsonl"],
        "data__test_files": "val.jsonl",
    }
    read_ppo_inputs(ppo(**files)).reward.close()
    assert [line for line in caplog.messages if "rows" in line] == [
        "data.train_files names train.jsonl twice, also as linked.jsonl; its rows count double",
        "8 of 10 rows of data.val_files are in data.train_files too; they do not show what the "
        "model does with new rows",
        "1 of 1 rows of data.test_files are in data.val_files too; they do not show what the "
        "model does with new rows",
    ]

    for root, file, count in (
        (SFTConfig, "train.jsonl", 8),
        (RewardModelConfig, "pairs.jsonl", 10),
    ):
        caplog.clear()
        read_row_inputs(supervised(root, file, data__val_files=[file, file]))
        assert [line.partition("; ")[0] for line in caplog.messages] == [
            f"data.val_files names {file} twice",
            f"{2 * count} of {2 * count} rows of data.val_files are in data.train_files too",
        ]


def test_another_end_token_than_the_models_is_told(place, caplog):
    shutil.copytree(place / "model", place / "ends")
    (place / "ends" / "config.json").write_text(json.dumps(MODEL | {"eos_token_id": [3, 4]}))
    read_row_inputs(supervised(SFTConfig, "train.jsonl", model__path="ends"))
    (line,) = caplog.messages
    assert line.startswith(
        "the tokenizer's end token is 2 ('</s>'), and config.json of the model names 3 and 4 as "
        "eos_token_id; "
    )

    caplog.clear()
    read_row_inputs(supervised(SFTConfig, "train.jsonl"))
    assert not caplog.messages


def test_rows_need_an_answer_only_where_a_rule_compares_with_one(place):
    (place / "prompts.jsonl").write_text('{"prompt": "1+1="}\n' * 8)
    files = {f"data__{split}_files": "prompts.jsonl" for split in ("train", "val", "test")}
    inputs = read_ppo_inputs(ppo(**files))
    inputs.reward.close()
    assert inputs.prompts[0].ground_truth == [None]
    assert inputs.prompts[0].extra_info == [{"split": "train", "index": 0}]
    for split in ("val", "test"):
        assert inputs.held_out[split].extra_info[7] == {"split": split, "index": 7}
    both = [{"name": "rewards.py:score"}, {"name": "exact_match"}]
    assert "prompts.jsonl:1: no value for 'answer'" in refusal(ppo(**files, reward__terms=both))


def test_a_dry_run_reads_all_that_is_there():
    for config in (
        ppo(),
        supervised(SFTConfig, "train.jsonl"),
        supervised(RewardModelConfig, "pairs.jsonl"),
    ):
        text = dry_run(config, 1).text
        assert text.endswith("configuration fits 1 rank")
        assert "  3 epochs x (rows // 4) = 6 training steps" in text
        assert "not checked" not in text


def test_what_is_absent_is_listed_by_the_dry_run_and_refused_by_a_run(place):
    absent = {
        "reference__path": "elsewhere",
        "algorithm__use_kl_in_reward": True,
        "data__val_files": ["val.jsonl", "/nowhere/x.jsonl"],
        "reward__terms": [{"name": "rewards.py:score"}, {"name": "none.py:f"}],
    }

    found = dry_run(ppo(**absent), 1)
    assert found.missing == (
        "reference.path elsewhere does not exist; name an existing directory, relative to the "
        f"working directory {place}, or a repository of the Hub as org/name",
        "data.val_files /nowhere/x.jsonl does not exist; name an existing file",
        "reward.terms.1.name none.py does not exist; name an existing file, relative to the "
        f"working directory {place}",
    )
    lines = found.text.splitlines()
    assert lines[:3] == [f"not found: {line}" for line in found.missing]
    assert lines[-1] == "what could be checked fits 1 rank"

    with pytest.raises(MrlhfError) as caught:
        preflight(ppo(**absent), 1)
    assert str(caught.value).splitlines() == list(found.missing)


def test_a_dry_run_lists_packages_that_are_not_here(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "trackio" else found(name)
    )
    (line,) = dry_run(ppo(trainer__trackers=["trackio"]), 1).missing
    assert line.startswith("trainer.trackers names trackio, which is not installed")


def test_a_config_json_is_enough_for_a_dry_run(place):
    (place / "shape").mkdir()
    (place / "shape" / "config.json").write_text(json.dumps(MODEL))
    config = ppo(actor__path="shape", data__tokenizer=None)
    found = dry_run(config, 1)
    assert found.missing == ()
    assert found.text.splitlines()[:3] == [
        "not checked: the weights of actor",
        "not checked: the weights of critic",
        "not checked: the data, since shape holds no tokenizer",
    ]
    assert found.text.endswith("what could be checked fits 1 rank")
    with pytest.raises(MrlhfError, match="the directory holds no tokenizer"):
        read_ppo_inputs(config)


def test_what_is_here_is_checked_though_other_things_are_absent():
    bad = {"data__train_files": ["train.jsonl", "absent.jsonl"], "data__max_prompt_length": 2}
    with pytest.raises(MrlhfError, match=r"train\.jsonl:1: the prompt has 4 tokens"):
        dry_run(ppo(**bad), 1)
    with pytest.raises(MrlhfError, match="has no function 'nothing'"):
        dry_run(ppo(critic__path="away", reward__terms=[{"name": "rewards.py:nothing"}]), 1)


@pytest.fixture
def crowded(place, monkeypatch):
    """What the cases of the table find in the working directory, which is the home too."""
    monkeypatch.setenv("HOME", str(place / "home"))
    if not (place / "taken").exists():
        for name in ("begun/checkpoints/step_000004", "mixed/metrics.jsonl", "piped", "taken"):
            (place / name).mkdir(parents=True)
        (place / "taken" / "actor").write_text("")
        os.mkfifo(place / "piped" / "config.yaml")
        for name, target in (("loose", "nowhere"), ("linked/actor", place / "model")):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).symlink_to(target)
        (place / "written").mkdir()
        shutil.copy(place / "train.jsonl", place / "written" / "metrics.jsonl")


CASES = [case for case in read_cases("input_refusals.txt") if case[0] == "PPOConfig"]


@pytest.mark.parametrize(("_", "ranks", "row", "said"), CASES, ids=[case[2] for case in CASES])
def test_one_line_for_what_cannot_be_used(place, crowded, _, ranks, row, said):
    places = {"place": place, "package": PACKAGE, "long": "a" * 256}
    changes = read_changes(row, **places)
    before = sorted(place.rglob("*"))
    refused = refusal(ppo(**changes))

    (words,) = said
    assert holds(refused, words.format(**places)), refused
    assert "trainer__output_dir" not in changes or sorted(place.rglob("*")) == before


def _copy_with_tokenizer(place, model, name, change):
    """A copy of a model that has the run's tokenizer after a change of its `tokenizer.json`."""
    shutil.copytree(place / model, place / name)
    for file in (place / "tokenizer").glob("*.json"):
        shutil.copy(file, place / name)
    file = place / name / "tokenizer.json"
    stated = json.loads(file.read_text())
    change(stated["model"]["vocab"], stated["added_tokens"])
    file.write_text(json.dumps(stated))


def _swap(vocab, added):
    vocab["8"], vocab["9"] = vocab["9"], vocab["8"]


def _lose(vocab, added):
    del vocab["9"]


def _extend(vocab, added):
    added.append({**added[0], "id": 40, "content": "<more>"})


def _rename(vocab, added):
    (end,) = (token for token in added if token["content"] == "</s>")
    vocab["<end>"] = vocab.pop("</s>")
    end["content"] = "<end>"


def _free(vocab, added):
    """An ordinary token of the run stands where the model keeps one free."""
    vocab["<reserved_0>"] = vocab.pop("9")


def _empty(vocab, added):
    """No vocabulary at all, as if only the configuration had been copied."""


def test_a_model_may_keep_tokens_free_or_have_no_vocabulary(place):
    _copy_with_tokenizer(place, "model", "model_free", _free)
    _copy_with_tokenizer(place, "model", "model_empty", _empty)
    for file in ("tokenizer.json", "tokenizer.model"):
        (place / "model_empty" / file).unlink(missing_ok=True)
    for path in ("model_free", "model_empty"):
        read_ppo_inputs(ppo(actor__path=path)).reward.close()


def test_models_with_another_tokenizer_than_the_runs_are_refused(place):
    """Its size says nothing; a model whose directory has none, or has further tokens, goes on."""
    for change in (_swap, _lose, _extend, _rename):
        _copy_with_tokenizer(place, "scores", f"scores{change.__name__}", change)
        _copy_with_tokenizer(place, "model", f"model{change.__name__}", change)
    judged = {"reward__terms": [{"name": "reward_model"}]}
    gae = {"algorithm__adv_estimator": "gae"}
    kl = {"actor__use_kl_loss": True}
    for key, path, others, token in (
        ("reward_model", "scores_swap", judged, "8"),
        ("reward_model", "scores_lose", judged, "9"),
        ("reward_model", "scores_rename", judged, "</s>"),
        ("critic", "scores_swap", gae, "8"),
        ("reference", "model_swap", kl, "8"),
        ("actor", "model_rename", {}, "</s>"),
    ):
        said = refusal(ppo(**{f"{key}__path": path}, **others))
        assert f"{key}.path {path} has a tokenizer of its own" in said
        assert f"in data.tokenizer it is {token!r}" in said, said
    for key, path, others in (
        ("reward_model", "scores_extend", judged),
        ("reward_model", "scores", judged),
        ("critic", "scores_lose", gae),
    ):
        config = ppo(**{f"{key}__path": path}, **others)
        read_ppo_inputs(config).reward.close()

    for root, file in ((SFTConfig, "train.jsonl"), (RewardModelConfig, "pairs.jsonl")):
        with pytest.raises(MrlhfError, match=r"model.path model_swap has a tokenizer of its own"):
            dry_run(supervised(root, file, model__path="model_swap"), 1)


def test_a_neighbour_with_a_similar_name_is_offered():
    with pytest.raises(MrlhfError) as caught:
        preflight(ppo(data__train_files="trian.jsonl"), 1)
    assert str(caught.value) == (
        "data.train_files trian.jsonl does not exist; did you mean train.jsonl?"
    )


def test_an_inherited_path_is_told_once():
    with pytest.raises(MrlhfError) as caught:
        preflight(
            ppo(actor__path="away", data__tokenizer=None, algorithm__use_kl_in_reward=True), 1
        )
    assert str(caught.value).startswith("actor.path away does not exist; ")
    assert "\n" not in str(caught.value)


def test_a_run_may_read_what_lies_beside_its_models(place):
    (place / "own" / "checkpoints").mkdir(parents=True)
    shutil.copytree(place / "model", place / "own" / "model")
    assert "fits 1 rank" in dry_run(ppo(trainer__output_dir="own", actor__path="own/model"), 1).text


def test_a_directory_with_a_checkpoint_is_gone_on_from(place):
    (place / "run" / "checkpoints" / "step_000004").mkdir(parents=True)
    (place / "run" / "checkpoints" / "step_000004" / "manifest.json").write_text("{}")
    for named in ("run", "run/checkpoints", "run/checkpoints/step_000004"):
        assert "fits 1 rank" in dry_run(ppo(trainer__resume=named), 1).text


def test_a_directory_without_permission_to_write(place, monkeypatch):
    """As another user than the superuser, who may write everywhere."""
    allowed = os.access
    closed = place / "closed"
    closed.mkdir()

    def access(path, mode):
        return allowed(path, mode) and not (mode & os.W_OK and str(path) == str(closed))

    monkeypatch.setattr(os, "access", access)
    assert refusal(ppo(trainer__output_dir="closed/new/run")) == (
        f"trainer.output_dir closed/new/run cannot be created: {closed} may not be written; name "
        "another directory"
    )


def test_a_validation_without_rows_is_refused():
    few = supervised(
        RewardModelConfig, "pairs.jsonl", data__held_out_fraction=0.01, trainer__test_freq=1
    )
    with pytest.raises(MrlhfError, match=r"data\.held_out_fraction 0\.01 .* keeps none"):
        read_row_inputs(few)
