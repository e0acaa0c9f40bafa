"""Losses of a policy on pairs of responses, of which one is preferred: DPO and IPO.

They see the log-probabilities of whole responses under the policy and under a frozen reference.
This file does not know where those come from, nor how pairs were split over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

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
    loss = -logsigmoid(margin)
    if options.label_smoothing == 0:
        return loss
    flipped = -logsigmoid(-margin)
    return (1 - options.label_smoothing) * loss + options.label_smoothing * flipped


def ipo_loss(pairs: PairLogprobs, options: PairLossOptions) -> Tensor:
    """The loss of IPO, with log-ratios averaged over the tokens of a response; [pairs].

    It is https://arxiv.org/abs/2310.12036, equation 17, where beta is called tau.
    """
    # The paper writes sums. As TRL says, its authors have confirmed that they used averages; a sum
    # would make the loss grow with the square of the length.
    averages = pairs.log_ratios / pairs.tokens
    return (averages[:, 0] - averages[:, 1] - 1 / (2 * options.beta)).square()


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
