"""The sections of models that do not change: reward models, and a judge.

A section checks its own fields, and knows no model and no rank.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mrlhf.config.fields import Files, Number, Positive, Rows, Tokens
from mrlhf.config.reads import KeyPlace, NotRead, ReadIf, read_if
from mrlhf.config.sections import OffloadFrozen, Recompute, RoleSection
from mrlhf.rl.names import Combine

_IF_ENSEMBLE = read_if("ensemble", bool, "is empty", "name further reward models there")


def _without_backward(place: KeyPlace) -> NotRead:
    """The recomputation of a model that is not trained."""
    return NotRead(", since the model has no backward pass", "set that of one that trains", ())


class FrozenSection(RoleSection):
    """A model that does not change."""

    recompute: Annotated[Recompute, ReadIf(_without_backward)] = "none"
    """activations that are computed again in the backward pass instead of kept"""
    offload: OffloadFrozen = Field(default_factory=list)
    """what waits on the host while no phase needs it"""


class RewardModelSection(FrozenSection):
    """A frozen classifier (score.weight) that scores responses, or their steps."""

    heads: dict[str, Number] = Field(default_factory=dict)
    """weights of the labels of a model with several, whose sum is the score; empty: it has one"""
    ensemble: Files = Field(default_factory=list)
    """further reward models, as path, which score too; all have this section's layout"""
    combine: Annotated[Combine, _IF_ENSEMBLE] = "mean"
    """how the scores of path and ensemble become one; mean_minus_std, mean_minus_variance: less
    combine_coef times how much they differ"""
    combine_coef: Annotated[
        Positive,
        _IF_ENSEMBLE,
        read_if("combine", lambda name: "minus" in name, "takes nothing off", "use mean_minus_std"),
    ] = 1.0
    """factor of the standard deviation or variance over the models"""
    normalise: Literal["none", "reference"] = "none"
    """reference: each model's mean score of the reference answers of data.train_files is measured
    before its first score, and taken off all of its scores; algorithm.reward_norm normalises the
    sum of the terms instead"""
    at: Annotated[str, Field(min_length=1)] | None = None
    """text that ends a step of a response: the output at each token that holds it is a reward of
    that token, and their sum is the response's score; null: it scores whole responses"""

    refused: ClassVar[Rows] = {
        "{normalise} shifts the scores of whole responses, and {at} scores their steps; leave one "
        "of them out": lambda self: self.is_shifted and self.at is not None,
        "{normalise} shifts all scores alike, and {algorithm.reward_norm} takes that off again; "
        "leave one of them out": lambda self, algorithm: (
            self.is_shifted and algorithm.reward_norm is not None
        ),
    }

    @property
    def is_shifted(self) -> bool:
        """Whether the mean score of the reference answers becomes 0."""
        return self.normalise == "reference"


_OF_PASSES = ("cp", "micro_batch_tokens", "share_prompts")


class JudgeModelSection(FrozenSection):
    """A frozen language model that judges on the ranks; its engine has the sizes of `rollout`."""

    max_prompt_tokens: Tokens = 4096
    """most tokens of a message to it; a longer one gets no verdict"""

    refused: ClassVar[Rows] = {
        "{section}.{key} has no effect, since an engine answers; leave it out": lambda self: [
            {"key": key}
            for key in _OF_PASSES
            if self.value_of(key) != type(self).model_fields[key].default
        ]
    }
