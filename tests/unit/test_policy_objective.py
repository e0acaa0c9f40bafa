"""The loss of a micro-batch in which some response tokens were not drawn or were rejected."""

from __future__ import annotations

import pytest
import torch

from mrlhf.config.sections import ActorSection
from mrlhf.parallel.vocab_sums import TokenNumbers
from mrlhf.rl.correction import Correction
from mrlhf.roles.policy_loss import PolicyBatch, PolicyLossSettings
from mrlhf.roles.policy_objective import PolicyMiniBatch, PolicyObjective

RUBBISH = 1e3
# The update measures entropies in bypass mode alone.
BYPASS = Correction(level=None, lower=None, upper=2.0, normalise=False, criteria=())
THERE = torch.tensor([[True, True, True, True], [True, True, True, False]])
DRAWN = torch.tensor([[True, False, True, True], [True, True, False, False]])
KEPT = torch.tensor([[True, False, False, True], [True, True, False, False]])


def _at_drawn(table: list[list[float]]) -> torch.Tensor:
    """The numbers at drawn tokens, rubbish at the others that are there, 0 after the end."""
    filled = torch.where(DRAWN, torch.tensor(table), RUBBISH)
    return torch.where(THERE, filled, 0.0)


def test_metrics_and_losses_leave_out_what_the_policy_did_not_draw() -> None:
    section = ActorSection(
        path="x",
        loss_agg_mode="token-mean",
        loss_scale_factor=1.0,
        entropy_coeff=0.5,
        positive_lm_coef=2.0,
    )
    logprobs = _at_drawn([[-1.0, 0.0, -2.0, -3.0], [-4.0, -5.0, 0.0, 0.0]]).requires_grad_()
    entropy = _at_drawn([[0.1, 0.0, 0.2, 0.3], [0.4, 0.5, 0.0, 0.0]])
    batch = PolicyBatch(
        drawn=DRAWN,
        mask=KEPT,
        old_logprobs=logprobs.detach(),
        advantages=_at_drawn([[1.0, 0.0, 9.0, 2.0], [3.0, 4.0, 0.0, 0.0]]),
        ref_logprobs=None,
        weights=None,
        right=DRAWN & torch.tensor([[True], [False]]),
        token_weights=KEPT.float(),
    )
    mini_batch = PolicyMiniBatch.of(batch, [], by_token=True)
    objective = PolicyObjective(PolicyLossSettings.named("vanilla", section, BYPASS), mini_batch)
    loss, tally = objective(batch, TokenNumbers(logprobs, entropy, None, None), 1.0)

    metrics = tally.values()
    assert metrics["actor/pg_loss"] == pytest.approx(-(1 + 2 + 3 + 4) / 4)
    assert metrics["actor/entropy"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5) / 5)
    assert metrics["actor/positive_lm_loss"] == pytest.approx((1 + 2 + 3) / 3)
    bonus = 0.5 * (0.1 + 0.3 + 0.4 + 0.5) / 4
    assert float(loss.detach()) == pytest.approx(-2.5 - bonus + 2.0 * 2.0)

    loss.backward()
    assert logprobs.grad is not None
    assert not logprobs.grad[~DRAWN].any()
    assert logprobs.grad[DRAWN].all()  # the rejected token is part of a right response


def test_an_entropy_that_is_only_measured_is_no_part_of_the_loss() -> None:
    section = ActorSection(path="x", loss_scale_factor=1.0, entropy_coeff=0.0)
    logprobs = torch.full((1, 2), -1.0, requires_grad=True)
    entropy = torch.tensor([[0.5, float("inf")]], requires_grad=True)
    there = torch.ones(1, 2, dtype=torch.bool)
    ones = torch.ones(1, 2)
    batch = PolicyBatch(there, there, logprobs.detach(), ones, None, None, None, ones)
    mini_batch = PolicyMiniBatch.of(batch, [], by_token=True)
    objective = PolicyObjective(PolicyLossSettings.named("vanilla", section, BYPASS), mini_batch)
    loss, tally = objective(batch, TokenNumbers(logprobs, entropy, None, None), 1.0)

    # Each of the two tokens has ratio 1 and advantage 1.
    assert float(loss.detach()) == -1.0
    assert tally.values()["actor/entropy"] == float("inf")
    assert torch.autograd.grad(loss, [logprobs, entropy], allow_unused=True)[1] is None
