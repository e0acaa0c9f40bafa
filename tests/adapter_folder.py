"""A user's folder with the adapters of configs/recipes/turns/adapters, and episodes with them."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from mrlhf.environments.host import EnvironmentHost, ToolLimits
from mrlhf.environments.interface import EnvironmentReference, Outcome, Program, ToolCall
from mrlhf.errors import EnvironmentFault
from tests.pages import ROOT

ADAPTERS = ROOT / "configs/recipes/turns/adapters"
Turn = str | list[ToolCall]


class Folder:
    """A user's folder: the adapters, and a file with environments beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hosts: dict[str, EnvironmentHost] = {}  # importing a library takes seconds
        self._numbers = count()
        for file in ADAPTERS.glob("*.py"):
            shutil.copy(file, path)

    def write(self, text: str) -> None:
        self.close()
        (self.path / "mine.py").write_text(text)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()
        self._hosts.clear()

    def program(self, name: str) -> Program:
        return self._host(name).programs["e"]

    def refusal(self, name: str) -> str:
        with pytest.raises(EnvironmentFault) as caught:
            self.program(name)
        return str(caught.value)

    def play(self, name: str, row: dict[str, Any], turns: list[Turn]) -> list[Outcome]:
        """The outcomes of reset, of each turn that was reached, and of the reward."""
        host = self._host(name)
        number = next(self._numbers)
        host.begin(number, "e", {"uid": 7, "data_source": "mine", "answer": None, **row}, seed=1)
        outcomes = [_outcome(host)]
        for turn in turns:
            if outcomes[-1].failure or outcomes[-1].ended:
                break
            calls = [] if isinstance(turn, str) else turn
            host.turn(number, turn if isinstance(turn, str) else "", calls)
            outcomes.append(_outcome(host))
        if not outcomes[-1].failure:
            host.ask_reward(number)
            outcomes.append(_outcome(host))
        host.end(number)
        return outcomes

    def _host(self, name: str) -> EnvironmentHost:
        if name not in self._hosts:
            reference = EnvironmentReference(f"{self.path}/mine.py:{name}")
            limits = ToolLimits(timeout_s=60.0)
            self._hosts[name] = EnvironmentHost({"e": reference}, limits)
        return self._hosts[name]


def _outcome(host: EnvironmentHost) -> Outcome:
    outcomes: list[Outcome] = []
    while not outcomes:
        outcomes = host.poll(10.0)
    (outcome,) = outcomes
    return outcome
