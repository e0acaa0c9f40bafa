"""The sections for losses on preference pairs: those of a reward model, and DPO.

A section checks its own fields, and knows no model and no data.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from mrlhf.config.fields import Name, NotNegative, Positive, Rows, Section, Texts
from mrlhf.config.reads import read_if
from mrlhf.rl.names import PairLossName, RowKind

_OF_PAIRS = read_if("rows", lambda rows: rows == "pairs", "is not pairs", "use pairs")
_OF_COMPARED = read_if("rows", lambda rows: rows != "targets", "is targets", "use pairs")
_OF_TARGETS = read_if("rows", lambda rows: rows == "targets", "is not targets", "use targets")
_OF_TIES = read_if("tie_column", lambda column: column is not None, "is null", "name a column")


class RewardLossSection(Section):
    """The rows from which a reward model learns, and its loss on them."""

    rows: RowKind = "pairs"
    """pairs: chosen and rejected, Bradley-Terry; rankings: responses, the best first, its mean over
    each two of a prompt; targets: response and one or several numbers, squared error"""
    target_column: Annotated[Texts, _OF_TARGETS] = Field(default_factory=list)
    """column of the rows with the number that the score is to equal, or a list of columns: the
    model has a head for each, which learns from the rows that have a number there"""
    tie_column: Annotated[Name | None, _OF_PAIRS] = None
    """column of the rows with true where neither response is better, else false; null: no ties"""
    tie_threshold: Annotated[Positive, _OF_PAIRS, _OF_TIES] = 0.5
    """Rao-Kupper's log theta: the larger it is, the likelier are ties at equal scores"""
    margin_column: Annotated[Name | None, _OF_PAIRS] = None
    """column of the rows with a number, by how much the chosen response is to score higher than the
    rejected one; null: 0 for all pairs"""
    centring: Annotated[NotNegative, _OF_COMPARED] = 0.0
    """factor of the squared sum of both scores, which keeps scores near 0; 0: off"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), _OF_COMPARED] = 0.0
    """fraction of the pairs that are taken to be the wrong way round"""

    refused: ClassVar[Rows] = {
        "{rows} needs rm.target_column; name the column with the numbers, such as helpfulness": (
            lambda self: self.rows == "targets" and not self.target_column
        ),
        "{target_column} names a column twice; name it once": lambda self: (
            len({*self.target_column}) < len(self.target_column)
        ),
    }


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
