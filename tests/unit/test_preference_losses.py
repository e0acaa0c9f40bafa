"""Losses on preference pairs against numbers worked out by hand, and what is reported of pairs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrlhf.rl.preference import PairLogprobs, PairLossOptions, ipo_loss, measure_pairs, sigmoid_loss

REFERENCE = torch.tensor([[-11.0, -11.5], [-5.5, -4.0]], dtype=torch.float64)
# The log-ratios are 1, -1/2 of the first pair, and 1/2, 1 of the second.
POLICY = torch.tensor([[-10.0, -12.0], [-5.0, -3.0]], dtype=torch.float64)
TOKENS = torch.tensor([[4, 2], [5, 1]])
PAIRS = PairLogprobs(POLICY, REFERENCE, TOKENS)


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
