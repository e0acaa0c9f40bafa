"""The progress of a PPO step, so that a step that was interrupted can go on.

It does not know how a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from mrlhf.batch import Episode, Experience, Prompts
from mrlhf.checkpoint.state_tree import object_from, state_of
from mrlhf.config import PPOConfig
from mrlhf.parallel.machine import Machine
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.scoring import Scores

# The keys that must not change in the middle of a step.
_FIXED = (
    "seed",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "actor.router_replay",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.top_p",
    "rollout.stop",
    "rollout.stop_token_ids",
    "rollout.max_turns",
    "rollout.max_turn_tokens",
    "rollout.partial.over",
    "rollout.partial.max_versions",
    "rollout.partial.turn_cost",
)


@dataclass
class StepProgress:
    """The results of a training step so far; the same on every rank."""

    number: int  # of the step, from 1
    # The trainer's state when the step began; what is large in it is not copied.
    before: Mapping[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    collected: Collected | None = None
    # Made of `collected`. Once it is set, the models may change.
    experience: Experience | None = None
    # The progress of the critic's update.
    critic: UpdateProgress = field(default_factory=UpdateProgress)
    # The progress of the actor's update.
    actor: UpdateProgress = field(default_factory=UpdateProgress)
    updated: list[str] = field(default_factory=list)  # the roles whose update is complete
    # Of the distribution of each token, float32 [batch, response_len], kept only if it is to be
    # written down; it is lost if the step is interrupted.
    entropy: Tensor | None = None

    @property
    def version(self) -> int:
        """The version of the policy that draws the samples of the step."""
        return self.number - 1

    def end_update(self, role: str, metrics: Mapping[str, float]) -> None:
        """Take note that the update of `role` is complete."""
        self.metrics |= metrics
        self.updated.append(role)

    def state_dict(self) -> dict[str, Any]:
        """The data that the rest of the step needs; prompts are named by their uid."""
        assert self.collected is not None and self.experience is not None
        experience = state_of(self.experience)
        experience["rollout"]["prompts"] = self.experience.rollout.prompts.uid

        collected = state_of(self.collected)
        del collected["rollout"]  # it is the experience's
        return {
            "number": self.number,
            "metrics": self.metrics,
            "collected": collected,
            "experience": experience,
            "critic": self.critic.state_dict(),
            "actor": self.actor.state_dict(),
            "updated": self.updated,
        }

    @staticmethod
    def from_state(
        state: Mapping[str, Any], prompts_of: Callable[[Sequence[int]], Prompts], machine: Machine
    ) -> StepProgress:
        """The inverse of `state_dict`; every rank calls it.

        `prompts_of` gives the prompts with these uids.
        """
        rollout = state["experience"]["rollout"]
        prompts = prompts_of(rollout["prompts"])
        if rollout["episodes"] is not None:
            prompts = prompts.begun_as([Episode(**one) for one in rollout["episodes"]])

        def read() -> tuple[Collected, Experience]:
            whole = {**state["experience"], "rollout": {**rollout, "prompts": prompts}}
            experience = object_from(Experience, whole)
            scores = object_from(Scores, state["collected"]["scores"])
            collected = Collected(
                **{**state["collected"], "scores": scores, "rollout": experience.rollout}
            )
            return collected, experience

        collected, experience = machine.compute_on_leader(read, shared=(prompts,))
        return StepProgress(
            number=state["number"],
            before={},
            metrics=dict(state["metrics"]),
            collected=collected,
            experience=experience,
            critic=UpdateProgress.from_state(state["critic"]),
            actor=UpdateProgress.from_state(state["actor"]),
            updated=list(state["updated"]),
        )


def fixed_settings(config: PPOConfig) -> dict[str, Any]:
    """The keys that must not change in the middle of a step, with their values."""
    return {key: attrgetter(key)(config) for key in _FIXED}
