"""The compiled functions of this folder, called on tensors.

Without a compiler `find` warns once and returns None, and everything runs on torch's operators.
This file knows addresses and numbers; the C++ says what each function does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mrlhf.host.library import SOURCES, load_library

_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

# The arguments of each function in the order of the C++: p pointer, i int64, f float, n int.
_SIGNATURES = {
    "rms_norm": "ppppp ii fn",
    "rms_norm_backward": "pppppp ii n",
    "gated": "pp ii n",
    "gated_backward": "ppp ii n",
    "attend_packed": "pppp pppp pp iiiiii ffn",
    "attend_packed_backward": "pppp pppp ppp pppp iiiiii ffn",
    "rotate_store": "ppp f ppppppp iiiiii n",
    "attend_paged": "pppp i pppp iiiiii ffn",
    "logit_blocks": "p f p iii n",
    "draw": "p f pppp iiiiii n",
}
_OF_FLOAT32 = {"multiply": "pppp iii n", "mixture_of_float32": "pppppp iiiiii n"}
_MIXTURE_OF_BFLOAT16 = {"mixture_of_bfloat16": "pppppp iiiiii n"}
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "n": ctypes.c_int,
}


class Kernels:
    """The functions for one dtype, by their names.

    An argument that is a tensor stands for its address: it is on the host, contiguous if the
    function takes no strides, and of the function's dtype. None stands for no tensor.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        signatures = _SIGNATURES | _MIXTURE_OF_BFLOAT16
        if dtype == torch.float32:
            signatures |= _OF_FLOAT32
        for name, signature in signatures.items():
            types = [_TYPES[letter] for letter in signature.replace(" ", "")]
            address = ctypes.c_void_p.in_dll(library, f"{name}_{_SUFFIXES[dtype]}").value
            assert address is not None, name
            setattr(self, name, _on_tensors(ctypes.CFUNCTYPE(None, *types)(address)))

        # Weights of products lie in panels of so many columns; see products.h.
        self.panel_columns = ctypes.c_int64.in_dll(library, "panel_columns").value

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise AttributeError(f"there is no kernel {name!r} of this dtype")


def _on_tensors(function: Callable[..., None]) -> Callable[..., None]:
    def call(*arguments: object) -> None:
        function(*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])

    return call


@cache
def find(dtype: torch.dtype) -> Kernels | None:
    """The functions for `dtype`; None if there are none, or this machine cannot compile them."""
    if dtype not in _SUFFIXES:
        return None
    # Packed attention is compiled apart, since what surrounds it would change how it rounds.
    library = load_library(SOURCES / "kernels.cpp", SOURCES / "packed_attention.cpp")
    return None if library is None else Kernels(library, dtype)


def find_for(*tensors: Tensor) -> Kernels | None:
    """The functions for tensors; None also if they are not on the host, or their dtypes differ."""
    dtype = tensors[0].dtype
    fits = all(tensor.device.type == "cpu" and tensor.dtype == dtype for tensor in tensors)
    return find(dtype) if fits else None


def threads_for(elements: int) -> int:
    """Return how many threads to use for `elements` numbers: starting a team takes microseconds."""
    return torch.get_num_threads() if elements >= 2**14 else 1


def threads_for_products(multiplications: int) -> int:
    """Return how many threads to use for a matrix product with this number of multiplications."""
    # About 4 of them cost as much as one number of an elementwise function.
    return threads_for(multiplications // 4)
