"""A user's folder with the adapters of configs/recipes/turns/adapters, and episodes with them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mrlhf.environments.host import EnvironmentHost, ToolLimits, describe
from mrlhf.environments.interface import EnvironmentReference, Outcome, Program, ToolCall
from mrlhf.errors import EnvironmentFault
from tests.pages import ROOT

ADAPTERS = ROOT / "configs/recipes/turns/adapters"
Turn = str | list[ToolCall]


class Folder:
    """A user's folder: the adapters, and a file with environments beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for file in ADAPTERS.glob("*.py"):
            shutil.copy(file, path)

    def write(self, text: str) -> None:
        (self.path / "mine.py").write_text(text)

    def reference(self, name: str) -> dict[str, EnvironmentReference]:
        return {"e": EnvironmentReference(f"{self.path}/mine.py:{name}")}

    def program(self, name: str) -> Program:
        return describe(self.reference(name), ToolLimits())["e"]

    def refusal(self, name: str) -> str:
        with pytest.raises(EnvironmentFault) as caught:
            self.program(name)
        return str(caught.value)

    def play(self, name: str, row: dict[str, Any], turns: list[Turn]) -> list[Outcome]:
        """The outcomes of reset, of each turn that was reached, and of the reward."""
        host = EnvironmentHost(self.reference(name), ToolLimits(timeout_s=60.0))
        try:
            host.begin(0, "e", {"uid": 7, "data_source": "mine", "answer": None, **row}, seed=1)
            outcomes = [_outcome(host)]
            for turn in turns:
                if outcomes[-1].failure or outcomes[-1].ended:
                    break
                calls = [] if isinstance(turn, str) else turn
                host.turn(0, turn if isinstance(turn, str) else "", calls)
                outcomes.append(_outcome(host))
            if not outcomes[-1].failure:
                host.ask_reward(0)
                outcomes.append(_outcome(host))
            return outcomes
        finally:
            host.close()


def _outcome(host: EnvironmentHost) -> Outcome:
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = host.poll(10.0)
    (outcome,) = outcomes
    return outcome
