"""The programs of recipes that alter an engine, for comparing."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from mrlhf.rollout import generator
from mrlhf.trainers.ppo import setup
from tests.models.engines import GREEDY, PROMPTS, UIDS, answer, hf_model, make_engine
from tests.pages import ROOT

RECIPES = ROOT / "configs" / "recipes"


def _run(program: Path, arguments: list[str], inside: Callable[[], Any]) -> None:
    """Run the program, which calls `inside` in place of the training."""
    main = runpy.run_path(str(program))["main"]
    with patch.object(sys, "argv", [program.name, *arguments]):
        main.__globals__["ppo"] = lambda: inside() or 0
        assert main() == 0


def test_the_engine_is_coarse_and_the_weights_that_it_was_given_are_not() -> None:
    model = hf_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    exact = answer(make_engine(model), PROMPTS, UIDS, GREEDY)
    found = []

    def inside() -> None:
        assert sys.argv[1:] == ["--config", "a.yaml"]
        engine = make_engine(model)
        kept = [slot.parameter.clone() for slot in engine.weight_slots()]
        found.append(answer(engine, PROMPTS, UIDS, GREEDY))
        now = [slot.parameter for slot in engine.weight_slots()]
        assert all(map(torch.equal, kept, now))

    program = RECIPES / "score_centering" / "coarse_engine.py"
    for bits in ("3", "16"):
        _run(program, [bits, "--config", "a.yaml"], inside)
    coarse, fine = found
    gaps = [
        max(abs(a - b) for one, other in zip(samples, exact, strict=True)
            for a, b in zip(one.logprobs[:1], other.logprobs[:1], strict=True))
        for samples in (coarse, fine)
    ]  # fmt: skip
    assert gaps[0] > 0.01 > gaps[1]
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert answer(make_engine(model), PROMPTS, UIDS, GREEDY) == exact


def test_rounded_weights_lie_on_a_grid() -> None:
    rounded = runpy.run_path(str(RECIPES / "score_centering" / "coarse_engine.py"))["rounded"]
    weight = torch.tensor([[0.9, -0.5, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0]])
    wanted = torch.tensor([[0.9, -0.6, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rounded(weight, 3), wanted)


@pytest.mark.parametrize("renormalises", [True, False])
def test_nothing_is_known_of_what_could_be_drawn(renormalises: bool) -> None:
    whole = (generator._masks, setup.training_sampling)

    def inside() -> None:
        if renormalises:
            assert generator._masks(*[None] * 3) is None  # type: ignore[arg-type]
        assert (generator._masks is whole[0]) != renormalises
        assert (setup.training_sampling is whole[1]) == renormalises

    arguments = ["--engine-renormalises"] if renormalises else []
    _run(RECIPES / "distillation" / "without_replay.py", [*arguments, "--config", "a"], inside)
    assert (generator._masks, setup.training_sampling) == whole
