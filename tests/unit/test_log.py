"""Log lines, metrics files, progress and curves, each read back from where it was written."""

import io
import json
import logging
import os
import re
import resource
import subprocess
import sys
import time
from contextlib import closing

import pytest

from mrlhf.errors import ConfigError, DataError
from mrlhf.log import MetricsWriter, Progress, configure_logging, quiet_transformers, read_metrics


@pytest.fixture
def clean_logging():
    root = logging.getLogger()
    handlers = root.handlers[:]
    names = (None, "mrlhf", "mrlhf.data", "mrlhf.preflight", "mrlhf.rollout")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize(("rank", "informs"), [(0, True), (3, False)])
def test_rank_zero_informs_and_every_rank_warns(rank, informs, clean_logging, capsys):
    configure_logging(1)
    configure_logging(rank)  # a second call replaces the first
    logging.getLogger("mrlhf.trainers.ppo.step").info("step done")
    logging.getLogger("mrlhf.trainers.ppo.step").warning("slow disk")
    logging.getLogger("another.package").info("chatter")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + informs
    assert lines[-1].endswith(f"[rank {rank}] WARNING mrlhf.trainers.ppo.step: slow disk")

    for about in ("mrlhf.data.rows", "mrlhf.inputs.read", "mrlhf.rollout.partial"):
        logging.getLogger(about).warning("the same on every rank")
    assert len(capsys.readouterr().err.splitlines()) == (3 if rank == 0 else 0)


def test_a_terminal_gets_short_prefixes_and_whole_words(clean_logging, monkeypatch):
    text = "64 a replica if equally long, 256 decoded at once-and-again, " * 3
    shown = {}
    for kind in ("terminal", "file"):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda kind=kind: kind == "terminal")
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", "50")
        configure_logging(0)
        logging.getLogger("mrlhf.run").info("the run\n  %s", text.strip())
        logging.getLogger("mrlhf.run").warning("slow disk")
        configure_logging(3)
        logging.getLogger("mrlhf.run").warning("slow disk")
        shown[kind] = stream.getvalue().splitlines()

    first, *middle, own, other = shown["terminal"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO the run", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING slow disk", own)
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 3\] WARNING slow disk", other)
    assert max(map(len, middle)) <= 50 and " ".join(middle).split() == text.split()
    assert middle[0].startswith("  64") and all(line.startswith("    ") for line in middle[1:])

    first, whole, *_ = shown["file"]
    assert re.fullmatch(r"\d{4}-.* \[rank 0\] INFO mrlhf\.run: the run", first)
    assert whole == f"  {text.strip()}"


def test_a_view_shows_the_steps_itself(caplog):
    caplog.set_level(logging.INFO, logger="mrlhf")
    progress = Progress(2)
    for has_view in (True, False):
        progress.update(1, {"perf/throughput": 17030.4, "val/loss": 2.0}, has_view)
    assert [line.split(",")[0] for line in caplog.messages] == [
        "validation after step 1: val/loss 2",
        "step 1/2",
        "validation after step 1: val/loss 2",
    ]
    assert "throughput 17,030 tokens/s" in caplog.messages[1]


def test_a_quiet_console_shows_warnings_alone(clean_logging, capsys):
    configure_logging(0, "quiet")
    for name in ("mrlhf.run", "mrlhf.data.rows"):
        logging.getLogger(name).info("step done")
        logging.getLogger(name).warning("slow disk")
    assert [line.split()[-2:] for line in capsys.readouterr().err.splitlines()] == [
        ["slow", "disk"],
        ["slow", "disk"],
    ]


@pytest.mark.parametrize(("asked", "level"), [(None, "ERROR"), ("warning", "WARNING")])
def test_warnings_of_transformers_are_shown_if_asked_for(asked, level, monkeypatch):
    theirs = logging.getLogger("transformers")
    before = theirs.level
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", asked or "")
    if asked is None:
        monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
    try:
        theirs.setLevel(logging.WARNING)
        quiet_transformers()
        assert logging.getLevelName(theirs.level) == level
    finally:
        theirs.setLevel(before)


