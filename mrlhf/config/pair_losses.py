"""The sections for losses on preference pairs: those of a reward model, and DPO.

A section checks its own fields, and knows no model and no data.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from mrlhf.config.fields import Name, NotNegative, Positive, Rows, Section
from mrlhf.config.reads import read_if
from mrlhf.rl.names import PairLossName


class RewardLossSection(Section):
    """The loss of a reward model on preference pairs, beside Bradley-Terry."""

    margin_column: Name | None = None
    """column of the rows with a number, by how much the chosen response is to score higher than the
    rejected one; null: 0 for all pairs"""
    centring: NotNegative = 0.0
    """factor of the squared sum of both scores, which keeps scores near 0; 0: off"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """fraction of the pairs that are taken to be the wrong way round"""


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

    refused: ClassVar[Rows] = {
        "model.init is random, but DPO compares with the policy that it starts from; set it to "
        "checkpoint, and model.path to a trained policy": lambda model: model.init == "random"
    }
