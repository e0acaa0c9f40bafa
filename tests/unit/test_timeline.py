"""The phases that each rank writes down."""

import json
import logging

from mrlhf.parallel.phases import Span
from mrlhf.run.board import Timeline

SPANS = [Span("gen", 1000.5, 0.25, 0.125), Span("step", 1000.0, 2.0, 1.5)]


def lines(directory, rank):
    file = directory / "timeline" / f"rank_{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_has_the_spans_of_a_step_in_the_order_in_which_they_began(tmp_path):
    timeline = Timeline(tmp_path, 3, every=2, process={"host": "a", "ranks": 4})
    timeline.begin()
    for step in (1, 2, 3):
        timeline.write(step, SPANS)
    timeline.write(4, [])

    assert lines(tmp_path, 3) == [
        {"process": {"rank": 3, "host": "a", "ranks": 4}},
        {"step": 2, "begin": 1000.0, "spans": [["step", 0.0, 2.0, 1.5], ["gen", 0.5, 0.25, 0.125]]},
    ]


def test_a_later_start_appends(tmp_path):
    for every in (1, 0):
        timeline = Timeline(tmp_path, 0, every, process={})
        timeline.begin()
        timeline.write(1, SPANS)
    assert [next(iter(line)) for line in lines(tmp_path, 0)] == ["process", "step", "process"]


def test_what_cannot_be_written_is_said_once_and_given_up(tmp_path, caplog):
    (tmp_path / "timeline").write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path, 0, every=1, process={})
        timeline.write(1, SPANS)
    assert len(caplog.messages) == 1
    assert "phases are no longer recorded" in caplog.messages[0]