def test_transformers_is_quiet_if_it_is_imported_later():
    program = """if True:
        import logging
        from mrlhf.log import quiet_transformers
        quiet_transformers()
        import transformers.utils
        logging.getLogger("transformers.any").warning("too long")
    """
    environment = {key: text for key, text in os.environ.items() if "VERBOSITY" not in key}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "too long" not in ran.stderr


def test_each_step_is_one_sorted_line_readable_at_once(tmp_path):
    with closing(MetricsWriter(tmp_path / "run")) as writer:
        writer.write(1, {"b/x": 0.5, "a/y": float("nan"), "c": float("inf"), "d": 3})
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
        assert text == '{"a/y": null, "b/x": 0.5, "c": null, "d": 3, "step": 1}\n'
        writer.write(2, {"b/x": 0.25})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_appends_and_the_later_record_of_a_step_is_read(tmp_path):
    for steps, value in (((1, 2, 3), 0.0), ((3, 4), 1.0)):
        with closing(MetricsWriter(tmp_path)) as writer:
            for step in steps:
                writer.write(step, {"x": value})
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["x"]) for record in records] == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_a_broken_line_is_left_out_and_named(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(DataError, match="cannot read metrics"):
        read_metrics(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "x"\n{"step": "3"}\n\xff\n[4]\n{"step": 5}\n')
    assert read_metrics(path) == [{"step": 1}, {"step": 5}]
    assert [f"metrics.jsonl:{n}: the line is damaged" in caplog.text for n in range(1, 7)] == [
        *(False, True, True, True, True, False)
    ]


def test_rows_that_did_not_fit_on_the_disk_are_written_when_there_is_room(tmp_path, caplog):
    wanted = "".join(f'{{"step": {step}, "x": 0.5}}\n' for step in range(1, 5))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(MetricsWriter(tmp_path)) as writer:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))  # a row and a half
            for step in (1, 2, 3):
                writer.write(step, {"x": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "metrics.jsonl").read_text() == wanted[:30]
        writer.write(4, {"x": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == wanted
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"cannot write {tmp_path / 'metrics.jsonl'}"
    ]

    writer = MetricsWriter(tmp_path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        writer.write(5, {"x": 0.5})
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "the last 1 rows of" in caplog.messages[-1]


def test_metrics_that_cannot_be_opened_are_refused_in_one_line(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"^trainer\.output_dir [^\n]*remove what is in the way"):
        MetricsWriter(tmp_path)


def test_progress_is_log_lines(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "time", lambda: 1e9)
    caplog.set_level(logging.INFO, logger="mrlhf")
    ends = [time.strftime("%H:%M", time.localtime(1e9 + left)) for left in (270, 160)]
    progress = Progress(12, first_step=2)
    assert progress.seconds_left(2) is None
    clock[0] += 30
    progress.update(3, {"critic/score/mean": 0.123456, "response_length/mean": 34.0})
    clock[0] += 10
    progress.update(
        4, {"critic/score/mean": 0.5, "actor/ppo_kl": float("nan"), "val/sums/acc@1": 0.125}
    )
    assert progress.seconds_left(4) == 160
    progress = Progress(12, log_freq=5)
    for step in range(13):
        measured = {"val/loss": 2.0, "val_sampled/a": 1 / 3} if step in (0, 7) else {}
        if step == 0:
            measured["test/loss"] = 3.0
        progress.update(step, measured)

    assert caplog.messages == [
        f"step 3/12, reward 0.1235, length 34 tokens, 0:04:30 left, until {ends[0]}",
        f"step 4/12, reward 0.5, kl to old nan nats/token, 0:02:40 left, until {ends[1]}",
        "validation after step 4: val/sums/acc@1 0.125",
        "validation before training: val/loss 2, val_sampled/a 0.3333",
        "test before training: test/loss 3",
        "step 5/12, 0:00:00 left",
        "validation after step 7: val/loss 2, val_sampled/a 0.3333",
        "step 10/12, 0:00:00 left",
        "step 12/12, 0:00:00 left",
    ]
