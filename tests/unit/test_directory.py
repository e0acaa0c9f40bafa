"""An output directory that holds a run is gone on with, kept, deleted as told, or refused."""

import json
import re
import shutil
from pathlib import Path

import pytest

from mrlhf.checkpoint.manifest import Manifest
from mrlhf.config.load import changed_keys, dump_yaml
from mrlhf.errors import ConfigError
from mrlhf.run.directory import (
    OpeningOptions,
    begun_keys,
    describe_opening,
    inputs_in,
    keep_aside,
    open_directory,
    plan_opening,
)
from tests.unit.configurations import ppo

ROWS = '{"step": 1, "loss": 0.5}\n'


def make_run(directory, rows=True, finished=False, checkpoints=()):
    """The files of a run: metrics, perhaps a summary, and checkpoints with manifests."""
    directory.mkdir(parents=True, exist_ok=True)
    if rows:
        (directory / "metrics.jsonl").write_text(ROWS)
        (directory / "tensorboard").mkdir()
        (directory / "tensorboard" / "events.out.tfevents.1").write_bytes(b"curves")
    if finished:
        (directory / "summary.json").write_text("{}")
    for name in checkpoints:
        (directory / "checkpoints" / name).mkdir(parents=True)
        (directory / "checkpoints" / name / "manifest.json").write_text("{}")
    return directory


