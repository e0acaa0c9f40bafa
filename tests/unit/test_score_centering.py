"""The engine's mean of the scores, against whole distributions, and what the engine records."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.engine_loop import generate, requests_for
from mrlhf.inference.base import MaskWords, Sample, SamplingParams
from mrlhf.records import SamplingMasks
from mrlhf.rl.correction import Correction, centre_scores
from tests.models.engines import PROMPTS, UIDS, hf_model, make_engine
from tests.rollouts import masks_of

NONE = Correction(None, None, 1.0, normalise=False, criteria=())
TRUNCATED = Correction("token", None, 1.3, normalise=False, criteria=())
BAND = Correction("token", 0.5, 1.4, normalise=False, criteria=())
WEIGHTS = {
    "none": (NONE, torch.ones_like),
    "truncated": (TRUNCATED, lambda ratio: ratio.clamp(max=1.3)),
    "band": (BAND, lambda ratio: ratio * ((ratio >= 0.5) & (ratio <= 1.4))),
}
TEMPERATURE = 0.8
NEVER = (3, 20, *range(100, 131))


def _distributions(vocab_size: int = 12) -> tuple[Tensor, Tensor]:
    """Logits of the policy, and the engine's log-probabilities, which differ; [5, vocab]."""
    generator = torch.Generator().manual_seed(3)
    logits = 1.5 * torch.randn(5, vocab_size, generator=generator)
    noise = 0.5 * torch.randn(5, vocab_size, generator=generator)
    return logits, (logits + noise).log_softmax(dim=-1)


def _gradient(logits: Tensor, engine: Tensor, head: int, correction: Correction) -> Tensor:
    """Of the mean in the logits, from a head of so many tokens."""
    logits = logits.clone().requires_grad_()
    top, ids = engine.topk(head)
    centring = centre_scores(logits.log_softmax(dim=-1).gather(1, ids), top, correction)
    centring.mean.sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_a_distribution_of_two_tokens() -> None:
    """p = (0.6, 0.4), q = (0.5, 0.5): the mean of e_a - p under q is q - p."""
    logits = torch.tensor([[0.6, 0.4]]).log()
    engine = torch.tensor([[0.5, 0.5]]).log()
    found = _gradient(logits, engine, 2, NONE)
    torch.testing.assert_close(found, torch.tensor([[-0.1, 0.1]]))
    # With weights w = min(p / q, 1): (0.5, 0.4) - 0.9 p.
    one = Correction("token", None, 1.0, normalise=False, criteria=())
    found = _gradient(logits, engine, 2, one)
    torch.testing.assert_close(found, torch.tensor([[0.5 - 0.54, 0.4 - 0.36]]))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("head", [1, 4, 12])
def test_the_mean_is_that_over_the_whole_vocabulary(weights: str, head: int) -> None:
    """Of a tail, the engine's distribution is taken to be that of the policy, scaled."""
    correction, weigh = WEIGHTS[weights]
    logits, engine = _distributions()
    slow = logits.double().requires_grad_()
    log_p = slow.log_softmax(dim=-1)
    p = log_p.detach().exp()
    q = engine.double().exp()
    is_tail = torch.ones_like(q, dtype=torch.bool).scatter(1, engine.topk(head).indices, False)
    scale = (q * is_tail).sum(dim=1) / (p * is_tail).sum(dim=1).clamp(min=1e-30)
    q = torch.where(is_tail, scale[:, None] * p, q)
    torch.testing.assert_close(q.sum(dim=1), torch.ones(5).double())

    (q * weigh(p / q) * log_p).sum().backward()
    assert slow.grad is not None and slow.grad.abs().max() > 0.02
    found = _gradient(logits, engine, head, correction)
    torch.testing.assert_close(found.double(), slow.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_centred_scores_have_mean_0_under_the_engine(weights: str) -> None:
    correction, weigh = WEIGHTS[weights]
    logits, engine = _distributions()
    p, q = logits.softmax(dim=-1), engine.exp()
    scores = torch.eye(12) - p[:, None]  # of each token
    mean = _gradient(logits, engine, 12, correction)
    centred = weigh(p / q)[:, :, None] * scores - mean[:, None]
    assert (q[:, :, None] * centred).sum(dim=1).abs().max() < 1e-6
    if weights == "none":
        uncentred = (q[:, :, None] * scores).sum(dim=1)
        assert uncentred.abs().max() > 0.02


@pytest.mark.parametrize("head", [1, 5, 12])
def test_equal_distributions_need_no_correction(head: int) -> None:
    logits, _ = _distributions()
    for correction, _ in WEIGHTS.values():
        found = _gradient(logits, logits.log_softmax(dim=-1), head, correction)
        assert found.abs().max() < 1e-6


def test_a_tail_that_rounding_left_is_none() -> None:
    logits = torch.tensor([[0.0, -14.0, -20.0]])
    engine = torch.tensor([[0.0, -20.0, -14.0]]).log_softmax(dim=-1)
    found = _gradient(logits, engine, 2, TRUNCATED)
    assert found.isfinite().all() and found.abs().max() < 1e-5


def test_places_without_a_head_centre_nothing() -> None:
    logprobs = torch.tensor([[-0.5, -1.0], [-0.3, 0.0]], requires_grad=True)
    engine = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]])
    centring = centre_scores(logprobs, engine, TRUNCATED)
    centring.mean.sum().backward()
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad[0], torch.zeros(2))
    assert logprobs.grad[1, 1] == 0
    assert centring.engine_mass.tolist() == [0.0, 1.0]


