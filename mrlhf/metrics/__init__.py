"""The metrics of a step: the table that describes them, merged sums, statistics of the batch."""

from mrlhf.metrics.step import data_metrics, throughput_metrics
from mrlhf.metrics.tally import Tally
from mrlhf.metrics.values import explained_variance, value_metrics

__all__ = ["Tally", "data_metrics", "explained_variance", "throughput_metrics", "value_metrics"]
