"""Samples as vLLM requests: submitted, run step by step, cut at stop strings, counted.

Each sample is a vLLM request of its own; the samples of a prompt share its computed prefix in
vLLM's cache. This file does not know weights or process groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.errors import EngineError
from mrlhf.inference.base import (
    EngineStats,
    Finished,
    MaskWords,
    Request,
    Sample,
    SamplingParams,
    response_so_far,
)
from mrlhf.inference.in_flight import InFlight
from mrlhf.inference.stopping import Decode, StopSearch
from mrlhf.inference.vllm.draws import Draws, draw_arguments


@dataclass
class _Running:
    """A sample that vLLM computes."""

    request: Request
    index: int  # which of the request's samples it is
    version: int  # of the weights that draw it
    search: StopSearch | None = None  # looks for stop strings, if there are any
    searched: int = 0  # number of its tokens that were searched

    def end(self, token_ids: Sequence[int]) -> int | None:
        """Return after how many tokens a stop string ends it; None if there is none so far."""
        if self.search is None:
            return None
        for token in token_ids[self.searched :]:
            self.searched += 1
            if self.search.append(token):
                return self.searched
        return None


class Requests:
    """The samples on one vLLM engine."""

    def __init__(
        self,
        llm_engine: Any,
        draws: Draws,
        blocks: int,
        block_bytes: int,
        in_flight: InFlight,
        decode: Decode | None,
    ) -> None:
        """Watch the scheduler of vLLM's engine, whose core is in this process.

        `draws` is told how to draw. `block_bytes` is the size of one of the cache's `blocks`. This
        class fills `in_flight`.
        """
        self._engine = llm_engine
        self._draws = draws
        self._in_flight = in_flight
        self._decode = decode
        self._cache_bytes = blocks * block_bytes
        self._block_bytes = block_bytes

        self._running: dict[str, _Running] = {}
        self._names = itertools.count()
        self._steps = 0
        self._cached_tokens = 0  # prompt tokens of ended samples that vLLM had in its cache
        self._scheduler = llm_engine.engine_core.engine_core.scheduler
        self._counts = _count(self._scheduler)

    def submit(self, requests: Sequence[Request], version: int) -> None:
        """Give every sample of `requests` to vLLM, whose weights have this version.

        Raises:
            EngineError: a request cannot be answered now. After any error none of `requests` is
                queued, and the samples that were in flight before are still there.
        """
        self._in_flight.check(requests)
        if not requests:
            return

        self._draws.sampling = requests[0].sampling
        before = set(self._running)
        try:
            for request in requests:
                self._add_samples(request, version)
        except BaseException:
            self._abort([name for name in self._running if name not in before])
            raise
        self._in_flight.add(requests)

    def step(self) -> None:
        """Run one pass through the model, and keep the samples that it ends.

        Raises:
            EngineError: the model's logits are not finite, or vLLM has dropped samples. After any
                error everything in flight is dropped.
        """
        if not self._running:
            return

        try:
            if not self._scheduler.has_unfinished_requests():
                raise EngineError(
                    f"vLLM has lost {len(self._running)} samples: it has nothing left to compute, "
                    f"and they have not ended; set rollout.engine=native, or use vLLM 0.32"
                )
            self._steps += 1
            for output in self._engine.step():
                if output.request_id in self._running:
                    self._take(output)
        except BaseException:
            self.drop_all()
            raise

    def collect(self) -> Finished:
        """Return the samples that have ended."""
        finished = self._in_flight.collect()
        stats = EngineStats(
            steps=self._steps,
            computed_prompt_tokens=finished.stats.prompt_tokens - self._cached_tokens,
            preemptions=self._counts.preemptions,
            cache_bytes=self._cache_bytes,
            peak_cache_bytes=self._counts.peak_blocks * self._block_bytes,
        )
        self._steps = 0
        self._cached_tokens = 0
        self._counts.preemptions = 0
        self._counts.peak_blocks = 0
        return Finished(finished.samples, finished.stats + stats)

    def cancel(self) -> Finished:
        """Drop the samples that have not ended, and return those that have."""
        self._abort(list(self._running))
        self._in_flight.drop_unfinished()
        return self.collect()

    def drop_all(self) -> None:
        """Drop every sample, so that none is taken for a sample of a later request."""
        self._in_flight.clear()
        self._cached_tokens = 0
        self._abort(list(self._running))

    def _add_samples(self, request: Request, version: int) -> None:
        sampling = request.sampling
        for index, arguments in zip(request.samples, draw_arguments(request), strict=True):
            name = str(next(self._names))
            params = _request_params(sampling, arguments | {"name": name})
            search = None
            if sampling.stop:
                assert self._decode is not None
                search = StopSearch(self._decode, sampling.stop, response_so_far(request))
            self._running[name] = _Running(request, index, version, search)
            self._engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, params)

    def _take(self, output: Any) -> None:
        """Record one of vLLM's outputs, and finish its sample if it has ended."""
        running = self._running[output.request_id]
        (answer,) = output.outputs
        end = running.end(answer.token_ids)
        if end is None and not output.finished:
            return

        if not output.finished:
            self._engine.abort_request([output.request_id])
        del self._running[output.request_id]
        length = len(answer.token_ids) if end is None else end
        masks = self._draws.take_masks(output.request_id, length)
        self._in_flight.finish([_sample(running, answer, end, masks)])
        self._cached_tokens += output.num_cached_tokens or 0

    def _abort(self, names: list[str]) -> None:
        """Let vLLM forget these running samples."""
        for name in names:
            del self._running[name]
            self._draws.take_masks(name, 0)
        self._engine.abort_request(names)


