"""The section `dpo`: the loss that trains a policy on preference pairs, and its numbers.

It knows no other section. `rl.preference` computes the losses.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mrlhf.config.fields import Positive, Section
from mrlhf.config.reads import read_if
from mrlhf.rl.names import PairLossName


class DPOSection(Section):
    """The loss on preference pairs."""

    loss_type: PairLossName = "sigmoid"
    """sigmoid: DPO, and conservative DPO with label_smoothing; ipo: IPO, with log-ratios averaged
    over the tokens of a response"""
    beta: Positive = 0.1
    """how strongly the policy is held to the reference; sigmoid: factor of the log-ratios; ipo:
    they are drawn 1 / (2 beta) nats a token apart"""
    label_smoothing: Annotated[
        float,
        Field(ge=0, lt=0.5),
        read_if("loss_type", lambda name: name != "ipo", "is ipo", "use sigmoid"),
    ] = 0.0
    """sigmoid: fraction of the pairs that are taken to be the wrong way round"""
