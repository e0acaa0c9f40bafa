"""The one place where a trainer's metrics go: the metrics file, tensorboard, the progress display.

Only rank 0 writes. It does not know what a metric means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from mrlhf.log import MetricsWriter, Progress
from mrlhf.run.directory import METRICS
from mrlhf.run.metrics_file import ResumePoint, rewind_metrics


class Reporter:
    """Writes and shows the metrics of each step on the main rank; does nothing on the others."""

    def __init__(
        self,
        is_main_rank: bool,
        output_dir: Path,
        tensorboard: bool,
        total_steps: int,
        columns: Sequence[tuple[str, str]],
        resumed: ResumePoint | None = None,
        log_freq: int = 1,
    ) -> None:
        """Open the files; rows and curves after the step of `resumed` are dropped.

        Raises:
            ConfigError: a file cannot be opened, or tensorboard is asked for and not installed.
            DataError: the earlier rows of a resumed run cannot be read.
        """
        self._stack = ExitStack()
        self._writer: MetricsWriter | None = None
        self._progress: Progress | None = None
        if not is_main_rank:
            return

        if resumed is None:
            self._writer = MetricsWriter(output_dir, tensorboard)
            self._progress = Progress(total_steps, columns, log_freq=log_freq)
            return
        # The curves' last point is drawn anew, since the process may have ended before it was.
        rewind_metrics(output_dir / METRICS, resumed)
        first_step = resumed.step if resumed.row else resumed.step + 1
        self._writer = MetricsWriter(output_dir, tensorboard, first_step)
        self._writer.draw(resumed.step, resumed.row)
        self._progress = Progress(total_steps, columns, resumed.step, log_freq)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`; step 0 is what was measured before training."""
        if self._writer is not None and self._progress is not None:
            self._writer.write(step, metrics)
            self._progress.update(step, metrics)

    def __enter__(self) -> Reporter:
        if self._writer is not None and self._progress is not None:
            self._stack.enter_context(self._writer)
            self._stack.enter_context(self._progress)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
