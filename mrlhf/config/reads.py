"""Facts in the annotation of a key about when the key has an effect.

A fact names the deciding key, and the remedy. `unread` checks the facts of a whole configuration.
This file knows the keys that choose a method, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mrlhf.config.user_code import is_reference

ESTIMATOR = "algorithm.adv_estimator"
LOSS_MODE = "actor.policy_loss.loss_mode"
LOSS_TYPE = "algorithm.rollout_correction.loss_type"


@dataclass(frozen=True)
class KeyPlace:
    """The place of a key: the whole configuration, and the dotted name of the key's section."""

    config: Any
    section: str  # empty for the keys of the configuration itself

    def name(self, key: str) -> str:
        """The dotted name of `key`; a key without a dot is in the same section."""
        return key if "." in key or not self.section else f"{self.section}.{key}"

    def value(self, key: str) -> Any:
        """The value of `key`, named as for `name`."""
        return self.config.value_of(self.name(key))


@dataclass(frozen=True)
class NotRead:
    """The reason why a key has no effect."""

    why: str  # in words that follow "has no effect"
    remedy: str  # how to give the key an effect
    deciders: tuple[str, ...]  # the keys that decide so
    leave: str = ""  # the alternative; "": leave the key at its default


@dataclass(frozen=True)
class ReadIf:
    """A fact about a key; `problem` returns why it has no effect at a place, or None."""

    problem: Callable[[KeyPlace], NotRead | None]


def read_if(
    key: str,
    holds: Callable[[Any], bool] = bool,
    state: str = "is false",
    remedy: str = "turn that on",
) -> ReadIf:
    """A key that is read only if `holds` is true of the value of another `key`.

    Otherwise `state` says what that value is, in words that follow the key's name, and `remedy` how
    to change it. A `key` without a dot is in the same section.
    """

    def problem(place: KeyPlace) -> NotRead | None:
        decider = place.name(key)
        if holds(place.value(key)):
            return None
        return NotRead(f", since {decider} {state}", remedy, (decider,))

    return ReadIf(problem)


def by_estimator(*names: str) -> ReadIf:
    """A key that these advantage estimators read, and every estimator of a user's own."""

    def problem(place: KeyPlace) -> NotRead | None:
        name = place.value(ESTIMATOR)
        if name in names or is_reference(name):
            return None
        own = "an estimator of your own (path/to/file.py:function)"
        use = listed(names or [own], "or")
        return NotRead(f" with {ESTIMATOR} {name}", f"use {use}", (ESTIMATOR,))

    return ReadIf(problem)


def by_loss(*names: str, own: bool = True) -> ReadIf:
    """A key that these policy losses read; `own` says whether a user's own loss does too."""

    def problem(place: KeyPlace) -> NotRead | None:
        name, decider = trained_loss(place.config)
        if name in names or (own and is_reference(name)):
            return None
        return NotRead(f" with {decider} {name}", f"use {listed(names, 'or')}", (decider,))

    return ReadIf(problem)


def trained_loss(config: Any) -> tuple[str, str]:
    """The name of the policy loss that trains the actor, and the key that chooses it."""
    loss_mode = config.actor.policy_loss.loss_mode
    loss = config.algorithm.rollout_correction.trained_loss(loss_mode)
    return loss, LOSS_MODE if loss == loss_mode else LOSS_TYPE


def listed(words: Sequence[str], before_last: str = "and") -> str:
    """The words as a list in a sentence."""
    *others, last = words
    return f"{', '.join(others)} {before_last} {last}" if others else last
