"""Chooses the device of a rank, and runs megatron-core without a GPU.

megatron-core calls `torch.cuda` in many places. If there is no GPU, an import hook rewrites the
source of `megatron.core` as it is imported: `torch.cuda` becomes a stand-in, `device="cuda"`
becomes `device="cpu"`, and so on. No attribute of torch changes, line numbers stay the same, no
bytecode is written, and nothing is imported earlier than without the hook. If there is a GPU, the
hook is not installed.

This file knows neither models nor layouts nor other ranks.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import platform
import random
import re
import resource
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from mrlhf.errors import ConfigError

T = TypeVar("T")
Kind = Literal["cpu", "cuda"]

# Dense TFLOP/s of matrix products in bfloat16 (tensor cores, sums in float32) and in float32 (no
# TF32), by the name that `torch.cuda.get_device_name` gives. If two names match, the longer one
# must come first. The figures are from NVIDIA's data sheet of each card, and for GeForce cards from
# the Ampere GA102, Ada and RTX Blackwell whitepapers. If only figures "with sparsity" are printed,
# half of them is used.
_PEAK_TFLOPS = {
    "GB200": (2500.0, 80.0),
    "B200": (2250.0, 75.0),
    "GH200": (989.4, 66.9),
    "H200 NVL": (835.5, 60.0),
    "H200": (989.4, 66.9),
    "H100 PCIe": (756.5, 51.2),
    "H100 NVL": (835.5, 60.0),
    "H100": (989.4, 66.9),
    "H20": (148.0, 44.0),
    "A100": (312.0, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.05, 91.6),
    "L40": (181.05, 90.5),
    "L4": (121.0, 30.3),
    "RTX 5090": (209.5, 104.8),
    "RTX 4090": (165.2, 82.6),
    "RTX 3090": (71.0, 35.6),
}
# Parameters of glibc's `mallopt`, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}

_OTHER_CARD = re.compile(r"MIG|Laptop|Max-Q|RTX 5090 D|RTX 4090 D|RTX 3090 Ti")


@dataclass(frozen=True)
class Device:
    """Where tensors live and how ranks talk.

    Attributes:
        kind: "cpu" or "cuda".
        torch_device: for `torch.empty(device=...)`; for a GPU it includes the index.
        backend: backend of `torch.distributed` for tensors on the device.
    """

    kind: Kind
    torch_device: torch.device
    backend: Literal["gloo", "nccl"]

    def synchronize(self) -> None:
        """Wait for all work queued on the device, so that a clock that is read next is right."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def max_memory_allocated(self) -> int:
        """Peak bytes so far: of tensors on a GPU, of resident memory on a CPU."""
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def peak_tflops(self, dtype: torch.dtype) -> float | None:
        """The peak of the device, as the function `peak_tflops` knows it; None on a CPU."""
        if self.kind == "cpu":
            return None
        return peak_tflops(torch.cuda.get_device_name(self.torch_device), dtype)

    def describe(self) -> dict[str, Any]:
        """The host, the device, the threads of this process and the version of torch, in words."""
        if self.kind == "cuda":
            device = torch.cuda.get_device_name(self.torch_device)
        else:
            device = _processor()
        return {
            "host": platform.node(),
            "device": device,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }


def peak_tflops(name: str, dtype: torch.dtype) -> float | None:
    """Dense peak of matrix products on one GPU, in 10^12 operations a second.

    Args:
        name: the name that `torch.cuda.get_device_name` gives.
        dtype: dtype of the operands.

    Returns:
        The peak, or None if the card (or the MIG slice of a card) or the dtype is not known here.
    """
    column = {torch.bfloat16: 0, torch.float16: 0, torch.float32: 1}
    if dtype not in column or _OTHER_CARD.search(name):
        return None

    for card, peak in _PEAK_TFLOPS.items():
        if re.search(rf"\b{card}\b", name):
            return peak[column[dtype]]
    return None


def pick_device(setting: Literal["auto", "cpu", "cuda"], local_rank: int) -> Device:
    """The device of one process; "auto" takes a GPU if there is one.

    On a CPU the process then keeps the memory that it frees.

    Args:
        setting: the device that the configuration asks for.
        local_rank: number of the process on its machine.

    Raises:
        ConfigError: there is no GPU, or there are too few, or the CPU is asked for and a GPU is
            visible.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("distributed.device is cuda but torch sees no GPU; set it to auto or cpu")
    if setting == "cpu" and available:
        raise ConfigError(
            "distributed.device is cpu but torch sees a GPU; hide it with CUDA_VISIBLE_DEVICES=''"
        )

    if not available:
        _keep_freed_memory()
        return Device("cpu", torch.device("cpu"), "gloo")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: torch sees "
            f"{torch.cuda.device_count()}; start at most that many processes on each machine"
        )
    torch.cuda.set_device(local_rank)
    return Device("cuda", torch.device("cuda", local_rank), "nccl")


def _processor() -> str:
    """The name of the machine's processor, as far as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = named.group(1) if named else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _keep_freed_memory() -> None:
    """Let the process use freed memory again, which by default goes back to the system at once.

    A pass over a pack allocates and frees the same tensors for each layer. Memory that comes back
    from the system is cleared first, page by page, which takes up to a sixth of an update of a
    small model. On glibc, tensors of up to 32 MiB (its highest limit) reuse memory, and larger ones
    still go back. Elsewhere nothing changes, nor where the user has set glibc's limits.
    """
    if _MALLOC_VARIABLES & os.environ.keys() or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    mallopt(_M_TRIM_THRESHOLD, -1)


