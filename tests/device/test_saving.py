"""A checkpoint that a thread writes does not disturb what the GPU does meanwhile."""

from __future__ import annotations

from tests.simulated_device.client import Devices


def test_a_thread_saves_while_a_graph_is_captured(device: Devices) -> None:
    (saved,) = device.run("tests.device.saving_here:save_while_capturing")
    assert [each.is_whole for each in saved] == [True, True]
    for each in saved:
        # The thread copies to pinned memory, on a stream of its own, and waits for that alone.
        kinds = [kind for kind, line in each.counts.copies if "tensor_file.py" in line]
        assert kinds == ["pinned to the host, beside other work"]
        assert [kind for kind, line in each.counts.waits if "rank_files.py" in line] == [
            "Stream.synchronize"
        ]
        assert not each.counts.synchronized
