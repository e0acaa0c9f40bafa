"""The learning-rate schedules of the roles, against literal rates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mrlhf.config.sections import OptimSection
from mrlhf.training.optimizer import learning_rate_schedule


def _rates(updates: int, **keys: Any) -> list[float]:
    section = OptimSection(lr=1.0, **keys)
    # As megatron-core's optimizer makes them: the scheduler reads both bounds from the group.
    group = {"max_lr": section.lr, "min_lr": section.lr * section.min_lr_ratio}
    scheduler = learning_rate_schedule(SimpleNamespace(param_groups=[group]), section, updates)
    rates = []
    for _ in range(updates):
        rates.append(group["lr"])
        scheduler.step(1)
    return rates


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1.0, 1.0, 1.0, 1.0]),
        ({"lr_warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"lr_decay_style": "linear"}, [0.8, 0.6, 0.4, 0.2]),
        ({"lr_decay_style": "linear", "min_lr_ratio": 0.5}, [0.9, 0.8, 0.7, 0.6]),
        ({"lr_decay_style": "linear", "lr_warmup_steps": 2}, [0.5, 1.0, 2 / 3, 1 / 3]),
        ({"lr_decay_style": "cosine", "lr_decay_steps": 3}, [0.853553, 0.5, 0.146447, 0.0]),
        (
            {"lr_decay_style": "linear", "lr_decay_steps": 1, "min_lr_ratio": 0.1},
            [0.55, 0.1, 0.1, 0.1],
        ),
    ],
)
def test_rates(keys: dict[str, Any], expected: list[float]) -> None:
    assert _rates(4, **keys) == pytest.approx(expected, abs=1e-6)