def resolve_dtype(setting: Literal["auto", "float32", "bfloat16"], device: Device) -> torch.dtype:
    """The dtype of parameters and activations; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    return dtype_on(setting, device.kind)


def dtype_on(setting: Literal["auto", "float32", "bfloat16"], kind: str) -> torch.dtype:
    """As `resolve_dtype`, for a kind of device."""
    if setting == "auto":
        return torch.bfloat16 if kind == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[setting]


def device_kind(setting: Literal["auto", "cpu", "cuda"]) -> Kind:
    """The kind of device that a setting means on this machine, which may lack it."""
    if setting == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return setting


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class _NoStream:
    """Stands in for a CUDA stream or event: every method does nothing and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _self(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self

    wait_stream = wait_event = wait = record_event = record = synchronize = _self


class _CudaOnCpu:
    """What rewritten megatron-core sees as `torch.cuda`; other names come from the real module."""

    Stream = Event = current_stream = default_stream = _NoStream
    stream = contextlib.nullcontext
    manual_seed = staticmethod(torch.manual_seed)

    def __init__(self) -> None:
        self.random = SimpleNamespace(
            get_rng_state=self.get_rng_state, set_rng_state=self.set_rng_state
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(new_state)

    @staticmethod
    def synchronize(*args: Any, **kwargs: Any) -> None:
        pass

    set_device = empty_cache = synchronize


CUDA_ON_CPU = _CudaOnCpu()


def not_compiled(function: T | None = None, **options: Any) -> T | Callable[[T], T]:
    """What rewritten megatron-core sees as `torch.compile`: it returns the function as it is.

    A CPU then needs no compiler, and no time is spent compiling.
    """
    if function is None:
        return lambda decorated: decorated
    return function


class _Rewrite(ast.NodeTransformer):
    """Takes CUDA out of a module's syntax tree."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda` and `torch.compile` become the stand-ins above."""
        self.generic_visit(node)
        stand_ins = {"cuda": "CUDA_ON_CPU", "compile": "not_compiled"}
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in stand_ins:
            here = ast.Name("_mrlhf_device", ast.Load())
            return ast.copy_location(ast.Attribute(here, stand_ins[node.attr], node.ctx), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """'torch.cuda.FloatTensor', to which `Tensor.type()` is compared, loses its "cuda."."""
        value = node.value
        if isinstance(value, str) and value.startswith("torch.cuda.") and value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        """`device="cuda"` becomes `device="cpu"`, and `pin_memory` becomes False."""
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant):
            if node.arg == "device" and node.value.value == "cuda":
                node.value = ast.copy_location(ast.Constant("cpu"), node.value)
            elif node.arg == "pin_memory":
                node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`x.cuda()` becomes `x`."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return node.func.value
        return node


def _patch_random(module: Any) -> None:
    """Replace the two functions that use a CUDA generator directly."""
    module._get_cuda_rng_state = CUDA_ON_CPU.get_rng_state
    module._set_cuda_rng_state = CUDA_ON_CPU.set_rng_state


def _patch_linear(module: Any) -> None:
    """Replace Apex's kernel that adds the gradient of a weight to float32 `main_grad` in place."""

    def add_product(inputs: torch.Tensor, grad_output: torch.Tensor, total: torch.Tensor) -> None:
        if inputs.dtype == total.dtype:
            total.addmm_(grad_output.t(), inputs)
        else:
            total.add_(grad_output.t() @ inputs)

    module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_product)
    module._grad_accum_fusion_available = True


_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.layers": _patch_linear,
    "megatron.core.tensor_parallel.random": _patch_random,
}


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one rewritten module, never through the bytecode cache."""

    def source_to_code(  # type: ignore[override]
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_mrlhf_device"] = sys.modules[__name__]
        with warnings.catch_warnings():
            # megatron-core warns that Apex and TransformerEngine are missing; a CPU needs neither.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
            super().exec_module(module)
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)

    def path_stats(self, path: Any) -> Any:
        raise OSError("rewritten modules have no bytecode cache")

    def set_data(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of megatron.core as usual, and gives their source to `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None

        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def ask_for_huge_pages() -> None:
    """Let torch ask the system for huge pages for large tensors, if there is no GPU.

    A page that the system hands out is cleared first; large pages cost less for each byte. torch
    reads this variable at its first tensor, so the package calls this when it is imported. What the
    user has set stays. Programs that the process starts inherit the variable.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def install_cpu_stand_ins() -> None:
    """Rewrite megatron-core for the CPU when it is imported.

    This does nothing if there is a GPU, or if it has been called before.
    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert "megatron.core" not in sys.modules, (
        "megatron.core was imported before mrlhf: import mrlhf first"
    )
    sys.meta_path.insert(0, _Finder())
