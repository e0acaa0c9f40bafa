"""The section `dpo`: which loss trains a policy on preference pairs, and its numbers.

It knows no other section. What a loss computes is said in `rl.preference`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mrlhf.config.fields import Positive, Section, Switch
from mrlhf.rl.names import PairLossName


class DPOSection(Section):
    """The loss on preference pairs."""

    switches = (
        Switch(
            "loss_type",
            lambda name: name == "ipo",
            ("label_smoothing",),
            "is ipo",
            "use sigmoid",
        ),
    )

    loss_type: PairLossName = Field(
        "sigmoid",
        description="sigmoid: DPO, and conservative DPO with label_smoothing; ipo: IPO, with "
        "log-ratios averaged over the tokens of a response",
    )
    beta: Positive = Field(
        0.1,
        description="how strongly the policy is held to the reference; sigmoid: factor of the "
        "log-ratios; ipo: they are drawn 1 / (2 beta) nats a token apart",
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.0,
        description="sigmoid: fraction of the pairs that are taken to be the wrong way round",
    )
