"""A phase is shown while it lasts, measured, and a range of the profiler."""

from __future__ import annotations

import pytest
from torch.profiler import profile

from mrlhf.parallel.phases import PhaseProgress, Phases, seconds_by_phase, timing_metrics


def test_the_current_phase_is_the_innermost_one() -> None:
    phases = Phases()
    names = [phases.name]
    with phases.enter("step"):
        names.append(phases.name)
        with phases.enter("gen"):
            names.append(phases.name)
        names.append(phases.name)
    assert [*names, phases.name] == ["start", "step", "gen", "step", "start"]
    assert phases.entered == 4


def test_a_phase_forgets_the_progress_of_the_one_before() -> None:
    phases = Phases()
    with phases.enter("gen"):
        phases.advance(1, 2, "responses")
        assert phases.progress == PhaseProgress(1, 2, "responses")
        with phases.enter("reward"):
            assert phases.progress is None
        assert phases.name == "gen" and phases.progress is None


def test_seconds_add_up_over_repeats_and_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Begin of step, begin and end of gen, begin and end of gen, end of step.
    clock = iter([0.0, 1.0, 3.0, 10.0, 14.0, 100.0])
    waits = []
    monkeypatch.setattr("mrlhf.parallel.phases.time.perf_counter", lambda: next(clock))
    phases = Phases(synchronize=lambda: waits.append(True))

    with phases.enter("step"):
        for _ in range(2):
            with phases.enter("gen"):
                pass

    spans = phases.take_spans()
    assert [(span.phase, span.seconds) for span in spans] == [
        ("gen", 2.0),
        ("gen", 4.0),
        ("step", 100.0),
    ]
    assert all(span.begin > 1e9 and span.busy >= 0.0 for span in spans)
    assert timing_metrics(seconds_by_phase(spans)) == {"timing_s/gen": 6.0, "timing_s/step": 100.0}
    assert len(waits) == 6
    assert phases.take_spans() == []


def test_a_phase_that_fails_remains() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="inside"), phases.enter("step"), phases.enter("gen"):
        raise ValueError("inside")
    assert phases.name == "gen"


def test_a_phase_is_a_range_of_the_profiler() -> None:
    phases = Phases()
    with profile() as profiler, phases.enter("values"):
        pass
    assert "values" in {event.key for event in profiler.key_averages()}


def test_nobody_asks_a_program_without_a_watcher_to_stop() -> None:
    phases = Phases()
    for _ in range(2):
        with phases.interruptible() as may_begin:
            assert all(may_begin(unit) for unit in range(3))
