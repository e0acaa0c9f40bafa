"""Runs the PPO scenarios of a test module, in one start of ranks."""

from __future__ import annotations

import pytest

from tests.dist.ppo_runs import Runs, Scenario, run_scenarios


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of all constants of the module that are scenarios."""
    constants = vars(request.module).values()
    scenarios = [constant for constant in constants if isinstance(constant, Scenario)]
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names), "two scenarios have the same name"
    return run_scenarios(tmp_path_factory.mktemp("ppo"), scenarios)