def open_it(directory, resume="auto", overwrite=False, names=("a",), again=(), inputs=(), **keys):
    options = OpeningOptions(resume, overwrite, names, again, inputs)
    config = ppo(trainer__output_dir=str(directory), **keys)
    directory.mkdir(exist_ok=True)
    before = contents(directory)
    said = describe_opening(directory, options)
    opening = plan_opening(directory, options)
    assert (" go on from " in said) is (opening.resume_from is not None)
    assert contents(directory) == before, "nothing is changed before all checks have passed"
    open_directory(directory, config, options, opening)
    return opening.resume_from


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refusal(directory, *arguments, **keywords):
    directory.mkdir(exist_ok=True)
    before = contents(directory)
    with pytest.raises(ConfigError) as caught:
        open_it(directory, *arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    asked = {"resume": "auto", "overwrite": False, "names": (), "again": (), "inputs": ()}
    given = dict(zip(asked, arguments, strict=False)) | keywords
    options = OpeningOptions(**{key: given.get(key, value) for key, value in asked.items()})
    assert describe_opening(directory, options) == f"a start would be refused: {message}"
    assert contents(directory) == before
    return message


def files(directory):
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def test_the_day_of_the_first_start_is_that_of_the_checkpoint_to_go_on_from(tmp_path):
    def day_of(directory, resume="auto", overwrite=False):
        options = OpeningOptions(resume, overwrite, (), (), ())
        return begun_keys(directory, options).get("data.date")

    assert day_of(tmp_path / "new") is None
    names = ("step_000001", "step_000002")
    run = make_run(tmp_path / "run", checkpoints=names)
    for name, data in zip(names, ({"date": "2020-02-03"}, {}), strict=True):
        manifest = Manifest(int(name[-1]), False, "PPOConfig", 1, {"data": data}, {}, (), {})
        (run / "checkpoints" / name / "manifest.json").write_bytes(manifest.to_bytes())
    assert day_of(run) is None  # the newest is of a version that did not write it
    (run / "checkpoints" / names[1] / "manifest.json").write_text("damaged")
    assert day_of(run) == day_of(tmp_path / "new", str(run)) == "2020-02-03"
    assert day_of(run, overwrite=True) is day_of(run, "never") is None


def test_an_empty_directory_begins_anew_and_gets_the_configuration(tmp_path):
    assert open_it(tmp_path / "run") is None
    assert files(tmp_path / "run") == ["config.yaml", "run.json"]
    assert open_it(tmp_path / "run", resume="never") is None
    assert open_it(tmp_path / "run", overwrite=True) is None


def test_auto_goes_on_from_the_checkpoints_and_keeps_every_file(tmp_path):
    run = make_run(tmp_path / "run", checkpoints=["step_000002", "step_000004"])
    before = files(run)
    assert open_it(run) == run / "checkpoints"
    assert files(run) == sorted([*before, "config.yaml", "run.json"])
    assert (run / "metrics.jsonl").read_text() == ROWS


def test_a_finished_run_goes_on_from_its_last_step_alone(tmp_path):
    last = json.loads(ROWS.splitlines()[-1])["step"]
    run = make_run(tmp_path / "run", finished=True, checkpoints=[f"step_{last:06d}"])
    assert open_it(run) == run / "checkpoints"
    assert not (run / "summary.json").exists()

    damaged = make_run(tmp_path / "damaged", finished=True, checkpoints=[f"step_{last:06d}"])
    (damaged / "metrics.jsonl").write_bytes(b'{"step": 0, "lo\xff\n' + ROWS.encode())
    assert open_it(damaged) == damaged / "checkpoints"

    older = make_run(tmp_path / "older", finished=True, checkpoints=["step_000000"])
    message = refusal(older)
    assert "a finished run with the checkpoint step_000000" in message
    assert f"trainer.resume={older / 'checkpoints' / 'step_000000'} trains from it again" in message


def test_a_checkpoint_that_is_not_whole_is_not_taken_for_none(tmp_path):
    """Whoever opens it refuses it; the run does not begin anew in silence."""
    run = make_run(tmp_path / "run")
    (run / "checkpoints" / ".step_000004.saving").mkdir(parents=True)
    assert open_it(run) is None
    other = make_run(tmp_path / "other")
    (other / "checkpoints" / "step_000002").mkdir(parents=True)
    assert open_it(other) == other / "checkpoints"


def test_a_run_that_left_no_checkpoint_begins_anew_and_its_rows_are_kept(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    assert open_it(run) is None
    assert (run / "metrics.before_1.jsonl").read_text() == ROWS
    assert not (run / "metrics.jsonl").exists()
    assert files(run / "tensorboard.before_1") == ["events.out.tfevents.1"]
    assert "metrics are kept in metrics.before_1.jsonl" in caplog.text

    (run / "metrics.jsonl").write_text("second\n")
    assert open_it(run) is None
    assert (run / "metrics.before_1.jsonl").read_text() == ROWS
    assert (run / "metrics.before_2.jsonl").read_text() == "second\n"


def test_a_finished_run_without_checkpoint_is_refused(tmp_path):
    run = make_run(tmp_path / "run", finished=True)
    before = files(run)
    message = refusal(run)
    assert "finished run" in message
    assert "trainer.overwrite=true" in message and "another trainer.output_dir" in message
    assert files(run) == before


@pytest.mark.parametrize("checkpoints", [[], ["step_000002"]])
def test_never_refuses_whatever_the_directory_holds(tmp_path, checkpoints):
    run = make_run(tmp_path / "run", checkpoints=checkpoints)
    before = files(run)
    message = refusal(run, resume="never")
    assert "trainer.overwrite=true" in message
    assert ("trainer.resume=auto" in message) == bool(checkpoints)
    assert files(run) == before


def test_overwrite_deletes_what_a_run_writes_and_nothing_else(tmp_path):
    run = make_run(tmp_path / "run", finished=True, checkpoints=["step_000002"])
    ours = [
        "metrics.before_1.jsonl",
        "config.1.yaml",
        "alarms.jsonl",
        "alarms.before_1.jsonl",
        "status.json",
        "wandb/run-1/run-1.wandb",
        "curves.png",
        "failed_step_000003.safetensors",
        "checkpoints/.step_000004.saving/state.json",
        "checkpoints/before_1.step_000009/manifest.json",
        "rollouts/step_000001.jsonl",
        "rollouts/step_000002.parquet",
        "validation/step_000000.jsonl",
        "timeline/rank_3.jsonl",
        "report.html",
        "hangs/rank_00001.txt",
        "actor/model.safetensors",
        "actor/config.json",
        "tensorboard.before_1/events.out.tfevents.0",
    ]
    foreign = [
        "notes.txt",
        "metrics_of_mine.jsonl",
        "data/train.jsonl",
        "sft/model/model.safetensors",
        "rollouts/notes.md",
        "checkpoints/mine/weights.safetensors",
    ]
    for name in ours + foreign:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")

    assert open_it(run, overwrite=True) is None
    assert files(run) == sorted([*foreign, "config.yaml", "run.json"])
    assert not (run / "actor").exists() and not (run / "tensorboard").exists()


def test_overwrite_keeps_what_the_configuration_reads(tmp_path):
    run = make_run(tmp_path / "run")
    for name in ("model/model.safetensors", "actor/model.safetensors"):
        (run / name).parent.mkdir()
        (run / name).write_text("x")
    config = ppo(trainer__output_dir=str(run), actor__path=str(run / "model"))
    inputs = inputs_in(config)
    assert run in inputs and run / "model" in inputs

    assert open_it(run, overwrite=True, inputs=inputs) is None
    assert files(run) == ["config.yaml", "model/model.safetensors", "run.json"]


def test_overwrite_of_a_directory_without_a_run_deletes_nothing(tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "model.safetensors").write_text("x")
    open_it(tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "model" / "model.safetensors").read_text() == "x"


def test_a_link_in_place_of_a_folder_is_followed_but_not_deleted(tmp_path):
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "disk", rows=False, checkpoints=["step_000001"])
    (other / "precious.txt").write_text("x")
    (run / "checkpoints").symlink_to(other / "checkpoints")
    (run / "rollouts").symlink_to(other)
    assert open_it(run) == run / "checkpoints"
    assert open_it(run, resume=str(run)) == (other / "checkpoints")

    open_it(run, overwrite=True)
    assert files(other) == ["precious.txt"]
    assert (run / "checkpoints").is_symlink()


def test_resume_from_another_run_needs_an_empty_directory(tmp_path):
    other = make_run(tmp_path / "other", checkpoints=["step_000002", "step_000004"])
    chosen = other / "checkpoints" / "step_000002"
    for named, wanted in [
        (chosen, chosen),
        (other, other / "checkpoints"),
        (other / "checkpoints", other / "checkpoints"),
    ]:
        run = tmp_path / f"run_of_{named.name}"
        assert open_it(run, resume=str(named)) == wanted
        assert json.loads((run / "run.json").read_text())["resumed_from"] == str(wanted)

    run = make_run(tmp_path / "run", checkpoints=["step_000001"])
    assert "trainer.resume=auto" in refusal(run, resume=str(chosen))
    assert open_it(run, resume=str(chosen), overwrite=True) == chosen
    assert not (run / "metrics.jsonl").exists()
    assert len(files(other)) == 4


@pytest.mark.parametrize("saved", [[], ["step_000003"], ["step_000003", "step_000005"]])
def test_the_same_command_again_goes_on_with_what_it_began_from_another_run(tmp_path, saved):
    """After a kill its own checkpoints count, and without any the one that is named."""
    other = make_run(tmp_path / "other", checkpoints=["step_000002"])
    chosen = other / "checkpoints" / "step_000002"
    run = tmp_path / "run"
    assert open_it(run, resume=str(chosen)) == chosen
    make_run(run, checkpoints=saved)
    for _ in range(2):  # it may be killed again
        wanted = run / "checkpoints" if saved else chosen
        assert open_it(run, resume=str(chosen)) == wanted
        if not saved:
            make_run(run, rows=False)
            (run / "metrics.jsonl").write_text(ROWS)
    kept = sorted(path.name for path in run.glob("metrics.before_*"))
    assert kept == ([] if saved else ["metrics.before_1.jsonl", "metrics.before_2.jsonl"])

    if saved:
        assert open_it(run) == run / "checkpoints"  # with auto in between
        shutil.rmtree(other)
        assert open_it(run, resume=str(chosen)) == run / "checkpoints"
    another = make_run(tmp_path / "another", checkpoints=["step_000002"])
    refusal(run, resume=str(another))


def test_overwrite_after_a_start_that_came_to_nothing_tells_no_changed_keys(tmp_path, caplog):
    run = tmp_path / "run"
    open_it(run)
    open_it(run, overwrite=True, rollout__n=4)
    assert files(run) == ["config.yaml", "run.json"]
    assert "has changed" not in caplog.text


def test_without_room_a_start_changes_nothing(tmp_path):
    run = make_run(tmp_path / "run", checkpoints=["step_000002"])
    open_it(run)
    (run / ".run.json.tmp").mkdir()  # the second of the files that are written first
    before = contents(run)
    with pytest.raises(OSError, match="directory"):
        open_it(run, overwrite=True)
    assert contents(run) == before


def test_going_back_in_a_run_sets_the_later_checkpoints_aside(tmp_path, caplog):
    names = ["step_000002", "step_000004", "step_000004_interrupted"]
    run = make_run(tmp_path / "run", checkpoints=names)
    chosen = run / "checkpoints" / "step_000002"
    assert open_it(run, resume=str(chosen)) == chosen
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "before_1.step_000004",
        "before_1.step_000004_interrupted",
        "step_000002",
    ]
    assert "step_000004 is kept as before_1.step_000004" in caplog.text

    message = refusal(run, resume=str(chosen), overwrite=True)
    assert "trainer.overwrite would delete" in message and chosen.is_dir()


