"""VllmEngine against transformers: log-probs, greedy tokens, sampling, stops, refusals."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from benchmarks.engine_loop import generate, requests_for
from mrlhf.errors import ConfigError, EngineError
from mrlhf.inference.base import EngineLimits, Request, Sample, SamplingParams
from mrlhf.inference.vllm.engine import VllmEngine
from mrlhf.inference.vllm.pieces import CPU_HEAD_SIZES
from mrlhf.records import bit_words
from tests.models.engines import answer, fill, spec_of
from tests.oracle.plain_draws import worst_draw
from tests.ranks import run_ranks
from tests.vllm.models import (
    CONFIGS,
    VOCABULARY,
    hf_difference,
    hf_greedy,
    hf_model,
    make_prompts,
    needs_vllm,
)

pytestmark = needs_vllm

LIMITS = EngineLimits(max_num_seqs=8, max_length=128, max_prefill_tokens=64)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=0)
PROMPTS = make_prompts()
UIDS = list(range(len(PROMPTS)))
WITH_TOKENS_LEFT_OUT = "qwen3"


def _decode(tokens: Any) -> str:
    return "".join(f"<{token}>" for token in tokens)


def _make(model: Any, never: Sequence[int] = (), **limits: Any) -> VllmEngine:
    changed = dataclasses.replace(LIMITS, **limits)
    return VllmEngine(
        spec_of(model),
        dist.group.WORLD,
        torch.device("cpu"),
        torch.float32,
        changed,
        decode=_decode,
        never=never,
    )


def _refuses(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="no weights yet"):
        answer(engine, PROMPTS, UIDS, GREEDY)
    with pytest.raises(EngineError, match="neither bound nor in weight_slots"):
        engine.commit(1)
    with pytest.raises(EngineError, match="no parameter 'lm_head'"):
        engine.bind("lm_head", torch.zeros(1))
    with pytest.raises(EngineError, match="cannot be bound"):
        engine.bind("model.norm.weight", torch.zeros(3))


def _refuses_prompts(engine: VllmEngine) -> None:
    for prompt, match in (
        ([], "prompt of request 0 is empty"),
        ([1] * 121, r"121 tokens \+ max_tokens 8 exceed the engine's max_length 128"),
        ([VOCABULARY], "token ids from 131 to 131"),
    ):
        with pytest.raises(EngineError, match=match):
            answer(engine, [prompt], [0], GREEDY)
    engine.sleep()
    with pytest.raises(EngineError, match="sleeps"):
        answer(engine, PROMPTS, UIDS, GREEDY)
    engine.wake()


def _samples_as_asked(engine: VllmEngine, model: Any) -> None:
    """Log-probs are those at the temperature over the whole vocabulary, truncated or not."""
    for changes in (
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.6, "top_k": 4, "top_p": 0.9},
    ):
        sampling = SamplingParams(n=3, max_tokens=8, seed=1, **changes)
        finished = generate(engine, requests_for(PROMPTS, UIDS, sampling))
        samples = finished.samples
        assert [(s.request_id, s.sample_index) for s in samples] == [
            (p, i) for p in UIDS for i in range(3)
        ]
        assert hf_difference(model, PROMPTS, samples, changes["temperature"]) < 1e-4
        assert all(len(s.token_ids) == 8 and not s.stopped for s in samples)
        if "top_k" in changes:
            assert _are_among_the_likeliest(model, samples, 4)

    _records_what_could_be_drawn(engine, model, finished.samples)
    stats = finished.stats
    assert stats.generated_tokens == 18 * 8 and stats.prompt_tokens == 3 * sum(map(len, PROMPTS))
    assert (
        stats.steps >= 24 and stats.cache_bytes >= stats.peak_cache_bytes > 0
    )  # 18 samples, 8 at once


def _records_what_could_be_drawn(engine: VllmEngine, model: Any, same: list[Sample]) -> None:
    """Log-probs are then over the tokens that transformers would leave too."""
    cut = {"top_k": 4, "top_p": 0.9}
    sampling = SamplingParams(n=3, max_tokens=8, seed=1, temperature=0.6, record_masks=True, **cut)
    samples = generate(engine, requests_for(PROMPTS, UIDS, sampling)).samples
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in same]
    equal = 0
    for sample in samples:
        prompt = PROMPTS[sample.request_id]
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / 0.6
        warped = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4)(None, logits))
        assert sample.masks is not None
        words = np.split(np.array(sample.masks.words), np.cumsum(sample.masks.counts)[:-1])
        for place, kept in enumerate(words):
            assert len(kept) < bit_words(VOCABULARY)  # so they are token ids
            over_kept = logits[place, kept].log_softmax(-1)
            drawn = kept.tolist().index(sample.token_ids[place])
            assert abs(float(over_kept[drawn]) - sample.logprobs[place]) < 1e-4
            equal += set(kept.tolist()) == set(
                (warped[place] > -torch.inf).nonzero()[:, 0].tolist()
            )
    assert equal >= 0.97 * len(samples) * 8  # rounding may decide at an edge

    plain = SamplingParams(n=3, max_tokens=8, seed=1, temperature=0.6, record_head=5)
    for sample in generate(engine, requests_for(PROMPTS, UIDS, plain)).samples:
        prompt = PROMPTS[sample.request_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits
        wanted = (logits[0, len(prompt) - 1 : -1] / 0.6).log_softmax(dim=-1).topk(5).values
        assert sample.masks is not None
        heads = np.array(sample.masks.words, dtype=np.int32).reshape(8, 2, 5)[:, 1]
        assert np.abs(heads.view(np.float32) - wanted.numpy()).max() < 1e-4


def _are_among_the_likeliest(model: Any, samples: list[Sample], count: int) -> bool:
    for sample in samples:
        prompt = PROMPTS[sample.request_id]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *sample.token_ids]])).logits[
                0, len(prompt) - 1 : -1
            ]
        likeliest = logits.topk(count).indices.tolist()
        if any(
            token not in allowed for token, allowed in zip(sample.token_ids, likeliest, strict=True)
        ):
            return False
    return True


def _draws_follow_the_distribution(engine: VllmEngine, model: Any) -> None:
    """The frequencies of 600 first tokens after one prompt are near their probabilities."""
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    drawn = answer(
        engine, [PROMPTS[0]], [3], SamplingParams(n=600, temperature=1.0, max_tokens=1, seed=2)
    )
    found = (
        torch.bincount(torch.tensor([s.token_ids[0] for s in drawn]), minlength=VOCABULARY) / 600
    )
    assert float((found - wanted).abs().max()) < 0.08  # four standard deviations of a fair coin


def _draws_by_number(engine: VllmEngine, model: Any) -> None:
    """A token is that of its number, whatever is computed beside it, and wherever prompts are cut.

    The prompts have more tokens together than a pass, and more samples than places.
    """
    assert sum(map(len, PROMPTS)) > LIMITS.max_prefill_tokens
    sampling = SamplingParams(n=3, temperature=0.8, max_tokens=12, seed=2**62 + 5)
    uids = [10**12 + uid for uid in UIDS]
    forward = answer(engine, PROMPTS, uids, sampling)
    assert worst_draw(model, PROMPTS, uids, forward, sampling) < 1e-4
    other_seed = dataclasses.replace(sampling, seed=5)
    assert worst_draw(model, PROMPTS, uids, forward, other_seed) > 0.5

    by_place = {(s.request_id, s.sample_index): s.token_ids for s in forward}
    assert len({tuple(tokens) for tokens in by_place.values()}) == 18
    (alone,) = answer(engine, PROMPTS[4:5], uids[4:5], sampling, samples=[range(1, 2)])
    assert alone.token_ids == by_place[4, 1]
    for sample in answer(engine, PROMPTS[::-1], uids[::-1], sampling):
        assert sample.token_ids == by_place[5 - sample.request_id, sample.sample_index]


def _stops(engine: VllmEngine) -> None:
    plain = answer(engine, PROMPTS, UIDS, SamplingParams(temperature=1.0, max_tokens=12, seed=4))
    third = plain[0].token_ids[2]
    by_token = answer(
        engine,
        PROMPTS,
        UIDS,
        SamplingParams(temperature=1.0, max_tokens=12, seed=4, stop_token_ids=(third,)),
    )
    # A stop string that begins in one token and ends in the next.
    text = f"{plain[0].token_ids[1]}><{third}"
    with_text = SamplingParams(temperature=1.0, max_tokens=12, seed=4, stop=(text,))
    finished = generate(engine, requests_for(PROMPTS, UIDS, with_text))
    by_text = finished.samples
    for stopped in (by_token[0], by_text[0]):
        assert stopped.token_ids == plain[0].token_ids[:3] and stopped.stopped
        assert stopped.logprobs == pytest.approx(plain[0].logprobs[:3], abs=1e-5)

    for before, after in zip(plain[1:], by_text[1:], strict=True):
        assert after.token_ids == before.token_ids and not after.stopped

    assert finished.stats.generated_tokens == sum(len(s.token_ids) for s in by_text)
    _goes_on(engine)


def _goes_on(engine: VllmEngine) -> None:
    """The rest of a response is that of the whole; a stop string may begin before it."""
    (free,) = answer(engine, PROMPTS[:1], UIDS[:1], GREEDY)
    tokens = free.token_ids
    stopping = dataclasses.replace(GREEDY, stop=(f"{tokens[2]}><{tokens[3]}",))
    (whole,) = answer(engine, PROMPTS[:1], UIDS[:1], stopping)
    assert whole.stopped
    random = dataclasses.replace(GREEDY, temperature=1.0)
    (drawn,) = answer(engine, PROMPTS[:1], UIDS[:1], random)

    for sampling, wanted in ((GREEDY, free), (stopping, whole), (random, drawn)):
        cut = len(wanted.token_ids) - 1
        prompt = [*PROMPTS[0], *wanted.token_ids[:cut]]
        rest = dataclasses.replace(sampling, max_tokens=len(tokens) - cut)
        request = Request(
            id=0, prompt=prompt, uid=UIDS[0], samples=range(1), sampling=rest, drawn=cut
        )
        (sample,) = generate(engine, [request]).samples
        assert sample.token_ids == wanted.token_ids[cut:]
        assert sample.stopped == wanted.stopped


def _steps(engine: VllmEngine) -> None:
    """Requests that come late get the same tokens; after a cancel the engine works as before."""
    requests = requests_for(PROMPTS, UIDS, GREEDY)
    whole = [sample.token_ids for sample in generate(engine, requests).samples]

    engine.submit(requests[:2])
    engine.step()
    engine.submit(requests[2:])
    samples: list[Sample] = []
    while engine.in_flight:
        engine.step()
        samples += engine.collect().samples
    samples.sort(key=lambda sample: sample.request_id)
    assert [sample.token_ids for sample in samples] == whole

    engine.submit(requests)
    engine.step()
    with pytest.raises(EngineError, match="6 samples are in flight"):
        engine.commit(1)
    assert engine.cancel().samples == [] and engine.in_flight == 0
    assert [sample.token_ids for sample in generate(engine, requests).samples] == whole


def _survives_failures(engine: VllmEngine) -> None:
    """A submit that fails leaves the samples in flight; a sample that vLLM loses is an error."""
    requests = requests_for(PROMPTS, UIDS, GREEDY)
    whole = [sample.token_ids for sample in generate(engine, requests).samples]
    llm_engine = engine._llm.llm_engine
    add_request = llm_engine.add_request
    calls = []

    def fail_at_the_second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise ValueError("no room")
        add_request(*args)

    engine.submit(requests[:2])
    engine.step()
    with (
        patch.object(llm_engine, "add_request", fail_at_the_second),
        pytest.raises(ValueError, match="no room"),
    ):
        engine.submit(requests[2:])
    assert engine.in_flight == 2
    samples: list[Sample] = []
    while engine.in_flight:
        engine.step()
        samples += engine.collect().samples
    assert sorted(sample.request_id for sample in samples) == [0, 1]
    assert all(sample.token_ids == whole[sample.request_id] for sample in samples)

    from vllm.v1.request import RequestStatus

    engine.submit(requests[:3])
    scheduler = llm_engine.engine_core.engine_core.scheduler
    scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    with pytest.raises(EngineError, match="vLLM has lost 3 samples"):
        engine.step()
    assert engine.in_flight == 0
    assert [sample.token_ids for sample in generate(engine, requests).samples] == whole


def _host_environment() -> dict[str, str]:
    # torch's own compiler names its cache where the sampler is compiled.
    return {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("VLLM_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_"))
    }


def _leaves_the_host_alone(before: dict[str, str]) -> None:
    own = _host_environment()
    assert own == before, set(own.items()) ^ set(before.items())
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1


def _preempts(model: Any) -> None:
    """With room for few sequences the answers are those that there are with room for all."""
    prompts = make_prompts(count=6, length=60)
    one = (
        2 * 2 * 2 * 32 * 4 * 32
    )  # bytes of a block: k and v, layers, heads, head_dim, float32, tokens
    engine = _make(model, cache_bytes=8 * one)
    fill(engine.weight_slots(), model)
    engine.commit(1)
    sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=0)
    for temperature in (0.0, 1.0):
        sampling = dataclasses.replace(sampling, temperature=temperature)
        finished = generate(engine, requests_for(prompts, UIDS, sampling))
        assert finished.stats.preemptions > 0
        assert finished.stats.cache_bytes == 8 * one
        if temperature:
            assert worst_draw(model, prompts, UIDS, finished.samples, sampling) < 1e-4
        else:
            assert [s.token_ids for s in finished.samples] == hf_greedy(model, prompts, 40)


def _never(model: Any) -> list[int]:
    """Tokens that would be drawn if they were not left out."""
    return sorted({tokens[2] for tokens in hf_greedy(model, PROMPTS, 8)})


def _leaves_tokens_out(engine: VllmEngine, model: Any) -> None:
    """Ends and tokens never drawn equal transformers; log-probs are over the whole vocabulary."""
    never = _never(model)
    free = hf_greedy(model, PROMPTS, 8)
    end = sorted({tokens[5] for tokens in free} - set(never))
    greedy = answer(engine, PROMPTS, UIDS, dataclasses.replace(GREEDY, stop_token_ids=tuple(end)))
    assert [s.token_ids for s in greedy] == hf_greedy(model, PROMPTS, 8, end, never) != free
    assert [s.stopped for s in greedy] == [s.token_ids[-1] in end for s in greedy]
    assert hf_difference(model, PROMPTS, greedy) < 1e-4

    for changes in ({"temperature": 1.5}, {"temperature": 0.9, "top_k": 20}):
        sampling = SamplingParams(n=10, max_tokens=8, seed=1, **changes)
        samples = answer(engine, PROMPTS, UIDS, sampling)
        assert not {token for sample in samples for token in sample.token_ids} & set(never)
        assert hf_difference(model, PROMPTS, samples, changes["temperature"]) < 1e-4
        assert worst_draw(model, PROMPTS, UIDS, samples, sampling, never) < 1e-4


def _body(rank: int, world_size: int) -> None:
    before = _host_environment()

    for name in CONFIGS:
        model = hf_model(name)
        never = _never(model) if name == WITH_TOKENS_LEFT_OUT else []
        engine = _make(model, never=never)
        if name == "llama":
            _refuses(engine)
        fill(engine.weight_slots(), model)
        engine.commit(1)
        greedy = answer(engine, PROMPTS, UIDS, GREEDY)
        assert {sample.version for sample in greedy} == {1}
        assert [s.token_ids for s in greedy] == hf_greedy(model, PROMPTS, 8, never=never), name
        assert hf_difference(model, PROMPTS, greedy) < 1e-4, name
        if name == "llama":
            _samples_as_asked(engine, model)
            _draws_follow_the_distribution(engine, model)
            _draws_by_number(engine, model)
            _stops(engine)
            _steps(engine)
            _survives_failures(engine)
            _refuses_prompts(engine)
            _leaves_the_host_alone(before)
        if name == WITH_TOKENS_LEFT_OUT:
            _leaves_tokens_out(engine, model)
        del engine

    _preempts(hf_model("llama"))


def test_one_rank_against_transformers() -> None:
    run_ranks(1, _body)


def _unsupported(rank: int, world_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == CPU_HEAD_SIZES
    spec = dataclasses.replace(spec_of(hf_model("llama")), head_dim=16)
    with pytest.raises(ConfigError) as caught:
        VllmEngine(spec, dist.group.WORLD, torch.device("cpu"), torch.float32, LIMITS)
    return str(caught.value)


def _unsupported_experts(rank: int, world_size: int) -> str:
    spec = dataclasses.replace(spec_of(hf_model("qwen3-moe")), hidden_size=80)
    with pytest.raises(ConfigError) as caught:
        VllmEngine(spec, dist.group.WORLD, torch.device("cpu"), torch.float32, LIMITS)
    return str(caught.value)


def _refused(rank: int, world_size: int) -> tuple[str, str]:
    return _unsupported(rank, world_size), _unsupported_experts(rank, world_size)


def test_what_vllm_lacks_on_a_cpu_is_refused() -> None:
    ((head_size, width),) = run_ranks(1, _refused)
    assert head_size.startswith(
        "vLLM is not supported for a model with head_dim 16 on a CPU, where vLLM has attention for "
        "32, 64"
    )
    assert width == (
        "vLLM is not supported for a model with experts and hidden size 80, no multiple of 32, on "
        "a CPU; set rollout.engine=native"
    )
    assert "\n" not in head_size
