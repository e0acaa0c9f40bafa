"""What is offloaded leaves the device and comes back as it was, and a bound on memory is kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mrlhf.errors import MemoryBoundError, TrainingError
from mrlhf.parallel.device_memory import DeviceMemory, memory_metrics
from mrlhf.training.residency import Owner, Residency, Stream

EVERYTHING: list[Owner] = ["params", "grads", "optimizer"]
MIB = 2**20


class Model:
    """Two views of one buffer as weights, a gradient, and moments that the first step makes."""

    def __init__(self) -> None:
        self.buffer = torch.arange(2 * MIB // 4, dtype=torch.float32)
        self.params = list(self.buffer.chunk(2))
        for param in self.params:
            param.requires_grad_()
        self.grads = [torch.ones(MIB // 4)]
        self.moments: list[Tensor] = []

    def residency(self, memory: DeviceMemory, offload: Sequence[Owner] = EVERYTHING) -> Residency:
        """Their residency; main weights are the parameters themselves."""
        return Residency(
            "actor",
            {
                "params": lambda: self.params,
                "grads": lambda: self.grads,
                "optimizer": lambda: [*self.params, *self.moments],
            },
            offload,
            memory,
            before_leaving=lambda: None,
        )


def test_what_nobody_needs_leaves_and_comes_back() -> None:
    memory = DeviceMemory()
    model = Model()
    residency = model.residency(memory)
    assert dict(memory.held) == {"actor/params": 2 * MIB, "actor/grads": MIB}
    residency.leave()
    assert not memory.held and residency.nbytes == {"params": 2 * MIB, "grads": MIB, "optimizer": 0}
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (*model.params, *model.grads))

    first = model.params[0]
    with residency.needing("params"):
        with residency.needing(*EVERYTHING):
            assert dict(memory.held) == {"actor/params": 2 * MIB, "actor/grads": MIB}
            first.data += 1
            model.moments.append(torch.full((MIB // 4,), 7.0))
        assert dict(memory.held) == {"actor/params": 2 * MIB}
        # A view of the whole sees what was written through a view of a part.
        expected = torch.arange(2 * MIB // 4) + (torch.arange(2 * MIB // 4) < MIB // 4)
        assert torch.equal(model.buffer, expected.float())
    assert not memory.held
    with residency.needing("optimizer"):
        assert dict(memory.held) == {"actor/optimizer": MIB}
        assert torch.equal(model.moments[0], torch.full((MIB // 4,), 7.0))

    residency.close()
    assert torch.equal(model.buffer, expected.float()) and not memory.held


def test_only_what_is_offloaded_leaves() -> None:
    memory = DeviceMemory()
    model = Model()
    residency = model.residency(memory, offload=["grads"])
    with residency.needing(*EVERYTHING):
        model.moments.append(torch.zeros(MIB // 4))
    assert dict(memory.held) == {"actor/params": 2 * MIB, "actor/optimizer": MIB}


def test_frozen_weights_are_copied_to_the_host_once() -> None:
    weight = torch.ones(8, requires_grad=True)  # as those of a model that is never trained are
    residency = Residency(
        "reference", {"params": lambda: [weight]}, ["params"], DeviceMemory(), lambda: None
    )
    residency.leave()
    with residency.needing("params", "grads", "optimizer"):
        weight.data += 1  # which nobody does
    with residency.needing("params"):
        assert torch.equal(weight, torch.ones(8))
        residency.forget_copies()
        weight.data += 2
    with residency.needing("params"):
        assert torch.equal(weight, torch.full((8,), 3.0))


@pytest.mark.parametrize("stream", ["host", "disk"])
def test_streamed_states_pass_through_in_parts(stream: Stream) -> None:
    memory = DeviceMemory()
    params = [torch.zeros(4)]
    states: list[Tensor] = [torch.arange(MIB // 4.0), *params]
    residency = Residency(
        "actor",
        {"params": lambda: params, "optimizer": lambda: states},
        [],
        memory,
        lambda: None,
        stream,
    )
    residency.leave()
    assert dict(memory.held) == {"actor/params": 16}

    with residency.needing("params", "optimizer"), residency.passing(lambda: states[:1]):
        assert memory.held["actor/optimizer"] == MIB
        states[0] += 1
    later: list[Tensor] = []
    memory.take_peaks()
    with residency.passing(lambda: later):
        later.append(torch.ones(MIB // 4))  # as the first step makes moments
    states += later
    assert memory.take_peaks()["start"]["actor/optimizer"] == MIB
    assert residency.nbytes == {"params": 16, "optimizer": 2 * MIB}
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in (states[0], later[0]))

    values = residency.values(states[0])
    assert torch.equal(values, torch.arange(MIB // 4.0) + 1)
    values[0] = 7  # as a checkpoint is read
    with residency.passing(lambda: states):
        assert (states[0][0], states[0][1], later[0][0]) == (7, 2, 1)
        assert torch.equal(residency.values(params[0]), params[0])


def test_a_disk_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    states = [torch.ones(8)]
    residency = Residency(
        "actor", {"optimizer": lambda: states}, [], DeviceMemory(), lambda: None, "disk"
    )
    with pytest.raises(TrainingError, match="has no room for 32 B"):
        residency.leave()


def test_the_bound_names_phase_and_owners() -> None:
    memory = DeviceMemory(bound=3 * MIB)
    model = Model()
    residency = model.residency(memory)
    residency.leave()
    memory.hold("engine/cache", MIB)
    memory.enter("update_actor")
    needing = residency.needing
    with needing("params"), pytest.raises(MemoryBoundError) as caught, needing("grads"):
        pytest.fail("it does not fit")
    message = str(caught.value)
    assert message.startswith("distributed.device_memory_mb 3 is too little for phase update_actor")
    assert "actor/params 2.097 MB, engine/cache 1.049 MB, actor/grads 1.049 MB" in message


def test_peaks_by_phase() -> None:
    memory = DeviceMemory()
    memory.hold("critic/params", 5)
    memory.enter("gen")
    memory.hold("engine/cache", 7)
    memory.hold("engine/cache", 0)
    memory.enter("values")
    peaks = memory.take_peaks()

    assert peaks == {
        "start": {"critic/params": 5},
        "gen": {"critic/params": 5, "engine/cache": 7},
        "values": {"critic/params": 5},
    }
    assert memory_metrics(peaks) == {
        "perf/memory_in/gen": 12e-9,
        "perf/memory_in/values": 5e-9,
        "perf/memory/critic/params": 5e-9,
        "perf/memory/engine/cache": 7e-9,
    }
    assert memory.take_peaks() == {}