def test_going_back_sets_aside_all_that_is_later(tmp_path):
    """Under one number each time; the rows up to the checkpoint stay where they are, too."""
    later = {
        "rollouts/step_000003.jsonl": "rollouts/before_{}.step_000003.jsonl",
        "rollouts/step_000010.parquet": "rollouts/before_{}.step_000010.parquet",
        "validation/step_000003.jsonl": "validation/before_{}.step_000003.jsonl",
        "profiles/step_000004_rank_0.json.gz": "profiles/before_{}.step_000004_rank_0.json.gz",
        "failed_step_000005.json": "before_{}.failed_step_000005.json",
        "checkpoints/step_000004/manifest.json": "checkpoints/before_{}.step_000004/manifest.json",
        "summary.json": "summary.before_{}.json",
    }
    copied = {
        "metrics.jsonl": "metrics.before_{}.jsonl",
        "alarms.jsonl": "alarms.before_{}.jsonl",
        "tensorboard/events.out.tfevents.1": "tensorboard.before_{}/events.out.tfevents.1",
    }
    staying = ["rollouts/step_000002.jsonl", "failed_step_000001.json", "rollouts/step_by_step.txt"]
    run = make_run(tmp_path / "run", checkpoints=["step_000002"])
    chosen = run / "checkpoints" / "step_000002"
    for number in (1, 2):
        for name in (*later, *copied, *staying):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(f"of turn {number}")
        (run / "metrics.jsonl").write_text(f'{{"step": 2}}\n{{"step": 4, "turn": {number}}}\n')
        before = {name: (run / name).read_text() for name in (*later, *copied)}
        assert open_it(run, resume=str(chosen)) == chosen
        for name, kept in (later | copied).items():
            assert (run / kept.format(number)).read_text() == before[name], name
            assert (run / name).exists() is (name in copied), name
        assert all((run / name).is_file() for name in staying)

    (run / "actor_best.before_2").mkdir()
    (run / "actor_best.before_2" / "model.safetensors").write_text("x")
    open_it(run, overwrite=True)
    assert files(run) == ["config.yaml", "rollouts/step_by_step.txt", "run.json"]


