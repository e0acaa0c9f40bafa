"""The launchers run whole on simulated devices, with one rank and with several.

Every rank calls the collectives of the device in the same order, and a run gives the same scores on
every layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_device.client import Devices
from tests.simulated_device.orders import problems

BODIES = "tests.device.programs_here"
STEPS = 2


@dataclass(frozen=True)
class Case:
    """A run: its launcher, ranks, and the keys that it changes."""

    program: str
    ranks: int
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For pytest."""
        return " ".join([self.program, str(self.ranks), *self.keys]).replace("ROOT/", "")


QUICK = Case("ppo", 2, ("actor.tp=2", "actor.dtype=bfloat16", "critic.dtype=bfloat16"))
MIXTURE = (
    "actor.path=ROOT/qwen2-moe",
    "reference.path=ROOT/qwen2-moe-ref",
    "critic.path=ROOT/qwen2-moe-critic",
    "actor.tp=1",
)
CASES = [
    Case("ppo", 1, ("actor.tp=1", "actor.dtype=float32", "critic.dtype=float32")),
    Case("ppo", 2, ("actor.tp=1", "actor.recompute=full", "trainer.async_save=true")),
    Case("ppo", 4, ("actor.tp=2", "actor.pp=2", "critic.cp=2", "rollout.verify_reshard=true")),
    Case("ppo", 2, (*MIXTURE, "actor.ep=2", "critic.dtype=float32")),
    Case("sft", 2),
    Case("critic", 2),
    Case("dpo", 2),
]
MORE = [
    Case("ppo", 2, ("actor.tp=2", "rollout.tp=1", "rollout.enforce_eager=true")),
    Case("ppo", 1, (*MIXTURE, "actor.router_replay=rollout")),
    Case("sft", 1),
    Case("rm", 2),
]


@pytest.fixture(scope="session")
def inputs(device: Devices, make_once: Callable[[str, Any], Path]) -> Path:
    """Models, data and configurations."""
    return make_once(
        "device inputs", lambda folder: device.run(f"{BODIES}:write_inputs", str(folder))
    )


def _run(case: Case, device: Devices, inputs: Path, out: Path) -> list[Any]:
    keys = [key.replace("ROOT", str(inputs)) for key in case.keys]
    arguments = ["--config", str(inputs / f"{case.program}.yaml"), *keys]
    arguments += [f"trainer.output_dir={out}", f"trainer.total_steps={STEPS}"]
    outcomes = device.run(f"{BODIES}:run", case.program, arguments, world_size=case.ranks)
    assert [outcome.code for outcome in outcomes] == [0] * case.ranks
    assert problems([outcome.collectives for outcome in outcomes]) == []
    rows = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == STEPS
    return outcomes


def test_ppo_on_two_devices(device: Devices, inputs: Path, tmp_path: Path) -> None:
    outcomes = _run(QUICK, device, inputs, tmp_path)
    for outcome in outcomes:
        phases = outcome.by_phase
        assert phases["gen"].replays > 0
        assert phases["update_actor"].launched > 0
        assert outcome.peaks["update_actor"] > 0
        assert any(row.where == "device" for row in outcome.collectives)
        # The thread that trains asks the store before the first step alone; others watch it.
        assert {phase for phase, _ in outcome.store} <= {"start"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_programs(case: Case, device: Devices, inputs: Path, tmp_path: Path) -> None:
    _run(case, device, inputs, tmp_path)


@pytest.mark.recipes
@pytest.mark.parametrize("case", MORE, ids=lambda case: case.name)
def test_more_programs(case: Case, device: Devices, inputs: Path, tmp_path: Path) -> None:
    _run(case, device, inputs, tmp_path)
