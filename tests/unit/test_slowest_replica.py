"""The replica that the others wait for is found by its seconds."""

from mrlhf.parallel.replica_speed import slowest_replica
from mrlhf.rollout.collector import merge_engine_metrics


def test_the_slowest_is_compared_with_the_median_of_the_others():
    times = {0: 0.25, 2: 0.75, 4: 0.5, 6: 0.125}
    assert slowest_replica(times) == (3.0, 2)
    assert slowest_replica({0: 0.2, 1: 0.0}) is None  # one without work does not count
    assert slowest_replica({0: 0.2}) is None


def test_of_several_generations_the_one_with_the_slowest_replica_counts():
    parts = [
        {"rollout/imbalance": 1.0, "perf/slowest_replica": 2.0, "perf/slowest_replica_rank": 3},
        {"rollout/imbalance": 3.0},
        {"rollout/imbalance": 2.0, "perf/slowest_replica": 1.5, "perf/slowest_replica_rank": 0},
    ]
    merged = {"rollout/imbalance": 2.0, "perf/slowest_replica": 2.0, "perf/slowest_replica_rank": 3}
    assert merge_engine_metrics(parts) == merged