@dataclass
class _SchedulerWork:
    """The work of vLLM's scheduler since the last reset."""

    preemptions: int = 0  # number of times that a request lost its blocks
    peak_blocks: int = 0  # the largest number of blocks in use


def _count(scheduler: Any) -> _SchedulerWork:
    """Count the work of `scheduler` from this call on."""
    # The wrappers must not refer to our engine, or Python would never free it.
    counts = _SchedulerWork()
    preempt: Callable[..., None] = scheduler._preempt_request
    schedule: Callable[..., Any] = scheduler.schedule
    pool = scheduler.kv_cache_manager.block_pool

    def counted_preempt(*args: Any, **kwargs: Any) -> None:
        counts.preemptions += 1
        preempt(*args, **kwargs)

    def counted_schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block
        counts.peak_blocks = max(counts.peak_blocks, used)
        return scheduled

    scheduler._preempt_request = counted_preempt
    scheduler.schedule = counted_schedule
    return counts


def _request_params(sampling: SamplingParams, arguments: dict[str, Any]) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=0.0,  # `Draws` knows how to draw; vLLM need prepare nothing for it
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        extra_args=arguments,
        logprobs=0,  # only that of the sampled token
        detokenize=False,
        # Texts are searched for stop strings as they grow.
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def _sample(running: _Running, answer: Any, end: int | None, masks: MaskWords | None) -> Sample:
    """Return the sample in vLLM's `answer`, cut after `end` tokens.

    Raises:
        EngineError: a log-prob is not a number.
    """
    tokens = list(answer.token_ids)[:end]
    logprobs = [at[token].logprob for token, at in zip(tokens, answer.logprobs, strict=False)]
    if not all(math.isfinite(value) for value in logprobs):
        raise EngineError(
            f"vLLM's log-probs of sample {running.index} of request {running.request.id} are not "
            f"finite; look for NaN in the weights"
        )

    return Sample(
        request_id=running.request.id,
        sample_index=running.index,
        token_ids=tokens,
        logprobs=logprobs,
        stopped=end is not None or answer.finish_reason == "stop",
        version=running.version,
        masks=masks,
    )
