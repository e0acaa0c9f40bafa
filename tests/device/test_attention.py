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


def test_flash_attention_3_is_taken_where_its_package_is(device: Devices) -> None:
    third = "tests.device.attention_here:third"
    (here,) = device.run(third, "flash_attn_interface", False)
    assert here["taken"] and here["active"] == "FA3"
    assert here["said"] == ["attention within packs is FlashAttention 3's"]

    (none,) = device.run(third, "flash_attn", False)
    assert none["taken"] and none["active"] is None and not none["said"]

    (broken,) = device.run(third, "flash_attn_interface", True)
    assert broken["taken"] and broken["active"] is None
    assert "differs by 1" in broken["said"][1] and "torch's own" in broken["said"][1]
