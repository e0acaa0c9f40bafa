"""The shortest use of an inference engine: requests for some prompts, and the loop over its passes.

It knows no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from mrlhf.errors import EngineError
from mrlhf.inference.base import (
    EngineStats,
    Finished,
    InferenceEngine,
    Request,
    Sample,
    SamplingParams,
)


def requests_for(
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    sampling: SamplingParams,
    samples: Sequence[range] | None = None,
) -> list[Request]:
    """Return one request for each prompt, numbered from 0.

    Args:
        uids: the number of each prompt, on which its random numbers depend.
        samples: the sample indices to draw for each prompt; None draws all `sampling.n` of each.
    """
    if samples is None:
        samples = [range(sampling.n)] * len(prompts)
    rows = enumerate(zip(prompts, uids, samples, strict=True))
    return [
        Request(id=number, prompt=prompt, uid=uid, samples=indices, sampling=sampling)
        for number, (prompt, uid, indices) in rows
    ]


def generate(
    engine: InferenceEngine,
    requests: Sequence[Request],
    may_begin: Callable[[int], bool] | None = None,
) -> Finished:
    """Answer `requests` on an engine with nothing in flight, step by step.

    Args:
        may_begin: is asked before each step, with the step's number from 0; if it returns False,
            the samples that have not ended are dropped. All ranks of a replica must get the same
            answers.

    Returns:
        The samples in the order of the requests, then by sample index, and the statistics of the
        whole call.

    Raises:
        EngineError: other samples are in flight, or the engine refuses or fails. Then nothing of
            this call is left in the engine.
    """
    if engine.in_flight:
        raise EngineError(
            f"generate() needs an engine with nothing in flight, and {engine.in_flight} samples "
            f"are: collect() or cancel() them first"
        )
    samples: list[Sample] = []
    stats = EngineStats()

    try:
        engine.submit(requests)
        step = 0
        while engine.in_flight:
            goes_on = may_begin is None or may_begin(step)
            if goes_on:
                engine.step()
            finished = engine.collect() if goes_on else engine.cancel()
            samples += finished.samples
            stats += finished.stats
            step += 1
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            engine.cancel()
        raise

    places = {request.id: place for place, request in enumerate(requests)}
    samples.sort(key=lambda sample: (places[sample.request_id], sample.sample_index))
    return Finished(samples, stats)
