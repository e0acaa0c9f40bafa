"""Computes the metrics of a step: merged sums, statistics of the batch, seconds of each phase.

Every mean is over the tokens or sequences of the global batch, so that no metric depends on how the
batch was split. This file does not know where metrics are written or which ranks there are: to
merge over ranks, the caller all-reduces a vector made here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mrlhf.batch import Experience, Rollout
from mrlhf.rl.masking import local_moments, selected


class Tally:
    """Sums and counts by name. Means are taken from them once all parts have been merged."""

    def __init__(self) -> None:
        # A sum stays a tensor until it is read, so that adding never waits for a device.
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Add `total`, a sum over `count` tokens or sequences.

        Tensors must be scalars; their gradient is dropped.
        """
        self._sums[name] = self._sums.get(name, 0.0) + _detached(total)
        self._counts[name] = self._counts.get(name, 0.0) + _detached(count)

    def merge(self, other: Tally) -> None:
        """Add everything that `other` holds."""
        for name, total in other._sums.items():
            self.add(name, total, other._counts[name])

    def finite(self) -> Tally:
        """The entries whose sum is a finite number."""
        kept = Tally()
        for name, total in self._sums.items():
            if math.isfinite(float(total)):
                kept.add(name, total, self._counts[name])
        return kept

    def means(self) -> dict[str, float]:
        """Sum divided by count for each name; NaN where nothing was counted."""
        return {
            name: _quotient(float(total), float(self._counts[name]))
            for name, total in self._sums.items()
        }

    def state_dict(self) -> dict[str, list[float]]:
        """Sum and count of each name."""
        return {
            name: [float(total), float(self._counts[name])] for name, total in self._sums.items()
        }

    @staticmethod
    def from_state(state: Mapping[str, Sequence[float]]) -> Tally:
        """The inverse of `state_dict`."""
        tally = Tally()
        for name, (total, count) in state.items():
            tally.add(name, total, count)
        return tally

    def to_vector(self, names: Sequence[str]) -> Tensor:
        """All numbers as float64 [2 * len(names)] on the host: the sums, then the counts.

        The caller gives the names, since an all-reduce needs the same order on every rank and ranks
        need not have met the same names. A name without numbers here gets 0.
        """
        left_out = self._sums.keys() - set(names)
        assert not left_out, f"the vector has no place for {sorted(left_out)}"

        numbers = [self._sums.get(name, 0.0) for name in names]
        numbers += [self._counts.get(name, 0.0) for name in names]
        return torch.tensor(_on_host(numbers), dtype=torch.float64, device="cpu")

    @staticmethod
    def from_vector(names: Sequence[str], vector: Tensor) -> Tally:
        """The inverse of `to_vector`, usually after a sum over ranks."""
        assert vector.shape == (2 * len(names),), (
            f"{len(names)} names against a vector of {tuple(vector.shape)}"
        )
        totals = vector[: len(names)].tolist()
        counts = vector[len(names) :].tolist()

        tally = Tally()
        for name, total, count in zip(names, totals, counts, strict=True):
            tally.add(name, total, count)
        return tally


@dataclass(frozen=True)
class PhaseProgress:
    """How far this process has come in a phase.

    Attributes:
        done: so many are done.
        of: out of so many.
        unit: of what, in the plural.
    """

    done: int
    of: int
    unit: str


class CurrentPhase:
    """The phase that this process is in, which any thread may read.

    Attributes:
        name: of the innermost phase.
        entered: how many phases have begun or ended so far.
        progress: how far the phase has come; None where that is not known.
    """

    def __init__(self) -> None:
        self.name = "start"
        self.entered = 0
        self.progress: PhaseProgress | None = None
        self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the process has been in the phase, or back in it."""
        return time.monotonic() - self._since

    def advance(self, done: int, of: int, unit: str) -> None:
        """Say that `done` of `of` units of the phase are done."""
        self.progress = PhaseProgress(done, of, unit)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Be in phase `name` in the body of a `with` statement.

        If the body raises, the phase remains, since that is where the process fails.
        """
        outer = self.name
        self._change(name)
        yield
        self._change(outer)

    def _change(self, name: str) -> None:
        self.name = name
        self.entered += 1
        self.progress = None
        self._since = time.monotonic()


class Span(NamedTuple):
    """One stay in a phase.

    Attributes:
        phase: its name.
        begin: seconds since 1970.
        seconds: how long it lasted.
        busy: CPU seconds that the threads of this process computed in it.
    """

    phase: str
    begin: float
    seconds: float
    busy: float


