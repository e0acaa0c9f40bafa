"""The simulated device refuses what a GPU refuses, and counts what a GPU does in silence."""

from __future__ import annotations

from tests.simulated_device.client import Devices
from tests.simulated_device.orders import Collective, problems

BODIES = "tests.device.refusals"


def test_mistakes_are_refused(device: Devices) -> None:
    (said,) = device.run(f"{BODIES}:refused")
    assert not [name for name, message in said.items() if not message], said
    assert "same device" in said["two devices"]
    assert "generator" in said["host generator"]
    assert "capturing" in said["item in a capture"]
    assert "OutOfMemoryError" in said["memory"]
    assert "not int32" in said["attention with int64 lengths"]


def test_what_is_done_is_counted(device: Devices) -> None:
    (counts,) = device.run(f"{BODIES}:counted")
    kernels = {name: found.launched for name, found in counts.items()}
    waits = {name: found.waits.total() for name, found in counts.items()}
    unpinned = {name: found.unpinned for name, found in counts.items()}
    assert kernels["an operator"] == kernels["norm"] == kernels["pinned copies"] == 1
    assert kernels["views"] == 0

    quiet = {"an operator", "views", "number at a mask", "norm"}
    assert {name for name, count in waits.items() if count == 0} == quiet
    assert waits["numbers of a list"] == 2
    assert waits["pinned copies"] == 1  # of the event
    assert {name for name, count in unpinned.items() if count} == {
        "copy to the host",
        "copy to the device",
    }

    ((kind, line),) = counts["item"].waits
    assert kind == "item"
    assert line.startswith("tests/device/refusals.py:")


def test_a_graph_is_replayed_on_the_same_memory(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:graph")
    assert found == {
        "before": True,
        "first": [1.0, 3.0, 5.0],
        "second": [21.0, 23.0, 25.0],
        "kernels": 2,
        "replays": 2,
        "replayed": 4,
    }


def test_memory_is_counted_by_storage_and_phase(device: Devices) -> None:
    (found,) = device.run(f"{BODIES}:memory")
    assert found == {"held": 512, "after": 0, "reserved": 4096, "large": 4096, "small": 512}


def _collective(operator: str, group: str = "0", what: str = "f[1]", peer: int = -1) -> Collective:
    return Collective("device", operator, group, (0, 1), what, peer, "", 4)


def test_another_order_of_collectives_is_found() -> None:
    ours = [_collective("allreduce_"), _collective("broadcast_", "1")]
    assert problems([ours, ours]) == []
    for theirs in (ours[::-1], ours[:1], [ours[0], _collective("broadcast_", "1", "f[2]")]):
        assert len(problems([ours, theirs])) == 1
    host = [row._replace(where="host") for row in ours[::-1]]
    assert problems([ours + host, host + ours]) == []


def test_messages_are_received_in_the_order_in_which_they_are_sent() -> None:
    sent = [_collective("send", what=what, peer=1) for what in ("f[1]", "f[2]")]
    received = [_collective("recv_", what=what, peer=0) for what in ("f[1]", "f[2]")]
    assert problems([sent, received]) == []
    assert len(problems([sent, received[::-1]])) == 1
    assert len(problems([sent, received[:1]])) == 1
