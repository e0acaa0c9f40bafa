"""One rank of the contender "ours" of `train_step.py`: the trainer that `launch/train_ppo.py` runs.

It calls whole steps of the trainer, and whole updates of actor and critic, and nothing below them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from own_trainer import leave, make_trainer, phases_of
from train_step_case import (
    EPOCHS,
    KL_COEF,
    LAMBDA,
    LEARNING_RATE,
    Case,
    read_case,
)
from train_step_turns import Stopwatch, Turns

from mrlhf.inference.base import Request

ROLES = ("actor", "critic", "reference", "reward_model")


def main() -> None:
    """Answer the words `step` and `update`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()

    turns = Turns()
    case = read_case(arguments.case)
    ours = _Ours(case, arguments)
    turns.answer({})

    for word in turns:
        turns.answer(ours.seconds(word))
    leave()


class _Ours:
    """The trainer, and the experience of its last step."""

    def __init__(self, case: Case, arguments: argparse.Namespace) -> None:
        self._trainer = make_trainer(_keys(case, arguments), arguments.set, arguments.case)
        parts = self._trainer.parts

        self._number = 0
        force_lengths(parts.generator.engine, case.response_lengths)
        assert parts.critic is not None
        self._updates = (_Recorded(parts.critic), _Recorded(parts.actor))
        self._step()  # updates need its experience

    def seconds(self, word: str) -> dict[str, Any]:
        """Do what the word says, together with all ranks, and measure it."""
        actions: dict[str, Callable[[], dict[str, float]]] = {
            "step": self._step,
            "update": self._update,
        }
        dist.barrier()
        watch = Stopwatch()
        phases = actions[word]()
        return {"seconds": {word: watch.read()}, "phases": phases}

    def _step(self) -> dict[str, float]:
        """A whole step; returns the seconds of its phases."""
        self._number += 1
        return phases_of(self._trainer.step(self._trainer.begin_step(self._number)))

    def _update(self) -> dict[str, float]:
        """The updates of the last step once more."""
        for update in self._updates:
            update.repeat()
        return {}


class _Recorded:
    """Stands in front of a role's `update`, and can repeat its last call."""

    def __init__(self, role: Any) -> None:
        self._update = role.update
        self._batch: tuple[Any, ...] = ()
        role.update = self

    def __call__(self, experience: Any, cut: Any, *others: Any) -> Any:
        self._batch = (experience, cut)
        return self._update(experience, cut, *others)

    def repeat(self) -> None:
        """The last update from its beginning, on the weights of now."""
        self._update(*self._batch)


def force_lengths(engine: Any, lengths: Sequence[int], **others: Any) -> None:
    """Have each response end after as many tokens as the case says, and nowhere else.

    Args:
        engine: that generates.
        lengths: in tokens.
        others: fields of the sampling that are forced too.
    """
    submit = engine.submit

    def submit_with_lengths(requests: Sequence[Request]) -> None:
        forced = []
        for request in requests:
            length = lengths[request.uid % len(lengths)]
            fields = {"max_tokens": length, "stop_token_ids": (), **others}
            forced.append(replace(request, sampling=replace(request.sampling, **fields)))
        submit(forced)

    engine.submit = submit_with_lengths


def _keys(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """The keys of the configuration."""
    directory = arguments.case
    layout = {
        "tp": arguments.tp,
        "pp": arguments.pp,
        "dtype": case.dtype,
        "micro_batch_tokens": arguments.micro_batch_tokens,
    }
    trained = {
        "ppo_epochs": EPOCHS,
        "ppo_mini_batch_size": case.mini_batch,
        "optim": {"lr": LEARNING_RATE},
    }

    paths = {"actor": "policy", "critic": "critic", "reference": "policy", "reward_model": "reward"}
    roles: dict[str, Any] = {}
    for role in ROLES:
        roles[role] = {"path": str(directory / paths[role]), **layout}
        if role in ("actor", "critic"):
            roles[role] |= trained

    return {
        **roles,
        "seed": 1,
        "reward": {"terms": [{"name": "reward_model"}]},
        "rollout": {"kv_cache_mb": 512},
        "data": {
            "train_files": str(directory / "train.jsonl"),
            "tokenizer": str(directory / "tokenizer"),
            "train_batch_size": len(case.prompts),
            "max_prompt_length": max(case.prompt_lengths),
            "max_response_length": max(case.response_lengths),
            "shuffle": False,
        },
        "algorithm": {
            "lam": LAMBDA,
            "use_kl_in_reward": True,
            "kl_ctrl": {"kl_coef": KL_COEF},
        },
        "trainer": {
            "total_steps": 1000,
            "output_dir": str(directory / "run"),
            "log_samples": 0,
        },
    }


if __name__ == "__main__":
    main()
