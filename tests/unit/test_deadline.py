"""A run stops so early that its last save ends within the job's time."""

import time

import pytest

from mrlhf.run import startup
from mrlhf.run.watcher import Deadline, time_to_save


@pytest.mark.parametrize(
    ("longest_s", "wanted_s"),
    [(0.0, 120.0), (0.3, 120.0), (30.0, 120.0), (31.0, 122.0), (300.0, 660.0)],
)
def test_the_last_save_has_the_time_of_two_and_a_minute(longest_s, wanted_s):
    assert time_to_save(longest_s) == wanted_s


def test_a_job_stops_earlier_the_longer_its_saves_take():
    deadline = Deadline(end=4000.0)
    assert not deadline.is_reached(3879.9) and deadline.is_reached(3880.0)
    deadline.saved(300.0)
    deadline.saved(10.0)
    assert not deadline.is_reached(3339.9) and deadline.is_reached(3340.0)


def test_a_moment_that_the_user_gives_counts_as_it_is():
    deadline = Deadline(stop_at=100.0, end=90.0)
    deadline.saved(300.0)
    assert not deadline.is_reached(99.9) and deadline.is_reached(100.0)
    assert not Deadline().is_reached(1e12)


@pytest.mark.parametrize("minutes", [None, 60.0])
def test_a_jump_of_the_clock_ends_no_run(monkeypatch, minutes):
    """Neither Slurm's limit nor `trainer.save_by_minutes`, both an hour from the start."""
    began = time.monotonic()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time()) + 3600 + 120))
    deadline = startup._deadline(minutes)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert not deadline.is_reached(time.monotonic())
    assert not deadline.is_reached(began + 3598)
    assert deadline.is_reached(time.monotonic() + 3602)
