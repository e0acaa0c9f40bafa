"""What trackers are told is read back from what they have written, without a network."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from mrlhf.errors import ConfigError
from mrlhf.metrics import trackers as trackers_file
from mrlhf.metrics.trackers import Tracked, TrackedRun, Trackers, check_trackers, finite

TEXT = "  prompt '1+1='\n  <script>2</script>"


def track(directory, *names, first_step=None, steps=(1, 2)):
    run = TrackedRun(directory, "sums", "my run", {"actor": {"lr": 0.5}}, first_step)
    trackers = Trackers(names, run)
    for step in steps:
        numbers = finite({"critic/score/mean": step / 4, "bad": float("nan"), "none": None})
        texts = {"samples/training": TEXT}
        trackers.write(Tracked(step, numbers, texts, {"response_length": [3, 4, 4, 5]}))
    trackers.close()


def test_tensorboard_holds_numbers_texts_and_histograms(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    track(tmp_path, "tensorboard")
    everything = dict.fromkeys(("histograms", "scalars", "tensors"), 0)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"), everything)
    events.Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    scalars = events.Scalars("critic/score/mean")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(1, 0.25), (2, 0.5)]

    (histogram, _) = events.Histograms("response_length")
    assert histogram.histogram_value.num == 4 and histogram.histogram_value.sum == 16
    (text, _) = events.Tensors("samples/training/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert [line.removeprefix("    ") for line in shown.splitlines()] == TEXT.splitlines()


def test_wandb_keeps_an_offline_run_in_the_output_directory(tmp_path, monkeypatch):
    pytest.importorskip("wandb")

    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path, "wandb")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = file.read_bytes()  # in a format of its own, in which names and numbers are texts
    for text in (b"my run", b"critic/score/mean", b"0.25", b"histogram", b"html-file"):
        assert text in records, text
    assert b"bad" not in records
    (page, *_) = tmp_path.glob("wandb/offline-run-*/files/media/html/**/*.html")
    assert "&lt;script&gt;2" in page.read_text()


def test_trackio_keeps_a_run_on_this_machine(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    program = f"""if True:
        from pathlib import Path
        from tests.unit.test_trackers import track
        track(Path({str(tmp_path)!r}), "trackio")
    """
    # It reads the variable when it is imported.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    (file,) = (tmp_path / "trackio").glob("sums*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, run_name, metrics FROM metrics ORDER BY step")
        found = [(step, name, json.loads(text)["critic/score/mean"]) for step, name, text in rows]
    assert found == [(1, "my run", 0.25), (2, "my run", 0.5)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_trackers([name])
    assert f"pip install {name}," in str(caught.value) and "\n" not in str(caught.value)


class _Broken:
    def __init__(self, run):
        if run.name == "no run":
            raise OSError("the disk\nis full")

    def write(self, tracked):
        raise OSError("the disk is full")

    def close(self):
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_is_given_up(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(trackers_file._TRACKERS, "wandb", _Broken)
    track(tmp_path, "wandb")
    assert caplog.messages == ["wandb gets no more numbers, since writing failed: the disk is full"]


def test_a_tracker_that_cannot_be_opened_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers_file._TRACKERS, "wandb", _Broken)
    with pytest.raises(ConfigError, match=r"^trainer.trackers: wandb [^\n]* the disk is full"):
        Trackers(["wandb"], TrackedRun(tmp_path, "sums", "no run", {}))
