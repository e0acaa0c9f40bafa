"""The sampler against published numbers, a slow loop, transformers' warpers and statistics."""

import itertools
import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mrlhf.errors import ConfigError
from mrlhf.inference.base import SamplingParams
from mrlhf.inference.native.sampler import (
    TokenSampler,
    invert,
    sample_keys,
    splitmix64,
    truncate,
    uniforms,
)
from mrlhf.inference.native.tensor_parallel import TensorParallel
from tests.compilers import both_ways
from tests.oracle.plain_draws import GAMMA, MASK, number


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 4, "seed": 0, **changes})


def keys_of(seed, uids, n):
    return sample_keys([seed] * len(uids), list(uids), [range(n)] * len(uids))


def sample(logits, uniform, sampling):
    """By compiled kernels and by torch's operators; they agree but where sums are rounded."""
    alone = TensorParallel(None)
    results = []
    for way in both_ways():
        with way:
            results.append(TokenSampler(alone).draw(logits, 0, uniform, sampling))
    assert logits.is_contiguous()
    (tokens, logprobs), (others, other_logprobs) = results
    same = tokens == others
    assert len(same) - same.sum() <= len(same) // 30_000
    torch.testing.assert_close(logprobs[same], other_logprobs[same], rtol=1e-5, atol=1e-6)
    return results[0]


def test_splitmix64_gives_the_published_sequence_of_seed_0():
    states = np.array([i * GAMMA & MASK for i in range(5)], dtype=np.uint64)
    published = [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
        0xF88BB8A8724C81EC,
        0x1B39896A51A8749B,
    ]
    assert splitmix64(states).tolist() == published


def test_uniforms_equal_a_loop_in_python_integers():
    seed = 2**62 + 7
    uids = [0, 3, 10**12, 2**63 - 1]
    n = 3
    position = 17
    keys = keys_of(seed, uids, n)
    ours = uniforms(keys, np.full(len(uids) * n, position)).tolist()
    plain = [number(seed, uid, i, position) for uid, i in itertools.product(uids, range(n))]
    assert ours == plain


def test_uniforms_do_not_depend_on_who_else_is_in_the_batch():
    keys = keys_of(1, range(40), 2)
    positions = np.arange(80)
    order = np.random.default_rng(0).permutation(80)
    assert np.array_equal(uniforms(keys[order], positions[order]), uniforms(keys, positions)[order])
    assert np.array_equal(sample_keys([1], [7], [range(2)]), keys[14:16])
    assert np.array_equal(sample_keys([1, 1], [7, 30], [range(1, 2), range(0)]), keys[15:16])


def test_uniforms_are_uniform_and_independent_along_every_axis():
    uids = 64
    n = 8
    length = 128

    def draw(seed):
        keys = keys_of(seed, range(uids), n)
        by_position = [uniforms(keys, np.full(len(keys), t)) for t in range(length)]
        return torch.from_numpy(np.stack(by_position)).view(length, uids, n)

    u = draw(5)
    assert u.min() >= 0 and u.max() < 1
    total = u.numel()
    counts = torch.histc(u, bins=64, min=0, max=1)
    chi2 = float(((counts - total / 64) ** 2 / (total / 64)).sum())
    assert 63 - 5 * math.sqrt(126) < chi2 < 63 + 5 * math.sqrt(126)
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * total)
    centred = (u - 0.5) * math.sqrt(12)
    for axis, lag in itertools.product(range(3), (1, 2, 5)):
        size = u.shape[axis]
        pairs = centred.narrow(axis, 0, size - lag) * centred.narrow(axis, lag, size - lag)
        assert abs(float(pairs.mean())) < 5 / math.sqrt(pairs.numel()), (axis, lag)
    correlation = (centred * (draw(6) - 0.5) * math.sqrt(12)).mean()
    assert abs(float(correlation)) < 5 / math.sqrt(total)
    assert len(u.unique()) == total


@pytest.mark.parametrize("vocab", [1, 5, 128, 129, 1000])
def test_invert_equals_a_loop_over_token_ids(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(64, vocab, generator=generator) ** 4
    weights[torch.rand(64, vocab, generator=generator) < 0.3] = 0
    weights[:, 0] += 1e-3
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)

    expected = []
    for row, u in zip(weights.double().tolist(), uniform.tolist(), strict=True):
        below = 0.0
        target = u * math.fsum(row)
        for token, weight in enumerate(row):  # noqa: B007
            below += weight
            if below > target:
                break
        expected.append(token)

    assert invert(weights, uniform).tolist() == expected


