"""The section of the critic, and the optimizer of a model with a scalar head.

A section checks its own fields. It does not know other sections, models, ranks or files.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from mrlhf.config.fields import Count, Positive, Rows, UpToOne
from mrlhf.config.sections import (
    IF_NORMALISED,
    MUON_OF_ADAPTERS,
    AdaptedSection,
    Divisor,
    OptimSection,
    OwnPromptSection,
    RoleSection,
    RouterSection,
)
from mrlhf.rl.names import LossAggMode


class ScalarOptimSection(OptimSection):
    """The optimizer of a model with a scalar head."""

    head_lr: UpToOne | None = None
    """peak learning rate of the scalar head, with the schedule of lr; a fresh head on trained
    weights may need 100 times theirs; null: as lr"""


class CriticSection(OwnPromptSection, AdaptedSection, RouterSection, RoleSection):
    """The value model.

    It starts from the weights of path, with a fresh scalar head unless they hold one.
    """

    warm_start: Literal["weights", "state"] = "weights"
    """state: begin with the moments and the learning-rate schedule too, from the newest checkpoint
    of the run that wrote path into its directory, in any layout"""
    optim: ScalarOptimSection
    """optimizer"""
    ppo_mini_batch_size: Count = 256
    """prompts in one optimizer step (x rollout.n = samples)"""
    ppo_epochs: Count = 1
    """passes over the batch in each training step"""
    cliprange_value: Positive = 0.5
    """clip distance: a value counts as moved by at most this from the old value"""
    loss_agg_mode: LossAggMode = "token-mean"
    """how the losses of the tokens become one number"""
    loss_scale_factor: Annotated[Divisor | None, IF_NORMALISED] = None
    """divisor of seq-mean-token-sum-norm, tokens; null: data.max_response_length"""

    refused: ClassVar[Rows] = {
        **MUON_OF_ADAPTERS,
        "{warm_start} goes on with a schedule that has begun; set critic.optim.lr_decay_steps to "
        "the training steps of both runs, or {critic.optim.lr_decay_style} to "
        "constant": lambda self: (
            self.warm_start == "state"
            and self.optim.lr_decay_style != "constant"
            and self.optim.lr_decay_steps is None
        ),
    }

    @property
    def agg_mode(self) -> LossAggMode:
        """How the losses of the tokens become one number."""
        return self.loss_agg_mode
