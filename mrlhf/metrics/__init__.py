"""The metrics of a step: the table that describes them, merged sums, statistics of the batch."""

from mrlhf.metrics.step import (
    data_metrics,
    explained_variance,
    throughput_metrics,
    value_metrics,
)
from mrlhf.metrics.tally import Tally

__all__ = ["Tally", "data_metrics", "explained_variance", "throughput_metrics", "value_metrics"]