def test_a_step_that_is_the_last_one_leaves_nothing_to_set_aside(tmp_path):
    run = make_run(tmp_path / "run", finished=True, checkpoints=["step_000001"])
    kept = set(files(run)) - {"summary.json"}
    for _ in range(2):
        open_it(run, resume=str(run / "checkpoints" / "step_000001"))
        assert set(files(run)) == kept | {"config.yaml", "run.json"}


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere", "does not exist"), ("empty", "has no whole checkpoint")]
)
def test_a_path_without_checkpoint_is_refused(tmp_path, name, reason):
    (tmp_path / "empty").mkdir()
    message = refusal(tmp_path / "run", resume=str(tmp_path / name))
    assert reason in message and "trainer.resume" in message


@pytest.mark.parametrize("wish", [{"resume": "never"}, {"overwrite": True}, {"resume": "other"}])
def test_a_job_that_is_started_again_goes_on_with_its_own_run(tmp_path, wish):
    """Else the same command would refuse, or delete, what its first start has done."""
    if wish.get("resume") == "other":
        other = make_run(tmp_path / "other", checkpoints=["step_000100"])
        wish = {"resume": str(other)}
    run = tmp_path / "run"
    first = open_it(run, **wish, names=["torchrun 1", "Slurm job 7"])

    # It is killed before its first checkpoint.
    make_run(run)
    again = {"names": ["torchrun 2", "Slurm job 7"], "again": ["Slurm job 7"]}
    assert open_it(run, **wish, **again) == first
    assert (run / "metrics.before_1.jsonl").read_text() == ROWS

    # And after it.
    make_run(run, rows=False, checkpoints=["step_000003"])
    assert open_it(run, **wish, **again) == run / "checkpoints"
    assert (run / "checkpoints" / "step_000003").is_dir()


