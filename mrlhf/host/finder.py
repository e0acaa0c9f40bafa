"""Finds the modules of megatron-core, which `stand_ins` rewrites if there is no GPU.

The package imports this file first of all, so it does not import torch, which takes seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class _Finder(MetaPathFinder):
    """Finds modules as usual, and gives their source to the loader that rewrites it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        import torch

        from mrlhf.host.stand_ins import StandInLoader

        if torch.cuda.is_available():
            sys.meta_path.remove(self)
            return None
        # megatron-core imports it, and a machine with nvcc and no GPU gets a line in each rank.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = StandInLoader(spec.loader.name, spec.loader.path)
        return spec


def install_cpu_stand_ins() -> None:
    """Rewrite megatron-core for the CPU when it is imported, unless there is a GPU then."""
    if "megatron.core" in sys.modules:
        import torch

        has_gpu = torch.cuda.is_available()
        assert has_gpu, "megatron.core was imported before mrlhf: import mrlhf first"
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
