"""Runs megatron-core without a GPU.

megatron-core calls `torch.cuda` in many places. If there is no GPU, an import hook rewrites the
source of `megatron.core` as it is imported: `torch.cuda` becomes a stand-in, `device="cuda"`
becomes `device="cpu"`, and so on. No attribute of torch changes, line numbers stay the same, and
nothing is imported earlier than without the hook, which is in `finder.py`.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import marshal
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from mrlhf.host.products import add_mm
from mrlhf.host.products import matmul as matmul  # rewritten modules call it
from mrlhf.host.user_cache import cache_directory, write_whole

T = TypeVar("T")


class _NoStream:
    """Stands in for a CUDA stream or event: every method does nothing and returns the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _self(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self

    wait_stream = wait_event = wait = record_event = record = synchronize = _self


class _CudaOnCpu:
    """Stands in for `torch.cuda` in rewritten megatron-core; other names are torch's own."""

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
    """Stands in for `torch.compile`: a CPU needs no compiler, so the function stays as it is."""
    if function is None:
        return lambda decorated: decorated
    return function


class _Rewrite(ast.NodeTransformer):
    """Takes CUDA out of a module's syntax tree."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`torch.cuda`, `torch.compile` and `torch.matmul` become stand-ins."""
        self.generic_visit(node)
        stand_ins = {"cuda": "CUDA_ON_CPU", "compile": "not_compiled", "matmul": "matmul"}
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in stand_ins:
            here = ast.Name("_stand_ins", ast.Load())
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
        """`x.cuda()` becomes `x`, and `x.matmul(y)` a call of the stand-in."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return node
        if node.func.attr == "cuda":
            return node.func.value
        if node.func.attr == "matmul" and getattr(node.func.value, "id", "") != "_stand_ins":
            here = ast.Attribute(ast.Name("_stand_ins", ast.Load()), "matmul", ast.Load())
            node = ast.Call(here, [node.func.value, *node.args], node.keywords)
        return node


def _patch_random(module: Any) -> None:
    """Replace the two functions that use a CUDA generator directly."""
    module._get_cuda_rng_state = CUDA_ON_CPU.get_rng_state
    module._set_cuda_rng_state = CUDA_ON_CPU.set_rng_state


def replace_apex_kernel(module: Any) -> None:
    """Give megatron-core's module of linear layers `add_mm` in place of Apex's kernel."""
    kernel = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, grad, sum_: add_mm(sum_, grad.t(), x))
    module.fused_weight_gradient_mlp_cuda = kernel
    module._grad_accum_fusion_available = True


_PATCHES: dict[str, Callable[[Any], None]] = {
    "megatron.core.tensor_parallel.layers": replace_apex_kernel,
    "megatron.core.tensor_parallel.random": _patch_random,
}


class StandInLoader(importlib.machinery.SourceFileLoader):
    """Loads one rewritten module, whose bytecode is kept in the user's cache folder.

    It must not lie beside the source, where Python expects bytecode of the unchanged source.
    """

    def get_code(self, fullname: str) -> CodeType:
        """The bytecode of the rewritten module, from the cache if it is there."""
        source = self.get_data(self.path)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # none, or cut off
            return marshal.loads(_kept_bytecode(source, self.path).read_bytes())

        code = self.source_to_code(source, self.path)
        if not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                write_whole(_kept_bytecode(source, self.path), marshal.dumps(code))
        return code

    def source_to_code(  # type: ignore[override]  # noqa: D102
        self, data: Any, path: Any, *, _optimize: int = -1
    ) -> CodeType:
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(data, path)))
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: ModuleType) -> None:  # noqa: D102
        module.__dict__["_stand_ins"] = sys.modules[__name__]
        with warnings.catch_warnings():
            # megatron-core warns that Apex and TransformerEngine are missing; a CPU needs neither.
            warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
            super().exec_module(module)
        if module.__name__ in _PATCHES:
            _PATCHES[module.__name__](module)


def _kept_bytecode(source: bytes, path: str) -> Path:
    """The path of a module's bytecode; its name changes with everything that it depends on."""
    identity = (source, path.encode(), _rewriter_identity())
    digest = hashlib.blake2b(b"|".join(identity), digest_size=16).hexdigest()
    return _bytecode_directory() / f"{digest}.pyc"


@cache
def _rewriter_identity() -> bytes:
    """The content of this file, and the version and settings of Python."""
    settings = f"{sys.flags.optimize}|".encode()
    return settings + importlib.util.MAGIC_NUMBER + Path(__file__).read_bytes()


@cache
def _bytecode_directory() -> Path:
    directory = cache_directory() / "megatron_bytecode"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory
