"""The clock of a pipeline stage, with a schedule and a clock of its own."""

from __future__ import annotations

import time

import pytest
import torch

from mrlhf.parallel.stage_clock import StageClock


def run(
    clock: StageClock, events: list[tuple[float, str, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Go through `events`: at this time, this timer starts or stops."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with clock.measured():
        for seconds, name, event in events:
            now = 100.0 + seconds
            timer = clock(name, log_level=2)
            if event == "start":
                timer.start(barrier=True)
            else:
                timer.stop()
    return clock.take()


def test_the_bubble_of_two_stages_and_one_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Forward takes 1 second and backward 2 on either stage: each stage is idle half of the time.
    cpu = torch.device("cpu")
    first = run(
        StageClock(cpu, stage=0, stages=2),
        [
            (0.0, "forward-compute", "start"),
            (1.0, "forward-compute", "stop"),
            (1.0, "forward-send", "start"),
            (1.0, "forward-send", "stop"),
            (1.0, "backward-recv", "start"),
            (4.0, "backward-recv", "stop"),
            (4.0, "backward-compute", "start"),
            (6.0, "backward-compute", "stop"),
            (6.0, "all-grads-sync", "start"),
            (9.0, "all-grads-sync", "stop"),
        ],
        monkeypatch,
    )
    last = run(
        StageClock(cpu, stage=1, stages=2),
        [
            (0.0, "forward-recv", "start"),
            (1.0, "forward-recv", "stop"),
            (2.0, "forward-compute", "stop"),
            (4.0, "backward-compute", "stop"),
            (4.0, "backward-send", "start"),
            (4.0, "backward-send", "stop"),
        ],
        monkeypatch,
    )

    # The reduction of the gradients, at the end, is not part of the schedule.
    assert first == (2 * 6.0 - 3.0, 3.0)
    assert last == (-3.0, 3.0)
    assert (first[0] + last[0]) / (first[1] + last[1]) == 1.0  # (2 - 1) / 1 micro-batch