def test_heads_lie_behind_masks_and_come_back() -> None:
    could = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(1)) < 0.2
    could[:, :, :4] = True
    log_q = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(2)).log_softmax(dim=-1)
    drawn = torch.tensor([[1, 1, 0], [1, 0, 1]]).bool()
    masks = masks_of(could, drawn, log_q, head=4)
    joined = SamplingMasks.join([masks.of_rows([1]), masks], masks.counts[[1, 0, 1]])
    by_place = joined.by_place()

    ids, logprobs = by_place.heads(torch.device("cpu"))
    wanted = log_q[[1, 0, 1]].flatten(0, 1).topk(4)
    is_there = drawn[[1, 0, 1]].flatten()
    assert torch.equal(ids[is_there], wanted.indices[is_there])
    assert torch.equal(logprobs[is_there], wanted.values[is_there])
    assert (logprobs[~is_there] == -torch.inf).all()

    excluded = by_place.excluded(range(40), 40, torch.device("cpu"))
    assert torch.equal(excluded, (~could[[1, 0, 1]] & drawn[[1, 0, 1]][:, :, None]).flatten(0, 1))
    assert joined.cut_any and not masks_of(could | True, drawn, log_q, head=4).cut_any


def _heads(sample: Sample, head: int) -> tuple[Tensor, Tensor]:
    assert isinstance(sample.masks, MaskWords)
    counts = torch.tensor(sample.masks.counts, dtype=torch.int32)[None]
    words = torch.tensor(sample.masks.words, dtype=torch.int32)
    begins = torch.zeros(1, dtype=torch.int64)
    return SamplingMasks(words, begins, counts, head).by_place().heads(torch.device("cpu"))


@pytest.mark.parametrize("never", [(), NEVER], ids=["all", "never some"])
@pytest.mark.parametrize("keys", [{}, {"top_p": 0.9, "record_masks": True}], ids=["whole", "cut"])
def test_the_engine_records_the_likeliest(keys: dict[str, float], never: tuple[int, ...]) -> None:
    model = hf_model("qwen3")
    head = 30
    sampling = SamplingParams(n=2, temperature=TEMPERATURE, max_tokens=6, seed=4, **keys)
    centred = SamplingParams(**{**vars(sampling), "record_head": head})
    samples = generate(make_engine(model, never=never), requests_for(PROMPTS, UIDS, centred))
    plain = generate(make_engine(model, never=never), requests_for(PROMPTS, UIDS, sampling))
    assert [one.token_ids for one in plain.samples] == [one.token_ids for one in samples.samples]

    for sample in samples.samples:
        prompt = PROMPTS[sample.request_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + sample.token_ids])).logits
        logits = logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        log_p = logits.log_softmax(dim=-1)
        allowed = log_p.clone()
        allowed[:, list(never)] = -torch.inf
        if keys:
            ordered = allowed.softmax(dim=-1).sort(descending=True)
            before = ordered.values.cumsum(dim=-1) - ordered.values
            cut = (before >= 0.9).scatter(1, ordered.indices, before >= 0.9)
            allowed = allowed.masked_fill(cut, -torch.inf).log_softmax(dim=-1)
        wanted = allowed.topk(head).values
        ids, found = _heads(sample, head)
        assert torch.equal(found > -torch.inf, wanted > -torch.inf)
        known = found > -torch.inf
        torch.testing.assert_close(found[known], wanted[known], rtol=0, atol=1e-5)
        own = allowed.gather(1, ids)[known]
        torch.testing.assert_close(found[known], own, rtol=0, atol=1e-5)
