"""The replica that the others wait for is found by the seconds of its passes."""

from mrlhf.rollout.collector import merge_engine_metrics
from mrlhf.rollout.generator import slowest_replica


def test_the_slowest_is_compared_with_the_median_of_the_others():
    replicas = [(0.25, 0), (0.75, 2), (0.5, 4), (0.125, 6)]
    assert slowest_replica(replicas) == {
        "perf/slowest_replica": 3.0,
        "perf/slowest_replica_rank": 2,
    }
    assert slowest_replica([(0.2, 0), (0.0, 1)]) == {}  # one that made no pass does not count
    assert slowest_replica([(0.2, 0)]) == {}


def test_of_several_generations_the_one_with_the_slowest_replica_counts():
    parts = [
        {"rollout/x": 1.0, "perf/slowest_replica": 2.0, "perf/slowest_replica_rank": 3},
        {"rollout/x": 3.0},
        {"rollout/x": 2.0, "perf/slowest_replica": 1.5, "perf/slowest_replica_rank": 0},
    ]
    merged = {"rollout/x": 2.0, "perf/slowest_replica": 2.0, "perf/slowest_replica_rank": 3}
    assert merge_engine_metrics(parts) == merged
