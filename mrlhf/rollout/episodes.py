"""Metrics of a batch's episodes, and the reasons why some could not go on.

It does not know how they were led.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from mrlhf.batch import Episode
from mrlhf.errors import EnvironmentFault

logger = logging.getLogger(__name__)

_SHOWN_REASONS = 3


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of at least one episode.

    Returns:
        `episodes/turns/mean` and `max`; `episodes/contexts/mean`, the contexts of one episode;
        `episodes/tool_calls/mean`, its calls;
        `episodes/errors`, the share of the calls that failed or could not be read;
        `episodes/failed`, the share of episodes that could not go on; `perf/tool_wait_s/mean` and
        `max`, the seconds for which one waited for tools and environment.
    """
    turns = [len(episode.turns) for episode in episodes]
    calls = [sum(episode.tools.values()) for episode in episodes]
    errors = sum(episode.errors for episode in episodes)
    waited = [episode.waited_s for episode in episodes]
    return {
        "episodes/turns/mean": fmean(turns),
        "episodes/turns/max": float(max(turns)),
        "episodes/contexts/mean": fmean(1 + len(episode.context_begins) for episode in episodes),
        "episodes/tool_calls/mean": fmean(calls),
        "episodes/errors": errors / max(1, sum(calls)),
        "episodes/failed": fmean(bool(episode.failure) for episode in episodes),
        "perf/tool_wait_s/mean": fmean(waited),
        "perf/tool_wait_s/max": max(waited),
    }


def check_episodes(episodes: Sequence[Episode]) -> None:
    """Warn of episodes of a step that could not go on; EnvironmentFault if none could."""
    failures = [episode.failure for episode in episodes if episode.failure]
    if not failures:
        return
    if len(failures) == len(episodes):
        raise EnvironmentFault(f"every episode of the step failed, the first one so: {failures[0]}")
    reasons = Counter(failures).most_common()
    for reason, count in reasons[:_SHOWN_REASONS]:
        logger.warning(
            "%d of %d episodes failed and do not train: %s", count, len(episodes), reason
        )
    others = sum(count for _, count in reasons[_SHOWN_REASONS:])
    if others:
        logger.warning("%d others failed in other ways (see rollout.dump_freq)", others)
