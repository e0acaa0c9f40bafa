"""What `make gpu-hour` measures takes the ways of a GPU, and its facts name them."""

from __future__ import annotations

import pytest

from tests.simulated_device.client import devices

MEMORY = 2**30  # the bandwidth is measured with 256 MiB


def test_the_operators_of_a_small_model_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATED_DEVICE_BYTES", str(MEMORY))
    with devices() as device:
        [found] = device.run("tests.device.hour_here:taken")
        [[offload, mixed]] = device.run("tests.device.hour_here:rows")
    assert offload["pinned_bytes_asked"] > 10**6 and "pinned_bytes_taken" in offload
    assert mixed["host_us"] > 0 and mixed["passes"] > 0
    assert "torch_attn::_varlen_attn" in found
    ours = {name.removeprefix("mrlhf::") for name in found if name.startswith("mrlhf::")}
    assert {"paged_attention", "rotate_store", "draw", "vocab_sums", "rms_norm_backward"} <= ours
