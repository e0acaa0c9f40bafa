"""The checks that a GPU has to pass, on the simulated device: it gives the CPU's numbers.

`tests/gpu/checks.py` has them. All dtypes, models and options run the code of a GPU here.
"""

from __future__ import annotations

import pytest

from tests.simulated_device.client import Devices

QUICK = ["NCCL at world size 1", "PPO update in bfloat16", "attention within packs"]
OTHERS = [
    "log-probs, entropy, KL, values",
    "log-probs in bfloat16",
    "first ratio is one",
    "PPO update in float32",
    "PPO update by Muon",
    "native engine, CUDA graphs",
    "native engine in bfloat16",
    "reshard",
    "adapters",
]
BODY = "tests.device.checks_here"


def test_every_check_is_run_here(device: Devices) -> None:
    (names,) = device.run(f"{BODY}:names")
    assert sorted(names) == sorted(QUICK + OTHERS)


def test_quick_checks(device: Devices) -> None:
    (found,) = device.run(f"{BODY}:run", QUICK)
    assert list(found) == QUICK
    assert found["PPO update in bfloat16"]["counts"].launched > 1000


@pytest.mark.recipes
def test_other_checks(device: Devices) -> None:
    (found,) = device.run(f"{BODY}:run", OTHERS)
    assert list(found) == OTHERS
    for name in ("native engine, CUDA graphs", "native engine in bfloat16"):
        engine = found[name]["counts"]
        assert engine.captures > 0
        assert engine.replays > engine.captures
