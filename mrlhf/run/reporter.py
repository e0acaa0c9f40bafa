"""The one place where a trainer hands in its metrics; only rank 0 writes.

It does not know what a metric means, nor where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

from mrlhf.config.roots import AnyConfig
from mrlhf.run.metrics_file import ResumePoint
from mrlhf.run.outputs import Outputs
from mrlhf.run.startup import Run


class Reporter:
    """Reports the metrics of each step on the main rank; does nothing on the others."""

    def __init__(self, outputs: Outputs | None) -> None:
        """Take the outputs of the main rank; None on other ranks."""
        self._outputs = outputs

    @staticmethod
    def of(
        run: Run,
        config: AnyConfig,
        total_steps: int,
        columns: Sequence[tuple[str, str]],
        resumed: ResumePoint | None,
    ) -> Reporter:
        """The reporter of this rank; see `Outputs`."""
        if not run.is_main_rank:
            return Reporter(None)
        return Reporter(Outputs(config, total_steps, columns, resumed, run.board, run.monitor))

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record `metrics` of `step`; step 0 is what was measured before training."""
        if self._outputs is not None:
            self._outputs.report(step, metrics)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._outputs is not None:
            self._outputs.close()
