"""Generates a rollout with all replicas of the inference engine.

Every rank sees the whole rollout, but each machine has it in memory only once. So a few numbers a
token cross the network, once between any two machines. This file does not know how responses
are scored, nor losses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mrlhf.batch import NO_VERSION, Episode, Prompts, Rollout
from mrlhf.errors import EngineError, Interrupted
from mrlhf.inference.base import EngineStats, InferenceEngine, Request, SamplingParams
from mrlhf.models.spec import Experts
from mrlhf.parallel.collectives import wait_for_all
from mrlhf.parallel.groups import EngineGroups
from mrlhf.parallel.machine import Machine
from mrlhf.parallel.phases import Phases
from mrlhf.parallel.replica_speed import compare_replicas
from mrlhf.records import ExpertRecord, SamplingMasks
from mrlhf.reshard.execute import ReshardStats
from mrlhf.rollout.assignment import ResponseLengths, Share, assign
from mrlhf.rollout.drawing import Drawn, Pace, RequestId, Sampler, Task, mix_seed
from mrlhf.rollout.drawn_sample import DrawnSample
from mrlhf.rollout.episodes import check_episodes, episode_metrics
from mrlhf.rollout.exchange import DrawnSamples, exchange_samples
from mrlhf.rollout.given import GivenResponses
from mrlhf.rollout.hand_over import HandOver
from mrlhf.rollout.scoring import Scores

SLOWEST = "perf/slowest_replica"  # metric; the names of others begin with it
_NO_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
)


@dataclass(frozen=True)
class DrawnBatch:
    """Responses, and what it took to generate them; the same on every rank."""

    rollout: Rollout
    # tokens that the policy drew for the batch, in kept and dropped responses
    generated_tokens: int
    engine_metrics: list[dict[str, float]]  # the engine's metrics of each generation, one or more
    scores: Scores | None = None  # None if they have not been scored yet
    # the metrics of dynamic sampling; empty without it
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Generator:
    """The inference engine as the trainer sees it: one thing that spans all ranks."""

    engine: InferenceEngine  # the replica that this rank is part of
    groups: EngineGroups
    hand_over: HandOver  # brings the policy's weights into the engine
    seed: int
    # the lengths of the responses so far, by stream. They help to give each replica the same amount
    # of work.
    lengths: defaultdict[str, ResponseLengths] = field(
        default_factory=lambda: defaultdict(ResponseLengths)
    )
    # is told how many of this replica's samples are done; all ranks may stop before a step of the
    # engine
    phases: Phases = field(default_factory=Phases)
    # the samples of the current training step, by the name of their batch
    drawn: dict[str, DrawnSamples] = field(default_factory=dict)
    # the policy's mixtures, if the engine can record the experts that they choose
    experts: Experts | None = None
    sampler: Sampler = field(default_factory=Sampler)
    given: GivenResponses | None = None  # those of training batches that are not drawn
    name: str = "engine"  # its owner in the ledger of the device's memory
    # is called with each sample that has ended, its prompts and the number of samples of each; the
    # ranks of a replica take turns, so that each sample is given to one of them
    ended: Callable[[DrawnSample, Prompts, int], None] | None = None

    @property
    def version(self) -> int:
        """The version of the engine's weights."""
        return self.engine.version

    @property
    def machine(self) -> Machine:
        """The ranks of this machine, which share the responses."""
        return self.groups.machine

    def take_weights(self, version: int) -> ReshardStats:
        """Bring the policy's weights into the engine as `version`, and wake it; the cost."""
        with _named_memory_error("waking the engine and handing over the weights"):
            self.engine.wake()
            stats = self.hand_over.run(meanwhile=self.engine.take_cache)
            self.engine.commit(version)
        self._count_memory()
        return stats.reduced()

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        stream: str,
        step: int | None = None,
        refill: int = 0,
    ) -> DrawnBatch:
        """Sample responses to `prompts`, the same on every rank.

        Args:
            sampling: its seed is replaced.
            stream: the use ("train", "validation"), which decides on the random numbers together
                with step, refill, and the seed of the run.
            step: the training step, if the stream has a batch in each.
            refill: the number of the batch within the step.

        Raises:
            EngineError: the engine refuses the prompts, gave no number, or has too little memory.
        """
        name = stream if step is None else f"{stream} {step}"
        if refill:
            name += f" refill {refill}"
        sampling = replace(sampling, seed=self.seed_of(name))
        shares = self.assign(prompts, sampling, stream)
        given: Mapping[int, DrawnSample] = {}
        if self.given is not None and stream == "train":
            given = self.given.of(prompts.uid, sampling.n, mix_seed(sampling.seed, "given"))

        begun = self.drawn.get(name)
        task = self.task(prompts, [sampling.seed] * len(prompts), sampling, shares, begun, given)
        drawn, metrics = self.serve(task, begun, name if step is not None else None)
        rollout, of_episodes = self.gather(prompts, sampling, drawn, stream)
        tokens = int(rollout.loss_mask.sum())
        return DrawnBatch(rollout, tokens, [metrics | of_episodes])

    def seed_of(self, name: str) -> int:
        """The seed of the samples of one use, such as "train 3"."""
        return mix_seed(self.seed, name)

    def task(
        self,
        prompts: Prompts,
        seeds: Sequence[int],
        sampling: SamplingParams,
        shares: Sequence[Share],
        begun: DrawnSamples | None,
        given: Mapping[int, DrawnSample] = MappingProxyType({}),
    ) -> Task:
        """The samples of this replica's `shares` that have not ended.

        Args:
            seeds: of each prompt's samples.
            begun: the samples that have begun, some of which may have ended.
            given: the samples that are not drawn, by row.
        """
        n = sampling.n
        known: set[int] = set()
        rows = {share.prompt * n + sample for share in shares for sample in share.samples}
        open_rows: dict[int, DrawnSample] = {}
        if begun is not None:
            known.update(begun.headers.rows.tolist())
            open_rows = begun.open_at(rows)
        own_given = [given[row] for row in sorted((rows & given.keys()) - known)]
        known |= given.keys()

        requests = []
        for share in shares:
            prompt = share.prompt
            first_row = prompt * n
            parts = _gaps(share.samples, {i for i in share.samples if first_row + i in known})
            parts += [range(i, i + 1) for i in share.samples if first_row + i in open_rows]
            of_prompt = replace(sampling, seed=seeds[prompt])
            for samples in sorted(parts, key=attrgetter("start")):
                request = Request(
                    id=RequestId(prompt, samples.start),
                    prompt=prompts.token_ids[prompt],
                    uid=prompts.uid[prompt],
                    samples=samples,
                    sampling=of_prompt,
                )
                requests.append(request)

        turns = cycle(range(self.groups.tp.size()))
        ended = partial(self._pass_on, prompts, n, turns)
        return Task(prompts, sampling, requests, open_rows, own_given, ended)

    def serve(
        self,
        task: Task,
        begun: DrawnSamples | None,
        name: str | None = None,
        pace: Pace | None = None,
    ) -> tuple[DrawnSamples, dict[str, float]]:
        """Draw a task's samples with all replicas, to their end or as far as the pace lets them.

        If a `name` is given, they are kept, so that an interrupted step need not draw those that
        have ended again. Returns the samples on every rank, with those that have `begun`, and the
        engine's metrics.
        """
        mine, seconds, interrupted = self._draw(task, pace)
        drawn = exchange_samples(
            self.groups,
            len(task.prompts) * task.sampling.n,
            mine.samples,
            mine.stats,
            begun,
            self.experts if task.sampling.record_experts else None,
            has_episodes=self.sampler.has_episodes,
        )

        if name is not None:
            self.drawn[name] = drawn
        if interrupted is not None:
            raise interrupted
        speeds = self._compare_speeds(seconds, mine.stats.steps)
        return drawn, engine_metrics(drawn.stats) | speeds

    def sleep(self) -> None:
        """Free the engine's memory while the models train."""
        # `take_weights` brings all weights again, so those of the engine's own need not stay.
        self.engine.sleep(free_weights=True)
        self.hand_over.give_back()
        self._count_memory()

    def state_dict(self) -> dict[str, Any]:
        """The state on which the assignment of the next batches depends."""
        return {stream: lengths.state_dict() for stream, lengths in self.lengths.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.lengths.clear()
        for stream, lengths in state.items():
            self.lengths[stream].load_state_dict(lengths)

    def end_step(self) -> None:
        """Forget the samples of this step."""
        self.drawn.clear()

    def _count_memory(self) -> None:
        """Tell the ledger of the device's memory what the engine holds."""
        held = self.engine.held_bytes
        memory = self.phases.memory
        memory.hold(f"{self.name}/params", held.weights + self.hand_over.nbytes)
        memory.hold(f"{self.name}/cache", held.cache)

    def assign(self, prompts: Prompts, sampling: SamplingParams, stream: str) -> list[Share]:
        """The samples that this replica draws."""
        lengths = self.lengths[stream]
        expected = [lengths.expected(uid, sampling.max_tokens) for uid in prompts.uid]
        prompt_lengths = [len(tokens) for tokens in prompts.token_ids]
        shares = assign(prompt_lengths, expected, sampling.n, self.groups.layout.num_replicas)
        return shares[self.groups.replica]

    def _draw(self, task: Task, pace: Pace | None) -> tuple[Drawn, float, Interrupted | None]:
        """Draw the task of this rank's replica, and wait for the other replicas.

        Returns what was drawn, the seconds that it took, and the interruption if the run stops.
        """
        samples = task.samples
        drawn = Drawn([], EngineStats())
        seconds = 0.0
        began = time.perf_counter()
        try:
            with self.phases.interruptible() as may_begin, _named_memory_error("generating"):

                def may_step(unit: int, open_samples: int) -> bool:
                    self.phases.advance(samples - open_samples, samples, "responses")
                    return may_begin(unit)

                drawn = self.sampler.drawing(self.engine, task, pace).draw(may_step)
                self._count_memory()
                seconds = time.perf_counter() - began
                # If the run stops, those that still draw or wait for a tool need not end that.
                wait_for_all(self.groups.replicas)
        except Interrupted as stop:
            # Others begin again, as an interruption does not come at the same token everywhere.
            whole = [sample for sample in drawn.samples if sample.ended and not sample.has_failed]
            return replace(drawn, samples=whole), seconds, stop
        return drawn, seconds, None

    def _pass_on(self, prompts: Prompts, n: int, turns: Iterator[int], sample: DrawnSample) -> None:
        """Call `ended` with a sample if it is this rank's turn."""
        if next(turns) == self.groups.tp_rank and self.ended is not None:
            self.ended(sample, prompts, n)

    def _compare_speeds(self, seconds: float, passes: int) -> dict[str, float]:
        """`perf/slowest_replica` and `perf/slowest_replica_rank`; nothing if there is one replica.

        They are its seconds for a pass over the median of the others, and its first rank.
        """
        first_rank = self.groups.layout.rank_at(self.groups.replica, 0)
        spent = seconds / passes if passes else 0.0
        slowest = compare_replicas(spent, first_rank, self.groups.replicas)
        if slowest is None:
            return {}
        return {SLOWEST: slowest.ratio, f"{SLOWEST}_rank": slowest.rank}

    def gather(
        self,
        prompts: Prompts,
        sampling: SamplingParams,
        drawn: DrawnSamples,
        stream: str,
        others: Sequence[Episode] = (),
    ) -> tuple[Rollout, dict[str, float]]:
        """The samples as one rollout, in the order of the prompts, and metrics of the episodes.

        `others` are episodes that have ended and are not in the rollout; they count in the metrics.

        Raises:
            EngineError: a log-probability is not finite.
            EnvironmentFault: every episode failed.
        """
        headers = drawn.headers
        n = sampling.n
        batch = len(prompts) * n
        rows = torch.sort(headers.rows).values
        assert torch.equal(rows, torch.arange(batch)), (
            "the replicas drew other samples than they had to"
        )
        order = headers.rows.argsort()
        tokens = headers.lengths[order]

        has_episodes = self.sampler.has_episodes
        all_drawn = not has_episodes and self.given is None

        def spread() -> tuple[Tensor, Tensor, Tensor | None]:
            _check_finite(drawn.logprobs, prompts, n)
            is_there = torch.arange(drawn.token_ids.shape[1]) < tokens[:, None]
            versions = torch.full(is_there.shape, NO_VERSION, dtype=torch.int32)
            versions[is_there] = drawn.runs.of_tokens().int()
            return is_there, versions, None if all_drawn else versions != NO_VERSION

        mask, versions, loss_mask = self.machine.compute_on_leader(spread)
        repeated = prompts.repeat(n)
        self.lengths[stream].update(repeated.uid, tokens.tolist())
        episodes = None
        metrics = {}
        if has_episodes:
            episodes = [drawn.episodes[row] for row in range(batch)]
            check_episodes([*episodes, *others])
            metrics = episode_metrics([*episodes, *others])
            repeated = repeated.begun_as(episodes)
        rollout = Rollout(
            prompts=repeated,
            sample_index=[row % n for row in range(batch)],
            response_ids=drawn.token_ids,
            response_mask=mask,
            loss_mask=mask if loss_mask is None else loss_mask,
            rollout_logprobs=drawn.logprobs,
            versions=versions,
            stopped=headers.stopped[order].bool(),
            experts=_record(drawn.experts, headers.recorded[order]),
            masks=_masks(drawn, headers.mask_words[order], sampling.record_head),
            episodes=episodes,
        )
        return rollout, metrics


def _record(experts: Tensor, recorded: Tensor) -> ExpertRecord | None:
    """The record of rows with `recorded` tokens each, one row after the other; None if empty."""
    if not len(experts):
        return None
    return ExpertRecord(experts, recorded.cumsum(0) - recorded, recorded)


def _masks(drawn: DrawnSamples, words: Tensor, head: int) -> SamplingMasks | None:
    """The sampling masks of rows with so many `words` each; None if there are none."""
    if not len(drawn.masks):
        return None
    return SamplingMasks(drawn.masks, words.cumsum(0) - words, drawn.mask_counts, head)


def _check_finite(logprobs: Tensor, prompts: Prompts, n: int) -> None:
    """Raise an EngineError if a log-probability [prompts * n, response_len] is not finite."""
    finite = logprobs.isfinite().all(dim=1)
    if not finite.all():
        row = int(finite.logical_not().nonzero()[0])
        raise EngineError(
            f"the engine gave a token of prompt uid {prompts.uid[row // n]} the "
            "log-probability inf or nan; the policy's weights are probably not finite: before "
            "the first update look at the model's files, and later at actor/grad_norm of the "
            "steps before, lower actor.optim.lr or set actor.optim.skip_grad_norm"
        )


def _gaps(numbers: range, taken: AbstractSet[int]) -> list[range]:
    """The parts of `numbers` that are left if `taken`, a subset, is removed."""
    bounds = [numbers.start - 1, *sorted(taken), numbers.stop]
    return [range(low + 1, high) for low, high in pairwise(bounds) if low + 1 < high]


def engine_metrics(stats: Sequence[EngineStats]) -> dict[str, float]:
    """The engine's metrics over all replicas; `stats` has one entry a replica, busy or idle.

    Returns:
        `rollout/kv_cache_bytes` and `rollout/peak_kv_cache_bytes` of the rank that has most;
        `rollout/preemptions`; `rollout/prefix_hit_rate`, the share of prompt tokens that were not
        computed; `rollout/tokens_per_engine_step`, response tokens in one pass through the model;
        `rollout/imbalance`, the passes of the replica that has most over their mean.
    """
    steps = sum(replica.steps for replica in stats)
    prompt_tokens = sum(replica.prompt_tokens for replica in stats)
    computed = sum(replica.computed_prompt_tokens for replica in stats)
    generated = sum(replica.generated_tokens for replica in stats)
    return {
        "rollout/kv_cache_bytes": max(replica.cache_bytes for replica in stats),
        "rollout/peak_kv_cache_bytes": max(replica.peak_cache_bytes for replica in stats),
        "rollout/preemptions": sum(replica.preemptions for replica in stats),
        "rollout/prefix_hit_rate": 1 - computed / max(1, prompt_tokens),
        "rollout/tokens_per_engine_step": generated / max(1, steps),
        "rollout/imbalance": max(replica.steps for replica in stats) * len(stats) / max(1, steps),
    }


@contextmanager
def _named_memory_error(phase: str) -> Iterator[None]:
    """If memory runs out in the phase, say which keys make the engine smaller."""
    try:
        yield
    except EngineError:
        raise
    except (MemoryError, RuntimeError) as error:
        numbers = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not any(
            words in numbers.lower() for words in _NO_MEMORY
        ):
            raise
        raise EngineError(
            f"not enough memory while {phase}: {numbers}; lower rollout.kv_cache_mb (on a GPU "
            "rollout.gpu_memory_utilization), rollout.max_num_seqs or rollout.max_prefill_tokens"
        ) from error
