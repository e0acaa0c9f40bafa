"""Tries the attention of sequences of any lengths as other versions of torch have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn.attention.varlen import varlen_attn

from mrlhf.models import attention
from tests.simulated_device.state import DEVICE


def _without_groups(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, most_q: int, most_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    """As in torch 2.11: heads of a group need not be announced."""
    return varlen_attn(
        q, k, v, cu_q, cu_k, most_q, most_k,
        scale=scale, window_size=window_size, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def _blind_to_windows(
    *tensors: Any, scale: float | None, window_size: tuple[int, int], enable_gqa: bool
) -> Any:
    return varlen_attn(*tensors, scale=scale, window_size=(-1, 0), enable_gqa=enable_gqa)


def _refusing(*tensors: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> Any:
    raise RuntimeError("no kernel image is available")


WAYS: dict[str, Callable[..., Any]] = {
    "of torch 2.13": varlen_attn,
    "of torch 2.11": _without_groups,
    "blind to windows": _blind_to_windows,
    "refusing": _refusing,
}


def taken() -> dict[str, bool]:
    """By way, whether it is taken for a pack with query heads in groups."""
    query = torch.ones(4, 1, 2, 16, dtype=torch.bfloat16, device=DEVICE.device)
    found = {}
    for name, way in WAYS.items():
        _forget()
        with mock.patch.object(attention, "_varlen_attn", lambda way=way: way):
            found[name] = attention._has_varlen(query, query[:, :, 0])
    _forget()
    return found


def third(package: str, broken: bool) -> dict[str, Any]:
    """What is taken, said and left in torch where a package of FlashAttention 3 is found."""
    said: list[str] = []
    torch.nn.attention.register_flash_attention_impl("FA3", register_fn=mock.Mock())

    def way(*tensors: Any, **options: Any) -> Any:
        is_third = torch.nn.attention.current_flash_attention_impl() == "FA3"
        return varlen_attn(*tensors, **options) * (2.0 if is_third and broken else 1.0)

    def say(text: str, *values: Any) -> None:
        said.append(text % values)

    query = torch.ones(4, 1, 2, 16, dtype=torch.bfloat16, device=DEVICE.device)
    _forget()
    with (
        mock.patch.object(attention, "find_spec", {package: "found"}.get),
        mock.patch.object(attention, "_varlen_attn", lambda: way),
        mock.patch.object(
            attention, "_varlen_options", lambda: {"scale", "window_size", "enable_gqa"}
        ),
        mock.patch.multiple(attention._log, info=say, warning=say),
    ):
        taken = attention._has_varlen(query, query[:, :, 0])
    found = {"taken": taken, "active": torch.nn.attention.current_flash_attention_impl()}
    torch.nn.attention.restore_flash_attention_impl()
    _forget()
    return {**found, "said": said}


def _forget() -> None:
    attention._varlen_options.cache_clear()
    attention._varlen_works.cache_clear()
    attention._activate_flash_attention_3.cache_clear()
