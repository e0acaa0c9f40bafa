"""The native engine on one rank, against transformers and a slow loop."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from benchmarks.engine_loop import generate, requests_for
from mrlhf.inference.base import Request, SamplingParams
from mrlhf.inference.native.sampler import sample_keys, uniforms
from mrlhf.inference.native.sequences import DrawnSequences
from tests.compilers import without_compiler
from tests.models.engines import (
    GREEDY,
    MODELS,
    PROMPTS,
    SAMPLED,
    UIDS,
    VOCABULARY,
    adapted_model,
    answer,
    assert_same,
    hf_model,
    make_engine,
    make_prompts,
    tight,
)
from tests.models.features import FEATURE_MODELS
from tests.models.mixtures import MIXTURES


def hf_logprobs(model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """[response_len, vocab] as transformers computes them in one forward pass."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / (temperature or 1.0), dim=-1)


def assert_logprobs(model, sample, temperature=0.0):
    """The sample's log-probs are those that transformers computes; returns these of all tokens."""
    prompt = PROMPTS[sample.request_id]
    logprobs = hf_logprobs(model, prompt, sample.token_ids, temperature)
    wanted = logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    assert sample.logprobs == pytest.approx(wanted.tolist(), abs=1e-4)
    return logprobs


def hf_greedy(model, prompt: list[int], end=None, never=None) -> list[int]:
    """The 14 tokens that transformers generates, or fewer if one of `end` comes before."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    output = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=14,
        eos_token_id=end,
        suppress_tokens=never,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name", (*MODELS, *FEATURE_MODELS, *MIXTURES, "glm4-moe-lite", "deepseek-v32", "glm-moe-dsa")
)
def test_greedy_equals_transformers_generate(name):
    model = hf_model(name)
    samples = answer(make_engine(model), PROMPTS, UIDS, GREEDY)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert list(sample.token_ids) == hf_greedy(model, prompt) and not sample.stopped
        assert_logprobs(model, sample)


@pytest.mark.parametrize(
    "name",
    (
        *("llama", "qwen2-tied", "phi3", "gemma4", "gemma4-linked", "gemma4-moe", "mixtral"),
        *("qwen2-moe", "deepseek-v3"),
    ),
)
def test_adapters_are_added_as_in_transformers(name, tmp_path):
    model = adapted_model(name, tmp_path / "adapter")
    samples = answer(make_engine(model), PROMPTS, UIDS, GREEDY)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        assert list(sample.token_ids) == hf_greedy(model, prompt)
        assert_logprobs(model, sample)
    base = answer(make_engine(hf_model(name)), PROMPTS, UIDS, GREEDY)
    assert [sample.token_ids for sample in base] != [sample.token_ids for sample in samples]


def test_only_some_layers_have_adapters(tmp_path):
    """Of q, k and v in one parameter, v has one; of gate and up, gate."""
    model = adapted_model("qwen3", tmp_path / "adapter", targets=["v_proj", "gate_proj"])
    for sample in answer(make_engine(model), PROMPTS, UIDS, GREEDY):
        assert list(sample.token_ids) == hf_greedy(model, PROMPTS[sample.request_id])
        assert_logprobs(model, sample)


@pytest.mark.parametrize("name", ("qwen3", "qwen2-moe"))
def test_with_adapters_a_response_does_not_depend_on_others_to_the_last_bit(name, tmp_path):
    model = adapted_model(name, tmp_path / "adapter")
    together = answer(make_engine(model), PROMPTS, UIDS, SAMPLED)
    for number in (0, 4):
        alone = answer(make_engine(model), [PROMPTS[number]], [UIDS[number]], SAMPLED)
        assert_same(alone, together[3 * number : 3 * number + 3], tolerance=0)


@pytest.mark.parametrize("name", (*MODELS, "deepseek-v3", "gpt-oss"))
def test_sampling_equals_a_slow_loop_over_transformers(name):
    model = hf_model(name)
    samples = answer(make_engine(model), PROMPTS, UIDS, SAMPLED)
    order = [(i, j) for i in range(len(PROMPTS)) for j in range(3)]
    assert [(sample.request_id, sample.sample_index) for sample in samples] == order
    keys = sample_keys([5] * len(UIDS), UIDS, [range(3)] * len(UIDS))

    for sample, key in zip(samples, keys, strict=True):
        length = len(sample.token_ids)
        below = assert_logprobs(model, sample, 0.8).double().exp().cumsum(-1)
        drawn = torch.from_numpy(uniforms(np.full(length, key), np.arange(length)))
        assert list(sample.token_ids) == (below <= drawn[:, None]).sum(dim=-1).tolist()
        assert sample.stopped == (sample.token_ids[-1] in SAMPLED.stop_token_ids)
        assert not set(sample.token_ids[:-1]) & set(SAMPLED.stop_token_ids)
        assert sample.stopped or length == 14

    assert len({tuple(sample.token_ids) for sample in samples}) > 20
    assert {sample.stopped for sample in samples} == {True, False}


def test_samples_depend_neither_on_batch_order_nor_on_slots_nor_on_prefill_batches():
    model = hf_model("llama")
    whole = answer(make_engine(model), PROMPTS, UIDS, SAMPLED)
    order = [4, 0, 8, 2, 7, 1, 3, 6, 5]
    shuffled = answer(
        make_engine(model), [PROMPTS[i] for i in order], [UIDS[i] for i in order], SAMPLED
    )
    by_place = [whole[3 * i + j] for i in order for j in range(3)]
    assert_same(shuffled, by_place)
    for max_num_seqs, max_prefill_tokens in [(1, 512), (2, 1), (4, 30), (10, 24)]:
        engine = make_engine(
            model, max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens
        )
        assert_same(answer(engine, PROMPTS, UIDS, SAMPLED), whole)


def test_seed_uid_and_sample_index_each_change_the_draw():
    engine = make_engine(hf_model("llama"))
    draw = SamplingParams(n=2, temperature=1.0, max_tokens=14, seed=0)
    other_seed = SamplingParams(n=2, temperature=1.0, max_tokens=14, seed=1)
    responses = [
        sample.token_ids
        for uid, sampling in itertools.product((1, 2), (draw, other_seed))
        for sample in answer(engine, [PROMPTS[1]], [uid], sampling)
    ]
    assert len({tuple(response) for response in responses}) == 8
    assert answer(engine, [PROMPTS[1]], [1], draw)[1].token_ids == responses[1]


def test_several_end_tokens_and_tokens_never_drawn_equal_transformers():
    """Each token that is likeliest somewhere is either an end or never drawn."""
    model = hf_model("llama")
    free = [hf_greedy(model, prompt) for prompt in PROMPTS]
    never = sorted({tokens[3] for tokens in free})
    end = sorted({tokens[6] for tokens in free} - set(never))
    sampling = SamplingParams(
        temperature=0.0, max_tokens=14, seed=0, stop_token_ids=(*end, VOCABULARY + 9)
    )

    samples = answer(make_engine(model, never=never), PROMPTS, UIDS, sampling)
    for prompt, before, sample in zip(PROMPTS, free, samples, strict=True):
        assert list(sample.token_ids) == hf_greedy(model, prompt, end, never) != before
        assert sample.stopped == (sample.token_ids[-1] in end)
        assert_logprobs(model, sample)
    assert {sample.stopped for sample in samples} == {True, False}


def test_responses_longer_than_the_first_cache_equal_transformers():
    model = hf_model("llama")
    engine = make_engine(model, max_length=256)
    sampling = SamplingParams(temperature=0.0, max_tokens=200, seed=0)
    for sample in answer(engine, PROMPTS[:2], UIDS[:2], sampling):
        likeliest = assert_logprobs(model, sample).amax(dim=-1)
        assert len(sample.token_ids) == 200
        assert sample.logprobs == pytest.approx(likeliest.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3", "qwen3-moe", "gemma2", "gemma3", "gemma4", "gemma4-linked", "gemma4-moe"),
        "gpt-oss",
    ],
)
def test_bfloat16_logprobs_are_those_of_transformers_to_rounding(name):
    model = hf_model(name, torch.bfloat16)
    engine = make_engine(model, dtype=torch.bfloat16)
    exact = hf_model(name, torch.bfloat16).float()

    errors = []
    reference = []
    for sample in answer(engine, PROMPTS, UIDS, SAMPLED):
        index = torch.tensor(sample.token_ids)[:, None]
        prompt = PROMPTS[sample.request_id]
        wanted, theirs = (
            hf_logprobs(m, prompt, sample.token_ids, 0.8).gather(-1, index)[:, 0]
            for m in (exact, model)
        )
        errors.append((torch.tensor(sample.logprobs) - wanted).abs())
        reference.append((theirs - wanted).abs())

    # Two ways of rounding the same sums; which one is nearer differs between processors.
    assert torch.cat(errors).mean() < 1.5 * torch.cat(reference).mean()
    assert torch.cat(errors).max() < 3 * torch.cat(reference).max()


@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("glm-moe-dsa", "gemma4", "gemma4-linked")
        ),
    ],
)
def test_preemption_chunks_and_shared_prefixes_change_nothing(name):
    model = hf_model(name)
    prefix = make_prompts(4)[3]
    prompts = [*PROMPTS, *(prefix[:10] + prompt for prompt in PROMPTS[:4])]
    uids = list(range(len(prompts)))
    whole = answer(make_engine(model), prompts, uids, SAMPLED)
    seen = set()

    for blocks, block_size, budget in [
        (12, 4, 512),
        (12, 4, 5),
        (50, 1, 7),
        (20, 4, 3),
        (16, 3, 512),
    ]:
        engine = tight(model, blocks, block_size, max_prefill_tokens=budget, max_length=48)
        finished = generate(engine, requests_for(prompts, uids, SAMPLED))
        assert_same(finished.samples, whole, tolerance=2e-5)
        stats = finished.stats
        assert stats.peak_cache_bytes <= stats.cache_bytes
        assert stats.computed_prompt_tokens <= stats.prompt_tokens
        seen |= {"preempted"} if stats.preemptions else set()
        seen |= {"chunked"} if stats.steps > 60 else set()
        greedy = answer(engine, prompts, uids, GREEDY)
        assert [list(sample.token_ids) for sample in greedy] == [
            hf_greedy(model, prompt) for prompt in prompts
        ]

    assert seen == {"preempted", "chunked"}


def test_prompts_and_their_common_beginnings_are_computed_once():
    engine = make_engine(hf_model("llama"), block_size=4)
    prompt = list(range(30))
    eight = SamplingParams(n=8, temperature=1.0, max_tokens=2, seed=0)
    stats = generate(engine, requests_for([prompt], [0], eight)).stats
    assert (stats.prompt_tokens, stats.computed_prompt_tokens) == (240, 30)
    stats = generate(engine, requests_for([prompt[:20] + [99] * 5], [0], GREEDY)).stats
    assert (stats.prompt_tokens, stats.computed_prompt_tokens) == (25, 5)
    engine.commit(2)
    stats = generate(engine, requests_for([prompt], [0], GREEDY)).stats
    assert stats.computed_prompt_tokens == 30


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2", "gemma4", "gemma4-linked", "gpt-oss", "deepseek-v3", "glm4-moe-lite"),
        "glm-moe-dsa",
        *("qwen3-next", "qwen3-5"),
    ],
)
def test_each_turn_of_a_conversation_is_that_of_transformers(name):
    """Later turns begin with all that was said; what is kept of it makes no difference."""
    model = hf_model(name)
    engine = make_engine(model, block_size=4, max_num_seqs=3, max_length=96)
    said = [list(PROMPTS[0]), list(PROMPTS[1]), list(PROMPTS[3])]
    for turn in range(3):
        sampling = dataclasses.replace(SAMPLED, seed=turn)
        requests = [
            Request(id=n, prompt=prompt, uid=n, samples=range(1), sampling=sampling, goes_on=True)
            for n, prompt in enumerate(said)
        ]
        finished = generate(engine, requests)
        for sample in finished.samples:
            prompt = said[sample.request_id]
            response = list(sample.token_ids)
            logprobs = hf_logprobs(model, prompt, response, sampling.temperature)
            wanted = logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0]
            assert sample.logprobs == pytest.approx(wanted.tolist(), abs=5e-4)
            prompt += [*response, 3, turn]
        if turn:
            stats = finished.stats
            assert stats.computed_prompt_tokens < stats.prompt_tokens
            if hasattr(model.config, "linear_num_key_heads"):
                # States have seen all but the last token of a response; two have come since.
                assert stats.computed_prompt_tokens == 3 * len(said)


def test_a_thousand_requests_of_random_lengths_come_back_once_each():
    model = hf_model("llama-tied-llama3-rope")
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (1000,), generator=generator).tolist()
    prompts = [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]
    stop = tuple(range(12))
    sampling = SamplingParams(temperature=1.0, max_tokens=20, seed=3, stop_token_ids=stop)
    engine = tight(model, 40, max_num_seqs=48, max_prefill_tokens=100)
    finished = generate(engine, requests_for(prompts, range(1000), sampling))
    samples = finished.samples
    assert [(sample.request_id, sample.sample_index) for sample in samples] == [
        (i, 0) for i in range(1000)
    ]
    assert finished.stats.preemptions > 0
    assert finished.stats.generated_tokens == sum(len(sample.token_ids) for sample in samples)
    for sample in samples:
        assert sample.stopped == (sample.token_ids[-1] in stop) and (
            sample.stopped or len(sample.token_ids) == 20
        )
        assert not set(sample.token_ids[:-1]) & set(stop)

    chosen = range(0, 1000, 37)
    alone = answer(make_engine(model), [prompts[i] for i in chosen], list(chosen), sampling)
    for one, i in zip(alone, chosen, strict=True):
        assert one.token_ids == samples[i].token_ids


def test_chosen_samples_are_those_of_the_whole():
    model = hf_model("llama")
    whole = answer(make_engine(model), PROMPTS[:3], UIDS[:3], SAMPLED)
    part = answer(
        make_engine(model), PROMPTS[:3], UIDS[:3], SAMPLED, [range(1, 3), range(0), range(2, 3)]
    )
    assert [(sample.request_id, sample.sample_index) for sample in part] == [(0, 1), (0, 2), (2, 2)]
    assert_same(part, [whole[1], whole[2], whole[8]])


def test_the_rest_of_a_response_is_that_of_the_whole():
    engine = make_engine(hf_model("llama"), decode=lambda ids: "".join(f"<{i}>" for i in ids))
    (free,) = answer(engine, PROMPTS[:1], UIDS[:1], dataclasses.replace(SAMPLED, n=1))
    third, fourth = free.token_ids[2:4]
    # The text ends a response whose first part has its beginning.
    sampling = dataclasses.replace(SAMPLED, n=1, stop=(f"{third}><{fourth}",))
    (whole,) = answer(engine, PROMPTS[:1], UIDS[:1], sampling)
    assert whole.stopped and whole.token_ids == free.token_ids[:4]

    for cut in (1, 3):
        rest = Request(
            id=7,
            prompt=[*PROMPTS[0], *whole.token_ids[:cut]],
            uid=UIDS[0],
            samples=range(1),
            sampling=sampling,
            drawn=cut,
        )
        (sample,) = generate(engine, [rest]).samples
        assert sample.token_ids == whole.token_ids[cut:] and sample.stopped
        assert sample.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-5)


def test_a_stop_string_ends_a_response_with_the_token_that_completes_it():
    def decode(token_ids):
        return "".join(f"<{token}>" for token in token_ids)

    engine = make_engine(hf_model("llama"), decode=decode)
    free = answer(engine, PROMPTS, UIDS, GREEDY)
    first, second = free[2].token_ids[4:6]
    stop = f"{first}><{second}"
    stopped = answer(
        engine,
        PROMPTS,
        UIDS,
        SamplingParams(temperature=0.0, max_tokens=14, seed=0, stop=(stop, "absent")),
    )
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 1 for i in range(14) if stop in decode(before.token_ids[: i + 1])]
        assert after.token_ids == before.token_ids[
            : ends[0] if ends else 14
        ] and after.stopped == bool(ends)
    assert stopped[2].stopped and len(stopped[2].token_ids) <= 6


def test_a_stop_string_around_tokens_without_text_is_found():
    def decode(token_ids):
        return "".join({0: "EN", 1: "D"}.get(token, "") for token in token_ids)

    sampling = SamplingParams(temperature=1.0, max_tokens=40, seed=0, stop=("END",))
    sequences = DrawnSequences(sampling, decode, version=1)
    assert sequences.add(requests_for([[5]], [0], sampling)) == [[0]]
    zero = np.zeros(1, dtype=np.float32)
    drawn = [0, *[9] * 30, 1]
    ended = [sequences.record(np.array([0]), np.array([token]), zero) for token in drawn]
    assert ended == [[]] * 31 + [[0]] and sequences.remove(0).stopped


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2-tied"])
def test_a_response_does_not_depend_on_what_is_generated_beside_it(name):
    engine = make_engine(hf_model(name))
    whole = answer(engine, PROMPTS, UIDS, SAMPLED)
    by_place = {(sample.request_id, sample.sample_index): sample for sample in whole}

    for drawn in ([4], [1, 5, 8], list(range(0, 27, 2))):  # alone, few, half of the samples
        requests = []
        for number in drawn:
            prompt, sample = divmod(number, SAMPLED.n)
            one = [range(sample, sample + 1)]
            (request,) = requests_for([PROMPTS[prompt]], [UIDS[prompt]], SAMPLED, one)
            requests.append(dataclasses.replace(request, id=number))
        for sample in generate(engine, requests).samples:
            place = (sample.request_id // SAMPLED.n, sample.sample_index)
            assert sample.token_ids == by_place[place].token_ids
            assert sample.logprobs == by_place[place].logprobs, "not to the last bit"


def test_torch_operators_serve_where_nothing_can_be_compiled():
    model = hf_model("mistral-window")
    whole = answer(make_engine(model), PROMPTS, UIDS, SAMPLED)
    with without_compiler():
        for limits in ({}, {"max_prefill_tokens": 5, "block_size": 3}):
            assert_same(answer(make_engine(model, **limits), PROMPTS, UIDS, SAMPLED), whole)
