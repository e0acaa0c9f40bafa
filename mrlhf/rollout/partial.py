"""Partial rollouts: more prompt groups are begun than a step needs, and the rest goes on later.

A step ends once enough groups are whole. What is left of the others keeps its tokens,
log-probabilities and versions, and goes on with the weights of the next step. How far each sample
is drawn in a step, and so which groups the step takes, is decided by numbers of tokens alone. So
they are the same on every layout, and after a resume. This file does not know models or losses.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mrlhf.batch import Episode, Prompts, Rollout
from mrlhf.config.rollout import PartialSection
from mrlhf.inference.base import SamplingParams
from mrlhf.parallel.collectives import wait_for_all
from mrlhf.parallel.groups import Group
from mrlhf.rollout.assignment import Share
from mrlhf.rollout.drawn_sample import DrawnSample
from mrlhf.rollout.dynamic_sampling import choose_prompt_groups, rows_of_prompt_groups
from mrlhf.rollout.exchange import DrawnSamples
from mrlhf.rollout.generator import DrawnBatch, Generator

logger = logging.getLogger(__name__)

_ROUNDS = 16  # in which the longest response is drawn
_STREAM = "train"


class State(IntEnum):
    """How far a sample is drawn; a prompt group has the lowest state of its samples."""

    OPEN = 0
    ENDED = 1
    FAILED = 2  # an episode that could not go on, so nothing of it trains


class BegunGroup(NamedTuple):
    """A prompt group of which samples are drawn."""

    since: int  # the version of the weights with which it began
    stream: str  # the name of its random numbers


@dataclass(frozen=True)
class PromptGroupQueue:
    """Prompt groups that no step has taken, the oldest first; those that wait come last."""

    prompts: Prompts
    begun: list[BegunGroup]  # the first of them
    samples: DrawnSamples  # `n` rows for each that has begun

    def select(self, numbers: Sequence[int], samples: DrawnSamples) -> PromptGroupQueue:
        """Some of the groups; `samples` are theirs."""
        begun = [self.begun[number] for number in numbers if number < len(self.begun)]
        return PromptGroupQueue(self.prompts.select(numbers), begun, samples)


class Rounds:
    """Lets all samples draw equally many tokens, until enough groups have ended: a `Pace`."""

    def __init__(
        self,
        replicas: Group,
        earlier: DrawnSamples,
        begun: DrawnSamples,
        rows: int,
        n: int,
        limits: Iterator[int],
        turn_cost: int,
        choose: Callable[[Sequence[int]], list[int] | None],
    ) -> None:
        """Begin with the first of the `limits`, each of which is larger than the one before.

        `earlier` are the samples that there were when the step began, of `rows` in all, and `begun`
        those that are there: more of them after an interruption. `choose` says which groups the
        step takes, given the state of each, or None if it has to go on.
        """
        self._replicas = replicas
        self._n = n
        self._rows = rows
        self._limits = limits
        self._choose = choose

        # The rows that have ended, each with what this step has drawn of it.
        before = torch.zeros(rows, dtype=torch.int64)
        before[earlier.headers.rows] = earlier.headers.lengths
        has_ended = begun.headers.ended.bool()
        ended = begun.headers.rows[has_ended]
        spent = begun.headers.lengths[has_ended] - before[ended]
        states = torch.full_like(ended, State.ENDED)
        if begun.episodes:
            for place, row in enumerate(ended.tolist()):
                episode = begun.episodes[row]
                spent[place] = _spent(episode, int(before[row]), turn_cost)
                states[place] += bool(episode.failure)
        self._before = ended, spent, states

        self.turn_cost = turn_cost
        self._now = torch.full((rows,), State.OPEN, dtype=torch.int64)
        self.limit = next(limits)
        self.taken: list[int] | None = None  # the groups that the step takes, once it has ended

    @property
    def states(self) -> list[int]:
        """The state of each group."""
        rows, tokens, states = self._before
        is_near = tokens <= self.limit
        now = self._now.index_put((rows[is_near],), states[is_near])
        return now.view(-1, self._n).amin(dim=1).tolist()

    def goes_on(self, ended: Sequence[DrawnSample], interrupted: bool) -> bool:
        """See `Pace`."""
        states = torch.zeros(self._rows + 1, dtype=torch.int64)
        for sample in ended:
            states[sample.row] = State.FAILED if sample.has_failed else State.ENDED
        states[-1] = interrupted
        wait_for_all(self._replicas)
        dist.all_reduce(states, group=self._replicas)
        self._now += states[:-1]
        if states[-1]:
            return False
        self.taken = self._choose(self.states)
        if self.taken is not None:
            return False
        self.limit = next(self._limits)
        return True


@dataclass
class PartialSampler:
    """Draws training batches of the groups that are whole first; every rank calls it together."""

    generator: Generator  # holds the current weights when `draw` is called
    prompts: Iterator[Prompts]  # an endless supply of batches of prompts
    train_batch_size: int  # prompts of a training batch
    section: PartialSection  # how many groups are begun, and how old they may get
    max_turns: int = 1  # of an episode
    _groups: PromptGroupQueue | None = field(default=None, init=False)
    _last_limit: int = field(default=0, init=False)  # of the last step
    _head: int | None = field(default=None, init=False)  # recorded of the begun samples' tokens

    def draw(self, step: int, sampling: SamplingParams) -> DrawnBatch:
        """Go on with the groups that have begun, begin others, and take those that are whole."""
        generator = self.generator
        version = generator.version
        groups, again = self._begin(version, sampling)
        name = f"train {step}"
        begun = generator.drawn.get(name, groups.samples)  # more of them after an interruption
        rounds = self._rounds(groups, begun, sampling)
        count = len(groups.begun)
        with generator.phases.enter("gen"):
            task = generator.task(
                groups.prompts.select(range(count)),
                [generator.seed_of(group.stream) for group in groups.begun],
                sampling,
                self._shares(groups, sampling),
                begun,
            )
            drawn, metrics = generator.serve(task, begun, name, rounds)

            taken = rounds.taken
            assert taken is not None
            failed = [n for n, state in enumerate(rounds.states) if state == State.FAILED]
            dropped = sorted(set(failed).difference(taken))
            gone = {*taken, *dropped}
            left = [number for number in range(len(groups.prompts)) if number not in gone]
            open_groups = [number for number in left if number < count]

            of_taken = rows_of_prompt_groups(taken, sampling.n)
            of_left = rows_of_prompt_groups(open_groups, sampling.n)
            chosen, rest = generator.machine.compute_on_leader(
                lambda: (drawn.select(of_taken), drawn.select(of_left))
            )
            rollout, of_episodes = generator.gather(
                groups.prompts.select(taken),
                sampling,
                chosen,
                _STREAM,
                [drawn.episodes[row] for row in rows_of_prompt_groups(dropped, sampling.n)],
            )
            staleness = generator.machine.compute_on_leader(
                lambda: staleness_metrics(rollout, version)
            )

        self._groups = groups.select(left, rest)
        self._last_limit = rounds.limit
        self._head = sampling.record_head
        return DrawnBatch(
            rollout,
            sum(stats.generated_tokens for stats in drawn.stats),
            [metrics | of_episodes],
            metrics={
                **staleness,
                "partial/limit": float(rounds.limit),
                "partial/open_groups": float(len(open_groups)),
                "partial/restarted_groups": float(again),
            },
        )

    def state_dict(self) -> dict[str, Any]:
        """The groups that no step has taken; their samples become a tree once it is written."""
        groups = self._groups
        if groups is None:
            return {}
        return {
            "uids": groups.prompts.uid,
            "since": [group.since for group in groups.begun],
            "streams": [group.stream for group in groups.begun],
            "samples": groups.samples.state_dict,
            "last_limit": self._last_limit,
            "head": self._head,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompts_of: Callable[[Sequence[int]], Prompts]
    ) -> None:
        """Go on from a state that `state_dict` gave; `prompts_of` gives prompts by their uids."""
        if not state:
            return
        samples = self.generator.machine.compute_on_leader(
            lambda: DrawnSamples.from_state(state["samples"])
        )
        columns = zip(state["since"], state["streams"], strict=True)
        begun = [BegunGroup(*each) for each in columns if each[1]]  # mrlhf 0.8: "" if it waits
        self._groups = PromptGroupQueue(prompts_of(state["uids"]), begun, samples)
        self._last_limit = state["last_limit"]
        # mrlhf 0.8 recorded no heads.
        self._head = state.get("head", 0)

    def _begin(self, version: int, sampling: SamplingParams) -> tuple[PromptGroupQueue, int]:
        """The groups of this step, new ones among them, and how many of them begin again."""
        groups = self._groups
        if groups is None:
            prompts = next(self.prompts)
            samples = DrawnSamples.none(self.generator.groups.layout.num_replicas)
            groups = PromptGroupQueue(prompts, [], samples)

        oldest = version + 1 - self.section.max_versions
        kept = [number for number, group in enumerate(groups.begun) if group.since >= oldest]
        if not self._fits(groups, sampling):
            kept = []
        again = len(groups.begun) - len(kept)
        if again:
            logger.warning("%d groups that had begun begin again (rollout.partial)", again)
            rows = rows_of_prompt_groups(kept, sampling.n)
            begun_samples = groups.samples
            samples = self.generator.machine.compute_on_leader(lambda: begun_samples.select(rows))
            stays = set(kept)
            others = [number for number in range(len(groups.prompts)) if number not in stays]
            groups = groups.select([*kept, *others], samples)

        prompts = groups.prompts
        most = max(len(kept), self.section.begun_of(self.train_batch_size))
        while len(prompts) < most:
            prompts = Prompts.join([prompts, next(self.prompts)])
        begun = groups.begun[: len(kept)]
        named = {(uid, group.stream) for uid, group in zip(prompts.uid, begun, strict=False)}
        for uid in prompts.uid[len(kept) : most]:
            stream = f"train {version + 1}"
            while (uid, stream) in named:
                stream += " again"  # a prompt that comes twice gets other samples
            named.add((uid, stream))
            begun.append(BegunGroup(version, stream))
        return PromptGroupQueue(prompts, begun, groups.samples), again

    def _fits(self, groups: PromptGroupQueue, sampling: SamplingParams) -> bool:
        """Whether the samples that have begun can go on as the run is configured now."""
        samples = groups.samples
        headers = samples.headers
        if len(headers.rows) != len(groups.begun) * sampling.n:
            return False
        if self._head not in (None, sampling.record_head):
            return False
        fits = self.generator.sampler.fits
        columns = headers.rows.tolist(), headers.lengths.tolist(), headers.ended.tolist()
        return all(
            fits(samples.episodes.get(row), length, bool(has_ended), sampling.max_tokens)
            for row, length, has_ended in zip(*columns, strict=True)
        )

    def _rounds(
        self, groups: PromptGroupQueue, begun: DrawnSamples, sampling: SamplingParams
    ) -> Rounds:
        """The rounds of this step, of which the samples `begun` are there already."""
        version = self.generator.version
        since = [group.since for group in groups.begun]
        turn_cost = self.section.turn_cost
        most = sampling.max_tokens + turn_cost * (self.max_turns - 1)

        return Rounds(
            self.generator.groups.replicas,
            groups.samples,
            begun,
            len(since) * sampling.n,
            sampling.n,
            round_limits(most, self._last_limit),
            turn_cost,
            lambda states: choose_groups(
                states, since, version, self.train_batch_size, self.section.max_versions
            ),
        )

    def _shares(self, groups: PromptGroupQueue, sampling: SamplingParams) -> list[Share]:
        """The samples that this replica has begun, and its part of the new ones."""
        generator = self.generator
        n = sampling.n
        replicas = generator.groups.layout.num_replicas
        mine = []
        headers = groups.samples.headers
        for row, replica in zip(headers.rows.tolist(), headers.replicas.tolist(), strict=True):
            if replica % replicas == generator.groups.replica:
                mine.append(Share(row // n, range(row % n, row % n + 1)))

        known = set((headers.rows // n).tolist())
        new = [number for number in range(len(groups.begun)) if number not in known]
        of_new = generator.assign(groups.prompts.select(new), sampling, _STREAM)
        return mine + [replace(share, prompt=new[share.prompt]) for share in of_new]


def _spent(episode: Episode, before: int, turn_cost: int) -> int:
    """The tokens that were drawn behind the first `before` of an episode that has ended.

    Who drew the tokens of one that failed is not known any more, but its turns are.
    """
    turns = zip(episode.turn_begins, episode.turns, strict=False)
    lengths = [end - max(begin, before) for begin, end in turns if end > before]
    # The last turn has ended the episode.
    return sum(lengths) + turn_cost * max(0, len(lengths) - 1)


def round_limits(max_tokens: int, last: int) -> Iterator[int]:
    """The most tokens of a sample that a step draws, round after round, with those of its turns.

    `last` is where the step before has ended, which shows how far most groups have to be drawn.
    """
    length = math.ceil(max_tokens / _ROUNDS)
    first = max(length, last - length)
    return itertools.count(first, length)


def choose_groups(
    states: Sequence[int], since: Sequence[int], version: int, batch: int, max_versions: int
) -> list[int] | None:
    """The groups that a step takes: the `batch` oldest of those that have ended.

    `states` and `since` have the state of each group that has begun, the oldest first, and the
    version with which it began; `version` is the present one. The result is None if these are too
    few, or if the rest could not be taken in time: a later step takes `batch` groups, and no group
    may be drawn by more than `max_versions` versions. Groups that failed are taken last.
    """
    has_ended = [state == State.ENDED for state in states]
    taken = choose_prompt_groups(has_ended, batch)
    if State.OPEN not in states:
        return taken
    if sum(has_ended) < batch:
        return None
    gone = {number for number, state in enumerate(states) if state == State.FAILED}.union(taken)
    left = [since[number] for number in range(len(states)) if number not in gone]
    for later in range(max_versions):
        # The groups that have to be taken up to `later` steps after this one.
        urgent = sum(began + max_versions - 1 <= version + later for began in left)
        if urgent > later * batch:
            return None
    return taken


def warn_of_dropped(state: Mapping[str, Any]) -> None:
    """Warn of groups that had begun, if partial rollouts are off now; see `state_dict`."""
    begun = sum(map(bool, state.get("streams", ())))
    if begun:
        logger.warning(
            "rollout.partial.over is 1 now, so %d prompts that had begun are dropped", begun
        )


def staleness_metrics(rollout: Rollout, version: int) -> dict[str, float]:
    """The ages of the tokens that train: by how many versions `version` is newer than the policy.

    `staleness/share/<age>` are shares of tokens; `staleness/mixed` is the share of the responses
    that several versions drew.
    """
    mask = rollout.loss_mask
    ages = version - rollout.versions[mask]
    shares = torch.bincount(ages).double() / max(1, len(ages))
    newest = rollout.versions.amax(dim=1)
    oldest = rollout.versions.masked_fill(~mask, version).amin(dim=1)
    return {
        "staleness/mean": float(ages.double().mean()),
        "staleness/max": float(ages.max()),
        "staleness/mixed": float((newest > oldest).double().mean()),
        **{f"staleness/share/{age}": float(share) for age, share in enumerate(shares)},
    }