@pytest.mark.parametrize("again", [[], ["Slurm job 8"]])
def test_a_restarted_job_is_refused_like_any_other_if_it_has_not_begun_the_run(tmp_path, again):
    run = tmp_path / "run"
    open_it(run, names=["Slurm job 7"])
    make_run(run, checkpoints=["step_000003"])
    refusal(run, resume="never", names=["Slurm job 8"], again=again)
    refusal(run, resume="never", names=["Slurm job 8"], again=again)


def test_an_earlier_configuration_is_kept_and_the_changed_keys_are_told(tmp_path, caplog):
    run = make_run(tmp_path / "run", checkpoints=["step_000002"])
    open_it(run)
    first = (run / "config.yaml").read_text()
    open_it(run)
    assert not (run / "config.1.yaml").exists() and "has changed" not in caplog.text

    open_it(run, rollout__n=4, actor__optim__lr=0.5)
    assert (run / "config.1.yaml").read_text() == first
    assert re.search(r"has changed: actor\.optim\.lr, rollout\.n; .*config\.1\.yaml", caplog.text)

    open_it(run)
    assert "n: 4" in (run / "config.2.yaml").read_text()
    assert (run / "config.yaml").read_text() == first


def test_an_earlier_configuration_that_is_not_utf8_is_kept_as_it_is(tmp_path):
    run = make_run(tmp_path / "run", checkpoints=["step_000002"])
    (run / "config.yaml").write_bytes(b"# caf\xe9\nseed: 1\n")
    open_it(run)
    assert (run / "config.1.yaml").read_bytes() == b"# caf\xe9\nseed: 1\n"


def test_changed_keys_of_what_is_no_configuration():
    config = ppo()
    assert changed_keys(dump_yaml(config), config) == []
    assert changed_keys(dump_yaml(config) + "old: {key: 1}\n", config) == ["old.key"]
    assert "rollout.n" in changed_keys("{", config)


def test_what_is_written_has_the_users_mode(tmp_path):
    import os

    before = os.umask(0o027)
    try:
        run = Path(tmp_path / "run")
        open_it(run)
        assert (run / "config.yaml").stat().st_mode & 0o777 == 0o640
        assert (run / "run.json").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_dry_run_can_say_what_a_start_would_do(tmp_path):
    def said(name, resume="auto", overwrite=False):
        return describe_opening(tmp_path / name, OpeningOptions(resume, overwrite, (), (), ()))

    make_run(tmp_path / "stopped", checkpoints=("step_000002", "step_000004_interrupted"))
    make_run(tmp_path / "killed")
    make_run(tmp_path / "finished", finished=True)
    newest = tmp_path / "stopped/checkpoints/step_000004_interrupted"
    (tmp_path / "stopped/checkpoints/step_000006").mkdir()  # it has no manifest
    assert said("new") == "a start would begin at step 1"
    assert said("stopped") == f"a start would go on from {newest}"
    assert said("new", resume=str(tmp_path / "stopped")) == f"a start would go on from {newest}"
    assert said("killed").startswith("a start would begin at step 1, and set aside the rows of")
    deleted = f"a start would delete the run in {tmp_path}/finished and begin at step 1"
    assert said("finished", overwrite=True) == deleted
    assert said("finished").startswith("a start would be refused: trainer.output_dir")


def test_of_best_models_whose_steps_are_done_again_one_is_kept(tmp_path):
    best = tmp_path / "model_best"
    for text in ("a", "b"):
        best.mkdir()
        (best / "config.json").write_text(text)
        keep_aside(tmp_path, best, is_replayed=True)
    best.mkdir()
    keep_aside(tmp_path, best, is_replayed=False)
    assert {path.name for path in tmp_path.iterdir()} == {
        "model_best.before_0",
        "model_best.before_1",
    }
    assert (tmp_path / "model_best.before_0" / "config.json").read_text() == "b"
