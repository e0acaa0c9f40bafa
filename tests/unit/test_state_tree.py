"""What is written as a state comes back: numbers to the last bit, texts, tensors, dataclasses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from mrlhf.batch import NO_VERSION, Prompts, Rollout
from mrlhf.checkpoint.state_tree import (
    StateCopy,
    object_from,
    random_state,
    read_state,
    restore_random_state,
    state_of,
)
from mrlhf.checkpoint.tensor_file import TensorSource, write_tensors
from mrlhf.errors import CheckpointError
from mrlhf.records import ExpertRecord


def test_a_state_comes_back(tmp_path: Path) -> None:
    state = {
        "numbers": [1, 0.1 + 0.2, -0.0, 1e-320, True, None, "text ☃"],
        "inf": [math.inf, -math.inf],
        "nested": {"tensors": [torch.arange(6).view(2, 3), torch.zeros(0, dtype=torch.bool)]},
        "pair": (3, 4),
        "mixed": [1, {"tensor": torch.tensor(2.5, dtype=torch.bfloat16)}],
        "later": lambda: {"tensor": torch.ones(2)},
    }
    files = StateCopy.of(state).write(tmp_path)
    back = read_state(tmp_path)

    assert [file.path for file in files] == ["state.json", "state.safetensors"]
    assert back["numbers"] == state["numbers"] and math.copysign(1, back["numbers"][2]) == -1
    assert back["inf"] == [math.inf, -math.inf] and back["pair"] == [3, 4]
    first, second = back["nested"]["tensors"]
    assert torch.equal(first, torch.arange(6).view(2, 3)) and second.dtype == torch.bool
    assert back["mixed"][1]["tensor"].dtype == torch.bfloat16
    assert back["later"]["tensor"].tolist() == [1.0, 1.0]


def test_a_copy_does_not_see_later_changes(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    copy = StateCopy.of({"tensor": tensor})
    tensor.zero_()
    copy.write(tmp_path)
    assert read_state(tmp_path)["tensor"].tolist() == [1.0, 1.0, 1.0]


def test_a_dataclass_comes_back(tmp_path: Path) -> None:
    prompts = Prompts([[1, 2]], [7], ["ab"], ["sums"], ["3"], [{"k": 1}])
    rollout = Rollout(
        prompts=prompts,
        sample_index=[0],
        response_ids=torch.tensor([[5, 6]]),
        response_mask=torch.tensor([[True, True]]),
        loss_mask=torch.tensor([[True, False]]),
        rollout_logprobs=torch.tensor([[-0.5, 0.0]]),
        versions=torch.tensor([[3, NO_VERSION]], dtype=torch.int32),
        stopped=torch.tensor([True]),
        experts=ExpertRecord(
            torch.tensor([[[3, 0]], [[300, 2]], [[1, 2]]], dtype=torch.int16),
            torch.tensor([0]),
            torch.tensor([3]),
        ),
    )
    StateCopy.of({**state_of(rollout), "prompts": None}).write(tmp_path)
    stored = {**read_state(tmp_path), "prompts": state_of(prompts)}
    back = object_from(Rollout, stored)
    assert back.experts is not None and rollout.experts is not None
    assert back.experts.chosen.dtype == torch.int16
    for name, tensor in vars(rollout.experts).items():
        assert torch.equal(vars(back.experts)[name], tensor), name

    assert back.prompts == prompts and torch.equal(back.versions, rollout.versions)
    assert object_from(Rollout, {**state_of(rollout), "prompts": prompts}).prompts is prompts


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    StateCopy.of({"a": torch.ones(2)}).write(tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="state of the run cannot be read"):
        read_state(tmp_path)


def test_safetensors_reads_what_was_streamed(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    whole = torch.randn(4, 5)
    runs = TensorSource("runs", torch.float32, (4, 5), lambda: whole.view(-1).split(7))
    others = [
        TensorSource.of(str(dtype), torch.ones(3).to(dtype))
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.uint8,
            torch.bool,
        )
    ]
    written = write_tensors(tmp_path, "file.safetensors", [runs, *others])

    back = load_file(tmp_path / "file.safetensors")
    assert torch.equal(back["runs"], whole) and len(back) == 7
    assert all(back[source.key].dtype == source.dtype for source in others)
    assert written.nbytes == (tmp_path / "file.safetensors").stat().st_size


def test_random_numbers_go_on() -> None:
    import random

    import numpy as np

    random.gauss(0, 1)  # leaves a second number for the next call
    state = random_state()
    drawn = (random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(1).item())
    restore_random_state(state)
    again = (random.gauss(0, 1), random.random(), np.random.rand(), torch.rand(1).item())
    assert again == drawn
