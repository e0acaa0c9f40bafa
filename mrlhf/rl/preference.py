"""Losses on pairs of responses, of which one is preferred: DPO and IPO of a policy, and
Bradley-Terry of a reward model.

Those of a policy see the log-probabilities of whole responses under it and under a frozen
reference, that of a reward model sees its scores. This file does not know where those come from,
nor how pairs were split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mrlhf.rl.masking import masked_sum, working_dtype
from mrlhf.rl.names import PairLossName


@dataclass(frozen=True)
class PairLogprobs:
    """The log-probabilities of pairs; each field [pairs, 2], the chosen response first."""

    policy: Tensor  # float64, the log-probability of each whole response under the policy, nats
    reference: Tensor  # float64, the same under the reference
    tokens: Tensor  # tokens of each response, at least 1; its end token is one of them

    def __post_init__(self) -> None:
        shapes = {self.policy.shape, self.reference.shape, self.tokens.shape}
        assert len(shapes) == 1 and self.policy.shape[1:] == (2,), shapes

    @property
    def log_ratios(self) -> Tensor:
        """log(policy / reference) of each response, float32 [pairs, 2], taken in float64."""
        return (self.policy - self.reference).float()


@dataclass(frozen=True)
class PairLossOptions:
    """The numbers of the losses."""

    beta: float  # how strongly the policy is held to the reference
    label_smoothing: float  # `sigmoid`: the share of pairs that are taken to be the wrong way round


def sigmoid_loss(pairs: PairLogprobs, options: PairLossOptions) -> Tensor:
    """The loss of DPO, and with label smoothing that of conservative DPO; [pairs].

    DPO is https://arxiv.org/abs/2305.18290, equation 7; conservative DPO is
    https://ericmitchell.ai/cdpo.pdf.
    """
    log_ratios = pairs.log_ratios
    margin = options.beta * (log_ratios[:, 0] - log_ratios[:, 1])
    return _logistic(margin, options.label_smoothing)


def ipo_loss(pairs: PairLogprobs, options: PairLossOptions) -> Tensor:
    """The loss of IPO, with log-ratios averaged over the tokens of a response; [pairs].

    It is https://arxiv.org/abs/2310.12036, equation 17, where beta is called tau.
    """
    # The paper writes sums. As TRL says, its authors have confirmed that they used averages; a sum
    # would make the loss grow with the square of the length.
    averages = pairs.log_ratios / pairs.tokens
    return (averages[:, 0] - averages[:, 1] - 1 / (2 * options.beta)).square()


dpo_loss = partial(sigmoid_loss, options=PairLossOptions(beta=0.1, label_smoothing=0.0))

PairLoss = Callable[[PairLogprobs, PairLossOptions], Tensor]

PAIR_LOSSES: dict[PairLossName, PairLoss] = {"sigmoid": sigmoid_loss, "ipo": ipo_loss}


def measure_pairs(
    name: PairLossName, pairs: PairLogprobs, options: PairLossOptions
) -> dict[str, Tensor]:
    """The loss of each pair, and what TRL reports of it, by TRL's names; [pairs].

    A reward is beta times the log-ratio of a whole response, whichever the loss. A pair counts as
    right in `rewards/accuracies` if its chosen response has the higher reward.
    """
    rewards = options.beta * pairs.log_ratios.detach()
    logprobs = pairs.policy.detach()
    return {
        "loss": PAIR_LOSSES[name](pairs, options),
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/margins": rewards[:, 0] - rewards[:, 1],
        "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).float(),
        "logps/chosen": logprobs[:, 0],
        "logps/rejected": logprobs[:, 1],
    }


def online_dpo(
    rewards: Tensor,
    mask: Tensor,
    prompt_groups: Tensor,
    logprobs: tuple[Tensor, Tensor],
    loss: Callable[[PairLogprobs], Tensor],
) -> tuple[Tensor, Tensor]:
    """Advantages of DPO on drawn pairs, https://arxiv.org/abs/2402.04792; [batch, response_len].

    A pair are the best and the worst response to a prompt, of equals the first; prompts with equal
    scores have none. Minus the advantages times the log-probabilities, summed over a response and
    averaged over responses, has the gradient of the mean loss of the pairs. The returns are equal.

    `logprobs` are those of the policy that drew the responses, and of the reference.
    """
    scores = masked_sum(rewards.double(), mask, dim=1)
    groups = [(prompt_groups == number).nonzero()[:, 0] for number in prompt_groups.unique()]
    both = [(rows[scores[rows].argmax()], rows[scores[rows].argmin()]) for rows in groups]
    pairs = torch.tensor([[*pair] for pair in both if scores[pair[0]] > scores[pair[1]]])
    if len(pairs) == 0:
        return 2 * (torch.zeros_like(rewards, dtype=working_dtype(rewards)),)

    with torch.enable_grad():
        policy = logprobs[0].detach().double().requires_grad_()
        own, other = (masked_sum(x.double(), mask, dim=1)[pairs] for x in (policy, logprobs[1]))
        tokens = mask.sum(dim=1).clamp(min=1)  # a failed episode has drawn none
        mean = loss(PairLogprobs(own, other, tokens[pairs])).mean()
        gradient = torch.autograd.grad(mean, policy)[0].to(working_dtype(rewards))
    return -len(scores) * gradient, -len(scores) * gradient


@dataclass(frozen=True)
class ScoreLossOptions:
    """The numbers of the loss of a reward model; with 0 for all it is plain Bradley-Terry."""

    centring: float  # factor of the square of the sum of both scores
    label_smoothing: float  # the share of pairs that are taken to be the wrong way round
    tie_threshold: float = 0.0  # log theta of Rao and Kupper, above 0 where pairs may be ties


def score_loss(
    scores: Tensor,
    margins: Tensor | None,
    options: ScoreLossOptions,
    ties: Tensor | None = None,
) -> Tensor:
    """The loss of a reward model on pairs; float32 [pairs].

    With r_c and r_r for the scores of the chosen and the rejected response, d = r_c - r_r - margin,
    smoothing e and threshold t, it is

        -(1 - e) log sigmoid(d - t) - e log sigmoid(-d - t) + centring (r_c + r_r)^2

    and for a tie, with d = r_c - r_r, the first two terms are -log of what is left for it,

        1 - sigmoid(d - t) - sigmoid(-d - t) = (1 - exp(-2 t)) sigmoid(t - d) sigmoid(t + d)

    Bradley-Terry is https://arxiv.org/abs/2203.02155, equation 1, with one pair for each
    comparison; the margin is https://arxiv.org/abs/2307.09288, equation 2; centring is
    https://arxiv.org/abs/2312.09244, equation 2; smoothing is that of
    https://ericmitchell.ai/cdpo.pdf. Ties are those of Rao and Kupper,
    https://doi.org/10.1080/01621459.1967.10482901, whose theta is exp(t).

    Args:
        scores: float32 [pairs, 2], those of the chosen responses first.
        margins: float32 [pairs], by how much the chosen response is to score higher; None: 0.
        options: the numbers of the loss.
        ties: bool [pairs], whether neither response is better; None: no pair is a tie.
    """
    assert scores.shape[1:] == (2,), scores.shape
    differences = scores[:, 0] - scores[:, 1]
    apart = differences if margins is None else differences - margins
    threshold = options.tie_threshold
    loss = _logistic(apart, options.label_smoothing, threshold)
    if ties is not None:
        near = -logsigmoid(threshold - differences) - logsigmoid(threshold + differences)
        loss = torch.where(ties, near - math.log(-math.expm1(-2 * threshold)), loss)
    if options.centring == 0:
        return loss
    return loss + options.centring * scores.sum(dim=1).square()


def _logistic(margin: Tensor, smoothing: float, threshold: float = 0.0) -> Tensor:
    """-log sigmoid(margin - threshold); of the share `smoothing`, with the negative margin."""
    loss = -logsigmoid(margin - threshold)
    if smoothing == 0:
        return loss
    return (1 - smoothing) * loss + smoothing * -logsigmoid(-margin - threshold)
