"""Draws the samples of one replica, in a single turn each.

`conversations` does the same for several turns. Neither knows the other replicas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mrlhf.batch import Prompts
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, SamplingParams, generate
from mrlhf.rollout.trajectory import Trajectory

MayStep = Callable[[int, int], bool]
"""Is asked before each step of the engine, with its number and that of the samples still open."""

_SEED_BITS = 63


@dataclass(frozen=True)
class Drawn:
    """The samples that a replica has finished, and its engine's work meanwhile."""

    trajectories: list[Trajectory]
    stats: EngineStats


def draw_turn(
    engine: InferenceEngine,
    prompts: Prompts,
    sampling: SamplingParams,
    requests: Sequence[Request],
    may_step: MayStep,
) -> Drawn:
    """Answer the requests; the id of each is the row of its first sample.

    If `may_step` says no, the samples that have not ended are dropped. All ranks of a replica must
    get the same answers.
    """
    finished = generate(engine, requests, lambda unit: may_step(unit, engine.in_flight))

    trajectories = []
    for sample in finished.samples:
        prompt = sample.request_id // sampling.n
        computed = len(prompts.token_ids[prompt]) + len(sample.arrays[0]) - 1
        recorded = computed if sampling.record_experts else 0
        row = prompt * sampling.n + sample.sample_index
        trajectories.append(Trajectory.of(sample, row, recorded))
    return Drawn(trajectories, finished.stats)


def mix_seed(seed: int, stream: str) -> int:
    """A seed that depends on a seed and the name of a stream of random numbers."""
    digest = hashlib.blake2b(f"{seed}:{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
