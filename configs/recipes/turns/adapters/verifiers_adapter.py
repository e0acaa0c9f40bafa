"""Makes an environment of the library verifiers, before version 0.4, a rollout function.

The library's own loop leads the episode: it asks the client of a model for each turn, and here the
policy answers in the place of that client. So state, tools, stop conditions and rubrics are the
library's. A file of yours beside this one names the environment:

    import verifiers as vf
    from verifiers_adapter import adapt, write_rows

    environment = vf.load_environment("wordle")
    wordle = adapt(environment)

    if __name__ == "__main__":
        write_rows(environment.get_dataset(), "runs/wordle/train.jsonl")
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import verifiers as vf
from chats import Chats, plain

COLUMN = "verifiers"  # of a row of the data: the row of the library's data set


def adapt(environment: vf.Environment) -> Callable[..., Any]:
    """A function for `rollout.environment`; ValueError if the environment cannot be one."""
    members = [environment, *getattr(environment, "envs", ())]
    if any(member.requires_group_rollouts for member in members):
        raise ValueError(
            "its rubric compares the rollouts of a group, but an episode here knows no other; use "
            "reward functions of one rollout"
        )

    async def rollout(engine: Any, row: dict[str, Any], sampling: Any) -> list[Any]:
        if COLUMN not in row:
            raise ValueError(f"the row has no column {COLUMN}; write the data with write_rows")
        chats = Chats(engine)
        policy = _Policy(chats, engine.NoRoom)
        state = await environment.rollout(dict(row[COLUMN]), policy, "policy", {})
        if state["error"] is not None:
            raise state["error"]
        await environment.rubric.score_rollout(state)
        await environment.rubric.cleanup(state)

        trajectories = chats.trajectories
        trajectories[-1].reward = {**(state["metrics"] or {}), "score": state["reward"]}
        return trajectories

    return rollout


def write_rows(dataset: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """Write a data set of the library as data for `data.train_files`."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", encoding="utf-8") as file:
        for row in dataset:
            file.write(json.dumps({"prompt": plain(row["prompt"]), COLUMN: dict(row)}) + "\n")


@vf.Client.register
class _Policy:
    """Stands where the library expects the client of a model."""

    def __init__(self, chats: Chats, no_room: type[Exception]) -> None:
        self._chats = chats
        self._no_room = no_room

    async def get_response(
        self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> vf.Response:
        """What the library calls for a turn."""
        try:
            said, reason = await self._chats.answer(prompt, tools)
        except self._no_room as error:  # the library ends the rollout
            raise vf.OverlongPromptError(str(error)) from None
        message = vf.ResponseMessage(**said, finish_reason=reason, is_truncated=reason == "length")
        return vf.Response(id=uuid.uuid4().hex, created=0, model=model, message=message)
