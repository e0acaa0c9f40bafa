"""The rules: which sign is which alarm, its likely cause, and the key to change.

A new alarm is one function in `signs`, one line here, and one section of docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from mrlhf.run.alarms import signs
from mrlhf.run.alarms.history import History

Severity = Literal["warning", "error"]
PAGE = "docs/operations.md"


@dataclass(frozen=True)
class Rule:
    """One failure that is known by its sign."""

    name: str  # the alarm; several rules may share it, one for each model
    severity: Severity  # error: the run will most likely be of no use; warning: it may be
    # Returns the message with the numbers while the failure is there, otherwise None.
    sign: Callable[[History], str | None]
    cause: str
    key: str  # the configuration key to change first

    @property
    def link(self) -> str:
        """The section of the page on operating a run."""
        return f"{PAGE}#{self.name.replace('_', '-')}"


# Of each model that trains, its own section and the one of its optimizer.
_SECTIONS = {
    "actor": ("actor", "actor.optim"),
    "critic": ("critic", "critic.optim"),
    "sft": ("model", "optim"),
    "rm": ("model", "optim"),
    "values": ("model", "optim"),
    "dpo": ("model", "optim"),
}

# The key that pulls the policy to the reference, by the metric of its KL.
_PULLS = {
    "actor/reward_kl_penalty": "algorithm.kl_ctrl.kl_coef",
    "actor/kl_loss": "actor.kl_loss_coef",
}
# fmt: off
# Cause and key by what has gone wrong, see `signs.faults`; "" is a run without rewards.
_EXPLOITS = "the policy exploits the reward"
_REMEDIES = {
    "actor/ppo_kl": ("the learning rate is too high", "actor.optim.lr"),
    **{kl: (f"{_EXPLOITS}, and its pull to the reference is weak", key)
       for kl, key in _PULLS.items()},
    "critic/score/mean": (f"{_EXPLOITS}, and nothing holds it near the reference",
                          "algorithm.use_kl_in_reward"),
    "": ("the model learns the training rows by heart", "trainer.total_steps"),
}

# A row a rule: alarm, severity, sign; likely cause; key to change.
RULES: tuple[Rule, ...] = (
    *(Rule("held_out", "error", partial(signs.held_out, fault=fault), cause, key)
      for fault, (cause, key) in _REMEDIES.items()),
    *(Rule("kl_explosion", "error", partial(signs.kl_explosion, fault=fault), *_REMEDIES[fault])
      for fault in ("actor/ppo_kl", *_PULLS)),
    Rule("entropy_collapse", "warning", signs.entropy_collapse,
         "the policy repeats one kind of answer before it has found a better one",
         "actor.entropy_coeff"),
    *(Rule("over_optimisation", "warning", partial(signs.over_optimisation, kl=kl),
           f"{_EXPLOITS}, for instance by longer answers", key)
      for kl, key in _PULLS.items()),
    Rule("value_loss_not_falling", "warning", signs.value_loss_not_falling,
         "the critic learns too slowly or not at all",
         "critic.optim.lr"),
    Rule("clip_fraction", "warning", signs.clip_fraction,
         "the updates of one step are too large together",
         "actor.optim.lr"),
    Rule("engine_mismatch", "error", signs.engine_mismatch,
         "engine and trainer compute in other precisions or with other weights",
         "algorithm.rollout_correction.rollout_is"),
    Rule("truncation", "warning", signs.truncation,
         "the answers need more tokens or turns than they may have, or the policy ends none",
         "data.max_response_length"),
    Rule("equal_scores", "warning", signs.equal_scores,
         "the reward cannot tell the responses apart, or the policy has mastered the task",
         "reward.terms"),
    Rule("equal_groups", "warning", signs.equal_groups,
         "the prompts are too easy or too hard, or there are too few responses to each",
         "algorithm.filter_groups.enable"),
    *(Rule("gradient_spike", "warning", partial(signs.gradient_spike, role=role),
           "a few rows of this batch are unlike the others, or the rate is too high",
           f"{optim}.skip_grad_norm")
      for role, (_, optim) in _SECTIONS.items()),
    *(Rule("zero_learning_rate", "error", partial(signs.zero_learning_rate, role=role),
           "the rate is set to 0, or its decay has ended at 0",
           f"{optim}.lr")
      for role, (_, optim) in _SECTIONS.items()),
    Rule("constant_term", "warning", signs.constant_term,
         "the term cannot tell responses apart, because it always or never applies",
         "reward.terms"),
    Rule("slow_rank", "warning", signs.slow_replica,
         "the machine or device of this rank is slower or shared; look at it first",
         "rollout.max_num_seqs"),
    *(Rule("slow_update", "warning", partial(signs.slow_replica, role=role),
           "a machine or device of this replica is slower or shared; look at it first",
           f"{section}.micro_batch_tokens")
      for role, (section, _) in _SECTIONS.items()),
    Rule("everything_rejected", "error", signs.everything_rejected,
         "the threshold is too narrow for how far the engine is from the trainer",
         "algorithm.rollout_correction.rollout_rs_threshold"),
    Rule("zero_weights", "error", signs.zero_weights,
         "the threshold is too narrow for how far the engine is from the trainer",
         "algorithm.rollout_correction.rollout_is_threshold"),
)
