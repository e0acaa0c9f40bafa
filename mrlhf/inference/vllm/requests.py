"""Samples as vLLM requests: submitted, run to the end, cut at stop strings, counted.

Each sample is a request of its own with its own seed; the samples of a prompt share its computed
prefix in vLLM's cache. It does not know weights or process groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mrlhf.errors import EngineError
from mrlhf.inference.base import EngineStats, Sample, SamplingParams
from mrlhf.inference.stopping import Decode, end_of
from mrlhf.inference.vllm import guards


@dataclass
class _Counts:
    """What a call of `generate` adds up."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Requests:
    """Runs batches of samples on one vLLM engine."""

    def __init__(self, llm_engine: Any, sampler: Any, blocks: int, block_bytes: int) -> None:
        """Watch the engine's scheduler and take over what its sampler reports.

        Args:
            llm_engine: vLLM's engine, its core in this process.
            sampler: vLLM's sampler, reporting raw log-probs.
            blocks: of the KV cache.
            block_bytes: of one of them.
        """
        self._engine = llm_engine
        self._sampler = sampler
        self._cache_bytes, self._block_bytes = blocks * block_bytes, block_bytes
        self._counts = _Counts()
        self._tally = _count(llm_engine.engine_core.engine_core.scheduler)
        assert sampler.logprobs_mode == "raw_logprobs", sampler.logprobs_mode

    @property
    def stats(self) -> EngineStats:
        """What the last `run` did."""
        counts = self._counts
        return EngineStats(
            steps=counts.steps,
            prompt_tokens=counts.prompt_tokens,
            computed_prompt_tokens=counts.prompt_tokens - counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            preemptions=self._tally.preemptions,
            cache_bytes=self._cache_bytes,
            peak_cache_bytes=self._tally.peak_blocks * self._block_bytes,
        )

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        uids: Sequence[int],
        sampling: SamplingParams,
        samples: Sequence[range],
        decode: Decode | None,
    ) -> list[Sample]:
        """Answer the prompts; the result is ordered by prompt, then by sample.

        Raises:
            EngineError: the model's logits are not finite.
        """
        self._counts = _Counts()
        self._tally.preemptions = self._tally.peak_blocks = 0
        # The log-probs that vLLM would report are before temperature or after truncation; ours are
        # in between.
        self._sampler.compute_logprobs = _logprobs_at(sampling.temperature or 1.0)
        order = [(prompt, index) for prompt, indices in enumerate(samples) for index in indices]
        done: dict[int, Sample] = {}
        known = [0] * len(order)  # tokens of each response that hold no stop string
        try:  # what is left over from a failed call would be answered in the next one's name
            for number, (prompt, index) in enumerate(order):
                params = _request_params(
                    sampling, guards.request_seed(sampling.seed, uids[prompt], index)
                )
                self._engine.add_request(
                    str(number), {"prompt_token_ids": list(prompts[prompt])}, params
                )
            while self._engine.has_unfinished_requests():
                self._step(order, known, sampling.stop, decode, done)
        finally:
            self._engine.abort_request([str(n) for n in range(len(order)) if n not in done])
        return [done[number] for number in range(len(order))]

    def _step(
        self,
        order: Sequence[tuple[int, int]],
        known: list[int],
        stop: tuple[str, ...],
        decode: Decode | None,
        done: dict[int, Sample],
    ) -> None:
        """One pass through the model; adds the samples that it ends to `done`."""
        outputs = self._engine.step()
        self._counts.steps += 1
        for output in outputs:
            number, (answer,) = int(output.request_id), output.outputs
            if number in done:
                continue
            length = len(answer.token_ids)
            end = None
            if stop and length > known[number]:
                assert decode is not None
                end = end_of(answer.token_ids, decode, stop, start=known[number] + 1)
                known[number] = length
            if end is None and not output.finished:
                continue
            if not output.finished:
                self._engine.abort_request([output.request_id])
            done[number] = _sample(*order[number], answer, end)
            self._counts.prompt_tokens += len(output.prompt_token_ids)
            self._counts.cached_tokens += output.num_cached_tokens or 0
            self._counts.generated_tokens += len(done[number].token_ids)


@dataclass
class _Tally:
    """What vLLM's scheduler did: preemptions, and the blocks in use when most were."""

    preemptions: int = 0
    peak_blocks: int = 0


def _count(scheduler: Any) -> _Tally:
    """A tally that grows with what `scheduler` does from now on.

    What vLLM holds must not refer to the engine, or that would never be collected.
    """
    tally = _Tally()
    preempt: Callable[..., None] = scheduler._preempt_request
    schedule: Callable[..., Any] = scheduler.schedule
    pool = scheduler.kv_cache_manager.block_pool

    def counted_preempt(*args: Any, **kwargs: Any) -> None:
        tally.preemptions += 1
        preempt(*args, **kwargs)

    def counted_schedule(*args: Any, **kwargs: Any) -> Any:
        scheduled = schedule(*args, **kwargs)
        used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block
        tally.peak_blocks = max(tally.peak_blocks, used)
        return scheduled

    scheduler._preempt_request, scheduler.schedule = counted_preempt, counted_schedule
    return tally


def _request_params(sampling: SamplingParams, seed: int | None) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        seed=seed,
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        # Texts are searched for stop strings as they grow.
        output_kind=RequestOutputKind.CUMULATIVE if sampling.stop else RequestOutputKind.FINAL_ONLY,
    )


def _logprobs_at(temperature: float) -> Callable[[Tensor], Tensor]:
    """Log-probs over the whole vocabulary at a temperature, of logits [tokens, vocab]."""

    def compute_logprobs(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(dim=-1)

    return compute_logprobs


def _sample(prompt: int, index: int, answer: Any, end: int | None) -> Sample:
    """The sample that vLLM's `answer` is, or its first `end` tokens.

    Raises:
        EngineError: a log-prob is not a number.
    """
    tokens = list(answer.token_ids)[:end]
    logprobs = [at[token].logprob for token, at in zip(tokens, answer.logprobs, strict=False)]
    if not all(math.isfinite(value) for value in logprobs):
        raise EngineError(
            f"vLLM's log-probs of sample {index} of prompt {prompt} are not finite; look for NaN in the weights"
        )
    return Sample(
        prompt, index, tokens, logprobs, stopped=end is not None or answer.finish_reason == "stop"
    )
