"""How far the step of a run has come, and how a checkpoint keeps it, so that it goes on exactly.

| state | what has happened | a checkpoint holds |
|---|---|---|
| `Between` | the last step is complete, or none has begun | the state of the parts |
| `Drawing` | a step has begun, and no model has changed | their state when it began; its samples |
| `Updating` | the models may have changed | the state of the parts; the results of the step |

`saved_state` writes all three and `restore` reads them. No other file knows the keys of a
checkpoint's state of a step. This file does not know how a step is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Episode, Experience, Prompts
from mrlhf.checkpoint.restorer import Checkpoint
from mrlhf.checkpoint.state_tree import object_from, state_of
from mrlhf.config import PPOConfig
from mrlhf.errors import CheckpointError
from mrlhf.parallel.machine import Machine
from mrlhf.roles.update_progress import UpdateProgress
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.exchange import DrawnSamples
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.partial import warn_of_dropped
from mrlhf.trainers.ppo.setup import PPOParts

logger = logging.getLogger(__name__)

TEACHER = "teacher"  # directory of a checkpoint that holds an earlier actor
# The keys that must not change in the middle of a step.
_FIXED = (
    "seed",
    "data.train_batch_size",
    "data.gen_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_mini_batch_size",
    "critic.ppo_mini_batch_size",
    "critic.template",
    "actor.router_replay",
    "rollout.n",
    "rollout.temperature",
    "rollout.top_k",
    "rollout.top_p",
    "rollout.min_p",
    "rollout.topk_log_probs",
    "algorithm.rollout_correction.score_centering",
    "rollout.stop",
    "rollout.stop_token_ids",
    "rollout.max_turns",
    "rollout.max_turn_tokens",
    "rollout.partial.over",
    "rollout.partial.max_versions",
    "rollout.partial.turn_cost",
)


@dataclass(frozen=True)
class Between:
    """No step has begun since the last one was complete."""


@dataclass
class BegunStep:
    """A step that has begun; the same on every rank."""

    number: int  # from 1
    metrics: dict[str, float]  # of the phases so far

    @property
    def version(self) -> int:
        """The version of the policy that draws the samples of the step."""
        return self.number - 1


@dataclass
class Drawing(BegunStep):
    """No model has changed in the step, so it can begin again, with the samples that it has.

    The generator holds these.
    """

    before: Mapping[str, Any]  # the state of the parts when the step began

    @staticmethod
    def begin(number: int, parts: PPOParts) -> Drawing:
        """Step `number`, counted from 1, in which nothing has happened yet."""
        epoch = parts.sampler.epoch
        metrics: dict[str, float] = {"training/global_step": number, "training/epoch": epoch}
        return Drawing(number, metrics, parts_state(parts))


@dataclass
class Updating(BegunStep):
    """The experience is made, so the models may have changed."""

    collected: Collected
    experience: Experience
    # Of the distribution of each token, float32 [batch, response_len], kept only if it is to be
    # written down; it is lost if the step is interrupted.
    entropy: Tensor | None = None
    critic: UpdateProgress = field(default_factory=UpdateProgress)
    actor: UpdateProgress = field(default_factory=UpdateProgress)
    updated: list[str] = field(default_factory=list)  # the roles whose update is complete

    def end_update(self, role: str, metrics: Mapping[str, float]) -> None:
        """Take note that the update of `role` is complete."""
        self.metrics |= metrics
        self.updated.append(role)

    def state_dict(self) -> dict[str, Any]:
        """The data that the rest of the step needs; prompts are named by their uid."""
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
    ) -> Updating:
        """The inverse of `state_dict`; every rank calls it.

        `prompts_of` gives the prompts with these uids.
        """
        rollout = state["experience"]["rollout"]
        prompts = prompts_of(rollout["prompts"])
        if rollout["episodes"] is not None:
            prompts = prompts.begun_as([Episode(**facts) for facts in rollout["episodes"]])

        def read() -> tuple[Collected, Experience]:
            whole = {**state["experience"], "rollout": {**rollout, "prompts": prompts}}
            experience = object_from(Experience, whole)
            collected = {**state["collected"], "rollout": experience.rollout}
            return object_from(Collected, collected), experience

        collected, experience = machine.compute_on_leader(read, shared=(prompts,))
        return Updating(
            state["number"],
            dict(state["metrics"]),
            collected,
            experience,
            critic=UpdateProgress.from_state(state["critic"]),
            actor=UpdateProgress.from_state(state["actor"]),
            updated=list(state["updated"]),
        )


StepState = Between | Drawing | Updating


def saved_state(step: StepState, parts: PPOParts, config: PPOConfig) -> tuple[dict[str, Any], bool]:
    """The state of the run for a checkpoint, and whether it holds a part of a step."""
    if isinstance(step, Between):
        return parts_state(parts), False
    settings = {"settings": _fixed_settings(config)}
    if isinstance(step, Drawing):
        drawn = drawn_state(parts.generator)
        return {**step.before, "drawn": drawn, **settings}, bool(drawn)
    return {**parts_state(parts), "progress": step.state_dict(), **settings}, True


def restore(
    state: Mapping[str, Any], checkpoint: Checkpoint, parts: PPOParts, config: PPOConfig
) -> StepState:
    """Go on from a state that `saved_state` gave; every rank calls it.

    Raises:
        CheckpointError: a key has changed that must not change within an update.
        DataError: it is of a run with other data.
    """
    _restore_parts(parts, state)
    if parts.earlier is not None:
        parts.earlier.load(checkpoint.path / TEACHER)
    settings = _fixed_settings(config)
    if "progress" in state:
        for key, value in state["settings"].items():
            if settings[key] != value:
                raise CheckpointError(
                    f"{checkpoint.path} was saved in the middle of a step, in which {key} was "
                    f"{value} and not {settings[key]}; restore it, or go on from the checkpoint "
                    "before"
                )
        machine = parts.generator.machine
        return Updating.from_state(state["progress"], parts.inputs.prompts.with_uids, machine)
    if "drawn" not in state:
        return Between()

    if state["settings"] == settings:
        load_drawn_state(parts.generator, state["drawn"])
    elif dist.get_rank() == 0:
        logger.warning("sampling has changed, so all responses of the step are drawn again")
    return Drawing.begin(checkpoint.manifest.step + 1, parts)


def parts_state(parts: PPOParts) -> dict[str, Any]:
    """The state of all parts but the models, between two steps; large tables are not copied."""
    reward_model = parts.scorer.reward_model
    return {
        "sampler": parts.sampler.state_dict(),
        "kl_controller": parts.kl_controller.state_dict(),
        "shaper": parts.shaper.state_dict(),
        "response_lengths": parts.generator.state_dict(),
        "reference_means": reward_model and reward_model.reference_means,
        "begun": {} if parts.partial is None else parts.partial.state_dict(),
    }


def _restore_parts(parts: PPOParts, state: Mapping[str, Any]) -> None:
    parts.sampler.load_state_dict(state["sampler"])
    parts.kl_controller.load_state_dict(state["kl_controller"])
    parts.shaper.load_state_dict(state["shaper"])
    parts.generator.load_state_dict(state["response_lengths"])
    if parts.scorer.reward_model is not None:
        parts.scorer.reward_model.reference_means = state.get("reference_means")
    begun = state.get("begun", {})
    if parts.partial is not None:
        parts.partial.load_state_dict(begun, parts.inputs.prompts.with_uids)
    else:
        warn_of_dropped(begun)


def drawn_state(generator: Generator) -> dict[str, Any]:
    """The samples of this step; those that have ended are not drawn again."""
    return {name: drawn.state_dict for name, drawn in generator.drawn.items()}


def load_drawn_state(generator: Generator, state: Mapping[str, Any]) -> None:
    """Take over samples that `drawn_state` returned."""
    for name, drawn in state.items():
        read = partial(DrawnSamples.from_state, drawn)
        generator.drawn[name] = generator.machine.compute_on_leader(read)


def _fixed_settings(config: PPOConfig) -> dict[str, Any]:
    return {key: attrgetter(key)(config) for key in _FIXED}
