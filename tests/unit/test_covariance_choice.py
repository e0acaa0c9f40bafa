"""The choice of tokens by covariance, against hand-computed numbers and a slow loop."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrlhf.rl.policy_losses import (
    PolicyLossInputs,
    PolicyLossOptions,
    clip_cov_excluded,
    select_by_covariance,
)
from tests.masks import masks


def test_covariances_of_the_worked_example():
    # Means -2 and 0 over the mask: covariances 1, 0, 1; the fourth token does not count.
    logprob = torch.tensor([[-1.0, -2.0, -3.0, 50.0]])
    advantages = torch.tensor([[1.0, 0.0, -1.0, 50.0]])
    mask = torch.tensor([[True, True, True, False]])

    def chosen(fraction, bounds=None, excluded=None):
        excluded = None if excluded is None else torch.tensor([excluded])
        selected = select_by_covariance(logprob, advantages, mask, fraction, bounds, excluded)
        return selected.tolist()[0]

    # A fraction of nothing is still one token; of equal covariances the first.
    assert chosen(0.0002) == [True, False, False, False]
    assert chosen(0.7) == [True, False, True, False]
    assert chosen(1.0) == [True, True, True, False]
    assert chosen(0.7, bounds=(0.5, 1.5)) == [True, False, True, False]
    assert chosen(0.7, bounds=(-0.5, 0.5)) == [False, True, False, False]
    # Bounds are strict.
    assert chosen(0.7, bounds=(1.0, 5.0)) == [False] * 4
    assert chosen(0.7, bounds=(0.5, 1.0)) == [False] * 4
    assert chosen(0.4, excluded=[True, False, False, False]) == [False, False, True, False]


def test_no_gradient_flows_into_the_choice():
    logprob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    everything = torch.ones(1, 2, dtype=torch.bool)
    assert not select_by_covariance(
        logprob, torch.tensor([[1.0, 0.0]]), everything, 0.5, None, None
    ).requires_grad


@settings(max_examples=60)
@given(
    mask=masks(),
    seed=st.integers(0, 1000),
    fraction=st.sampled_from([0.0002, 0.3, 0.5, 1.0]),
    bounds=st.sampled_from([None, (-0.1, 0.3), (0.0, 5.0)]),
    excludes=st.booleans(),
)
def test_the_choice_equals_the_slow_loop(mask, seed, fraction, bounds, excludes):
    generator = torch.Generator().manual_seed(seed)
    logprob = -2 * torch.rand(mask.shape, dtype=torch.float64, generator=generator)
    advantages = torch.randn(mask.shape, dtype=torch.float64, generator=generator)
    advantages = advantages.round()  # so that some are equal
    excluded = torch.rand(mask.shape, generator=generator) < 0.4 if excludes else None

    places = [(i, t) for i in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[i, t]]
    expected = torch.zeros_like(mask)
    if places:
        mean_a = sum(advantages[p].item() for p in places) / len(places)
        mean_logp = sum(logprob[p].item() for p in places) / len(places)
        ranked = []
        for place in places:
            covariance = (advantages[place].item() - mean_a) * (logprob[place].item() - mean_logp)
            inside = bounds is None or bounds[0] < covariance < bounds[1]
            if inside and not (excludes and excluded[place]):
                ranked.append((-covariance, place))
        for _, place in sorted(ranked)[: max(1, int(fraction * len(places)))]:
            expected[place] = True

    logprob = logprob.masked_fill(~mask, math.nan)
    advantages = advantages.masked_fill(~mask, math.nan)
    selected = select_by_covariance(logprob, advantages, mask, fraction, bounds, excluded)
    assert torch.equal(selected, expected)


def test_tokens_that_the_clip_takes_are_not_chosen():
    # Ratios e^.5, e^.5, e^-.5, e^-.5, 1: the clip takes a rise with A > 0 and a fall with A < 0.
    logprob, old = torch.tensor(
        [[[-1.5, -1.5, -2.0, -2.0, -1.0]], [[-2.0, -2.0, -1.5, -1.5, -1.0]]]
    )
    mask = torch.tensor([[True, True, True, True, True]])
    inputs = PolicyLossInputs(logprob, old, torch.tensor([[0.5, -0.5, 0.5, -0.5, 0.5]]), mask)
    assert clip_cov_excluded(inputs, PolicyLossOptions()).tolist() == [
        [True, False, False, True, False]
    ]
    mask[0, 0] = False
    assert clip_cov_excluded(inputs, PolicyLossOptions()).tolist() == [
        [False, False, False, True, False]
    ]
