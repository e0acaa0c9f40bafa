"""Losses on preference pairs against numbers worked out by hand, and what is reported of pairs."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrlhf.rl.preference import (
    PAIR_LOSSES,
    PairLogprobs,
    PairLossOptions,
    ScoreLossOptions,
    ipo_loss,
    measure_pairs,
    online_dpo,
    score_loss,
    sigmoid_loss,
)

REFERENCE = torch.tensor([[-11.0, -11.5], [-5.5, -4.0]], dtype=torch.float64)
# The log-ratios are 1, -1/2 of the first pair, and 1/2, 1 of the second.
POLICY = torch.tensor([[-10.0, -12.0], [-5.0, -3.0]], dtype=torch.float64)
TOKENS = torch.tensor([[4, 2], [5, 1]])
PAIRS = PairLogprobs(POLICY, REFERENCE, TOKENS)

# A reward model's scores of the chosen and the rejected responses; they differ by 3/2 and -1.
SCORES = torch.tensor([[1.0, -0.5], [-0.5, 0.5]])
MARGINS = torch.tensor([0.75, -0.75])


def test_sigmoid_by_hand() -> None:
    # The margins are 3/4 and -1/4, and log(1 + e^-margin) of them is:
    loss = sigmoid_loss(PAIRS, PairLossOptions(beta=0.5, label_smoothing=0.0))
    assert loss.tolist() == pytest.approx([0.3868711, 0.8259394], abs=1e-6)

    # 0.9 of that, and 0.1 of the same with the sides exchanged: 1.1368711 and 0.5759394.
    smoothed = sigmoid_loss(PAIRS, PairLossOptions(beta=0.5, label_smoothing=0.1))
    assert smoothed.tolist() == pytest.approx([0.4618711, 0.8009394], abs=1e-6)


def test_ipo_by_hand() -> None:
    # The averages are 1/4, -1/4 and 1/10, 1; they are drawn 1 apart.
    loss = ipo_loss(PAIRS, PairLossOptions(beta=0.5, label_smoothing=0.0))
    assert loss.tolist() == pytest.approx([0.25, 3.61], abs=1e-6)
    near = ipo_loss(PAIRS, PairLossOptions(beta=1.0, label_smoothing=0.0))
    assert near.tolist() == pytest.approx([0.0, 1.96], abs=1e-6)


def test_a_policy_that_is_the_reference() -> None:
    same = PairLogprobs(REFERENCE, REFERENCE, TOKENS)
    for smoothing in (0.0, 0.2):
        options = PairLossOptions(beta=0.1, label_smoothing=smoothing)
        assert sigmoid_loss(same, options).tolist() == pytest.approx(2 * [math.log(2)])
    assert measure_pairs("ipo", same, options)["rewards/accuracies"].tolist() == [0.0, 0.0]


def test_gradients_by_hand() -> None:
    def gradient(name: str, beta: float) -> Tensor:
        policy = POLICY.clone().requires_grad_()
        pairs = PairLogprobs(policy, REFERENCE, TOKENS)
        measure_pairs(name, pairs, PairLossOptions(beta, 0.0))["loss"].sum().backward()
        return policy.grad

    # -beta x sigmoid(-margin) on the chosen side, and the opposite on the rejected one.
    found = gradient("sigmoid", 0.5)
    wanted = [-0.5 / (1 + math.exp(0.75)), -0.5 / (1 + math.exp(-0.25))]
    assert found[:, 0].tolist() == pytest.approx(wanted, abs=1e-6)
    assert torch.equal(found[:, 0], -found[:, 1])

    # 2 x (difference - 1) over the tokens of the side: 2 x -0.5 / 4, ...
    ipo = gradient("ipo", 0.5)
    assert ipo.flatten().tolist() == pytest.approx([-0.25, 0.5, -0.76, 3.8], abs=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_advantages_of_drawn_pairs_have_the_gradient_of_the_pairs_loss(name: str) -> None:
    generator = torch.Generator().manual_seed(2)
    policy, reference = torch.randn(2, 8, 5, generator=generator) - 2
    mask = torch.arange(5) < torch.tensor([5, 3, 1, 4, 2, 5, 4, 3])[:, None]
    rewards = torch.zeros(8, 5)
    rewards[:, 0] = torch.tensor([1.0, 3.0, 3.0, 0.5, 2.0, 2.0, 0.0, 7.0])
    groups = torch.tensor([4, 4, 4, 4, 9, 9, 2, 2])  # of the second all scores are equal
    options = PairLossOptions(beta=0.5, label_smoothing=0.0)

    weights = policy.clone().requires_grad_()
    losses = []
    for chosen, rejected in ((1, 3), (7, 6)):
        sides = [(weights[row, mask[row]], reference[row, mask[row]]) for row in (chosen, rejected)]
        sums = [(own.double().sum() - other.double().sum()) for own, other in sides]
        if name == "sigmoid":
            losses.append(-logsigmoid(0.5 * (sums[0] - sums[1])))
        else:
            means = [total / len(own) for total, (own, _) in zip(sums, sides, strict=True)]
            losses.append((means[0] - means[1] - 1).square())
    (sum(losses) / 2).backward()

    advantages, returns = online_dpo(
        rewards, mask, groups, (policy, reference), partial(PAIR_LOSSES[name], options=options)
    )
    assert torch.equal(advantages, returns)
    # `seq-mean-token-sum` of `gpg`: -advantage x log-probability, over 8 responses.
    torch.testing.assert_close(-advantages / 8, weights.grad, rtol=1e-5, atol=1e-7)
    equal = online_dpo(rewards * 0, mask, groups, (policy, reference), PAIR_LOSSES["ipo"])
    assert not equal[0].any()


def test_advantages_of_a_drawn_pair_by_hand() -> None:
    # Beta 0.5 and log-ratios 1 and -1/2: the weight is 0.5 / (1 + e^0.75), for one pair of two.
    mask = torch.tensor([[True, True], [True, False]])
    policy = torch.tensor([[-4.0, -6.0], [-12.0, 0.0]])
    reference = torch.tensor([[-5.0, -6.0], [-11.5, 0.0]])
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    loss = partial(sigmoid_loss, options=PairLossOptions(beta=0.5, label_smoothing=0.0))
    found, _ = online_dpo(rewards, mask, torch.tensor([0, 0]), (policy, reference), loss)
    weight = 2 * 0.5 / (1 + math.exp(0.75))
    assert found.flatten().tolist() == pytest.approx([weight, weight, -weight, 0.0], abs=1e-6)


def test_small_differences_of_long_responses_are_kept() -> None:
    far = torch.tensor([[-80_000.0, -80_000.0]], dtype=torch.float64)
    near = far + torch.tensor([[1e-3, 0.0]], dtype=torch.float64)
    pairs = PairLogprobs(near, far, torch.tensor([[9000, 9000]]))
    assert pairs.log_ratios.tolist() == [[pytest.approx(1e-3, rel=1e-6), 0.0]]


def test_what_is_reported() -> None:
    measured = measure_pairs("sigmoid", PAIRS, PairLossOptions(beta=0.5, label_smoothing=0.0))
    reported = {name: numbers.tolist() for name, numbers in measured.items() if name != "loss"}
    assert reported == {
        "rewards/chosen": [0.5, 0.25],
        "rewards/rejected": [-0.25, 0.5],
        "rewards/margins": [0.75, -0.25],
        "rewards/accuracies": [1.0, 0.0],
        "logps/chosen": [-10.0, -5.0],
        "logps/rejected": [-12.0, -3.0],
    }
    # The rewards are of whole responses with IPO too.
    ipo = measure_pairs("ipo", PAIRS, PairLossOptions(beta=0.5, label_smoothing=0.0))
    assert ipo["rewards/margins"].tolist() == [0.75, -0.25]


def test_a_reward_models_loss_by_hand() -> None:
    def loss(margins: Tensor | None, centring: float, smoothing: float) -> list[float]:
        return score_loss(SCORES, margins, ScoreLossOptions(centring, smoothing)).tolist()

    # log(1 + e^-1.5) and log(1 + e^1).
    assert loss(None, 0.0, 0.0) == pytest.approx([0.2014133, 1.3132617], abs=1e-6)
    # log(1 + e^-0.75) and log(1 + e^0.25).
    assert loss(MARGINS, 0.0, 0.0) == pytest.approx([0.3868711, 0.8259394], abs=1e-6)
    # Of the first loss 0.9, and 0.1 of 1.7014133 and 0.3132617.
    assert loss(None, 0.0, 0.1) == pytest.approx([0.3514133, 1.2132617], abs=1e-6)
    # The scores' sums are 1/2 and 0.
    assert loss(None, 0.4, 0.0) == pytest.approx([0.3014133, 1.3132617], abs=1e-6)
    # The second loss smoothed as above, with 0.1 for the sum of the first pair.
    assert loss(MARGINS, 0.4, 0.1) == pytest.approx([0.5618711, 0.8009394], abs=1e-6)


def test_a_reward_models_gradient_by_hand() -> None:
    scores = SCORES.clone().requires_grad_()
    score_loss(scores, MARGINS, ScoreLossOptions(0.4, 0.1)).sum().backward()
    # 0.1 - sigmoid(-d) with d 3/4 and -1/4, and 2 x 0.4 x the sum of the scores.
    pull = [0.1 - 1 / (1 + math.exp(0.75)), 0.1 - 1 / (1 + math.exp(-0.25))]
    wanted = [pull[0] + 0.4, -pull[0] + 0.4, pull[1], -pull[1]]
    assert scores.grad.flatten().tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_reward_models_loss_is_plain_bradley_terry_bit_for_bit_if_nothing_is_set() -> None:
    drawn = torch.randn(64, generator=torch.Generator().manual_seed(3))
    ours, plain = drawn.clone().requires_grad_(), drawn.clone().requires_grad_()
    found = score_loss(ours.view(-1, 2), None, ScoreLossOptions(0.0, 0.0)).sum()
    wanted = -logsigmoid(plain[0::2] - plain[1::2]).sum()
    (found / 32).backward()
    (wanted / 32).backward()
    assert torch.equal(found, wanted) and torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("seed", range(3))
def test_a_reward_models_loss_equals_a_loop_over_pairs(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn((20, 2), generator=generator)
    margins = torch.randn(20, generator=generator)
    centring, smoothing = torch.rand(2, generator=generator).mul(0.4).tolist()

    wanted = []
    for (better, worse), margin in zip(scores.tolist(), margins.tolist(), strict=True):
        right = 1 / (1 + math.exp(-(better - worse - margin)))
        likelihood = (1 - smoothing) * math.log(right) + smoothing * math.log(1 - right)
        wanted.append(-likelihood + centring * (better + worse) ** 2)
    found = score_loss(scores, margins, ScoreLossOptions(centring, smoothing))
    assert found.tolist() == pytest.approx(wanted, rel=1e-4)


def test_ties_by_hand() -> None:
    options = ScoreLossOptions(0.0, 0.0, tie_threshold=math.log(2))
    scores = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [math.log(3), 0.0]])
    ties = torch.tensor([True, True, False])
    # Rao and Kupper with theta 2: of strengths 1, 1 a tie has (4 - 1) / (3 * 3), of strengths 3, 1
    # (4 - 1) * 3 / (5 * 7), and the stronger wins with 3 / 5.
    wanted = [-math.log(1 / 3), -math.log(9 / 35), -math.log(3 / 5)]
    assert score_loss(scores, None, options, ties).tolist() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("threshold", [0.01, 0.5, 3.0])
def test_win_tie_and_loss_are_all_there_is(threshold: float) -> None:
    scores = 4 * torch.randn((20, 2), generator=torch.Generator().manual_seed(3))
    options = ScoreLossOptions(0.0, 0.0, threshold)
    win = score_loss(scores, None, options)
    lose = score_loss(scores.flip(1), None, options)
    tie = score_loss(scores, None, options, torch.ones(20, dtype=torch.bool))
    total = sum((-loss.double()).exp() for loss in (win, lose, tie))
    assert total.tolist() == pytest.approx([1.0] * 20, abs=1e-4)