def test_invert_never_takes_a_token_of_weight_zero():
    weights = torch.zeros(2, 600)
    weights[:, [3, 300]] = torch.tensor([0.1, 0.7])
    extremes = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert invert(weights, extremes).tolist() == [3, 300]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_fit_the_softmax(temperature):
    vocab = 300
    draws = 60_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 1.5
    numbers = torch.from_numpy(
        uniforms(keys_of(11, range(draws), 1), np.zeros(draws, dtype=np.int64))
    )
    tokens, _ = sample(logits.repeat(draws, 1), numbers, params(temperature=temperature))

    expected = torch.softmax(logits.double() / temperature, dim=-1) * draws
    counts = torch.bincount(tokens, minlength=vocab).double()
    common = expected >= 10
    observed = counts[common]
    wanted = expected[common]
    observed = torch.cat([observed, counts[~common].sum()[None]])
    wanted = torch.cat([wanted, expected[~common].sum()[None]])

    freedom = len(wanted) - 1
    chi2 = float(((observed - wanted) ** 2 / wanted).sum())
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom), (chi2, freedom)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        *((5, 1.0, 0.0), (-1, 0.7, 0.0), (20, 0.5, 0.0), (1, 1.0, 0.0), (-1, 0.01, 0.0)),
        *((900, 1.0, 0.0), (-1, 1.0, 0.05), (-1, 1.0, 1.0), (40, 0.9, 0.1)),
    ],
)
def test_truncation_keeps_what_transformers_keeps(top_k, top_p, min_p):
    logits = torch.randn(32, 400, generator=torch.Generator().manual_seed(1)) * 2
    warped = logits
    if top_k > 0:
        warped = TopKLogitsWarper(top_k)(None, warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    if min_p > 0:
        warped = MinPLogitsWarper(min_p)(None, warped)
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    kept = truncate(weights, top_k, top_p, min_p) > 0
    assert 0 < kept.sum() <= kept.numel()
    assert torch.equal(kept, warped > -torch.inf)


def test_ties_are_kept_by_top_k_and_broken_by_token_id_in_top_p():
    weights = torch.tensor([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0]])
    assert (truncate(weights, 3, 1.0, 0.0)[0] > 0).int().tolist() == [0, 1, 1, 1, 1, 1]
    # 3, 3, 2 reach 8/13 < 0.7, the second 2 in order of id takes it to 10/13.
    assert (truncate(weights, -1, 0.7, 0.0)[0] > 0).int().tolist() == [0, 1, 1, 1, 1, 0]


def test_logprobs_are_of_the_whole_distribution_at_the_temperature():
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    uniform = torch.tensor([0.5], dtype=torch.float64)
    token, logprob = sample(logits, uniform, params(temperature=2.0, top_k=1))
    # log softmax([0.5, 1, 2])[2] = 2 - log(e^0.5 + e^1 + e^2)
    assert token.item() == 2 and logprob.item() == pytest.approx(-0.46436, abs=1e-5)
    token, logprob = sample(logits, uniform, params(temperature=0.0))
    assert token.item() == 2 and logprob.item() == pytest.approx(-0.16985, abs=1e-5)


def test_sample_leaves_the_logits_alone():
    logits = torch.randn(4, 50)
    before = logits.clone()
    sample(logits, torch.rand(4, dtype=torch.float64), params(temperature=0.7, top_k=5, top_p=0.5))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n": 0}, "n 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_impossible_sampling_is_refused(changes, named):
    with pytest.raises(ConfigError, match=named):
        params(**changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.3}, {"temperature": 0.0}, {"top_k": 9}, {"top_p": 0.7, "top_k": 400}],
)
def test_tokens_that_are_never_drawn_stay_in_the_log_probabilities(changes, dtype):
    """Whole blocks of 128, single tokens, and one that is likelier than all others together."""
    generator = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(300, 700, generator=generator)).to(dtype)
    logits[:150, 140] = 150.0
    never = [0, 17, *range(128, 256), 300, *range(650, 700)]
    allowed = torch.ones(700, dtype=torch.bool)
    allowed[never] = False
    uniform = torch.rand(300, generator=generator, dtype=torch.float64)
    sampling = params(**changes)
    scaled = logits.double() / (sampling.temperature or 1.0)

    alone = TensorParallel(None)
    for way in both_ways(dtype):
        with way:
            draw = TokenSampler(alone, never).draw
            tokens, logprobs = draw(logits.clone(), 0, uniform, sampling)
            others = TokenSampler(alone).draw(logits[:, allowed].contiguous(), 0, uniform, sampling)
        assert allowed[tokens].all()
        wanted = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert logprobs.tolist() == pytest.approx(wanted.tolist(), rel=1e-5, abs=1e-4)

        # The tokens are those that are drawn where the vocabulary has no others.
        assert torch.equal(allowed.nonzero()[:, 0][others[0]], tokens)


def test_a_never_drawn_logit_that_is_no_number_is_seen():
    logits = torch.zeros(2, 5)
    logits[1, 4] = math.nan
    uniform = torch.full((2,), 0.5, dtype=torch.float64)
    for way in both_ways():
        with way:
            sampler = TokenSampler(TensorParallel(None), [4])
            _, logprobs = sampler.draw(logits.clone(), 0, uniform, params())
        assert logprobs.isfinite().tolist() == [True, False]
