"""Torch's attention of sequences of any lengths is tried before it is used."""

from __future__ import annotations

from tests.simulated_device.client import Devices


def test_an_attention_is_taken_if_it_computes_what_it_should(device: Devices) -> None:
    (taken,) = device.run("tests.device.attention_here:taken")
    assert taken == {
        "of torch 2.13": True,
        "of torch 2.11": True,
        "blind to windows": False,
        "refusing": False,
    }