class PhaseTimer:
    """Measures the seconds of each phase of one step.

    Phases may nest. The seconds of a phase that is entered several times add up.

    Attributes:
        seconds: of each phase.
        spans: each stay in a phase, in the order in which they ended.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        current: CurrentPhase | None = None,
    ) -> None:
        """Measure nothing yet.

        Args:
            synchronize: called at both ends of a phase, if given: an accelerator is still working
                when the call that started the work returns.
            current: is told the phase.
        """
        self._synchronize = synchronize
        self._current = current or CurrentPhase()
        self.seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the body of a `with` statement, even if it raises."""
        start = self._now()
        begin = time.time()
        busy = time.process_time()
        try:
            with self._current(phase):
                yield
        finally:
            seconds = self._now() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            self.spans.append(Span(phase, begin, seconds, time.process_time() - busy))

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` of each phase."""
        return {f"timing_s/{phase}": seconds for phase, seconds in self.seconds.items()}

    def _now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()


def data_metrics(experience: Experience, max_prompt_length: int) -> dict[str, float]:
    """Describe the whole batch of a step: rewards, advantages, values and lengths.

    Advantages, returns and values are those of the tokens whose loss counts; lengths count all
    tokens that are there.

    Args:
        experience: the global batch.
        max_prompt_length: tokens; `prompt_length/clip_ratio` is the share of prompts that long.
    """
    mask = experience.loss_mask
    metrics = {
        **_mean_max_min("critic/score", experience.scores),
        **_mean_max_min("critic/rewards", experience.token_rewards.sum(dim=1)),
        **_mean_max_min("critic/advantages", selected(experience.advantages, mask)),
        **_mean_max_min("critic/returns", selected(experience.returns, mask)),
        **_length_metrics(experience.rollout, max_prompt_length),
    }

    values = experience.values
    if values is not None:
        metrics |= _mean_max_min("critic/values", selected(values, mask))
        metrics["critic/vf_explained_var"] = explained_variance(values, experience.returns, mask)
    return metrics


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """The share of the returns' variance that the critic explains.

    It is 1 - var(returns - values) / var(returns).

    Args:
        values: [batch, response_len], predictions.
        returns: [batch, response_len], targets.
        mask: bool [batch, response_len]; if it is empty, the result is NaN.
    """
    if not mask.any():
        return math.nan

    unexplained = local_moments(returns - values, mask).variance
    return 1 - unexplained / (local_moments(returns, mask).variance + 1e-5)


def throughput_metrics(
    seconds: Mapping[str, float],
    prompt_tokens: int,
    response_tokens: int,
    generated_tokens: int,
    world_size: int,
) -> dict[str, float]:
    """The speed of a step over all its tokens.

    Args:
        seconds: seconds of each phase; `step` is one of them.
        prompt_tokens: prompt tokens in the global batch.
        response_tokens: response tokens in the global batch.
        generated_tokens: tokens that the policy drew, also in responses that are not in the batch;
            the phase `gen` is measured by these alone.
        world_size: ranks; `perf/throughput` is tokens per second and rank.
    """
    tokens = prompt_tokens + response_tokens

    metrics = {}
    for phase, spent in seconds.items():
        counted = generated_tokens if phase == "gen" else tokens
        metrics[f"timing_per_token_ms/{phase}"] = _quotient(1000 * spent, counted)

    metrics["perf/total_num_tokens"] = tokens
    metrics["perf/time_per_step"] = seconds["step"]
    metrics["perf/throughput"] = _quotient(tokens, seconds["step"] * world_size)
    return metrics


def _length_metrics(rollout: Rollout, max_prompt_length: int) -> dict[str, float]:
    """Lengths in tokens; a response counts as clipped if the length limit ended it.

    A response without a token counts as aborted.
    """
    prompt_lengths = torch.tensor(rollout.prompt_lengths, dtype=torch.float64, device="cpu")
    lengths = rollout.response_mask.sum(dim=1)
    empty = lengths == 0
    clipped = ~rollout.stopped
    return {
        **_mean_max_min("response_length", lengths),
        "response_length/clip_ratio": float(clipped.double().mean()),
        **_mean_max_min("response_length_non_aborted", lengths[~empty]),
        "response_length_non_aborted/clip_ratio": float(clipped[~empty].double().mean()),
        "response/aborted_ratio": float(empty.double().mean()),
        **_mean_max_min("prompt_length", prompt_lengths),
        "prompt_length/clip_ratio": float((prompt_lengths >= max_prompt_length).double().mean()),
    }


def _mean_max_min(prefix: str, x: Tensor) -> dict[str, float]:
    """Mean, maximum and minimum of a flat tensor; NaN where it is empty."""
    if x.numel() == 0:
        return {f"{prefix}/{name}": math.nan for name in ("mean", "max", "min")}

    lowest, highest = x.aminmax()
    return {
        f"{prefix}/mean": float(x.double().mean()),
        f"{prefix}/max": float(highest),
        f"{prefix}/min": float(lowest),
    }


def _detached(number: Tensor | float) -> Tensor | float:
    return number.detach().double() if isinstance(number, Tensor) else float(number)


def _on_host(numbers: Sequence[Tensor | float]) -> list[float]:
    """All numbers, with one transfer for all tensors."""
    tensors = [number for number in numbers if isinstance(number, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    return [next(moved) if isinstance(number, Tensor) else number for number in numbers]


def _quotient(total: float, count: float) -> float:
    return total / count if count else math.nan
