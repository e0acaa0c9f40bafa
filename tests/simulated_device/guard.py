"""Compiles `guard.cpp` and loads it, before torch is imported; the library is kept between runs.

It does not know what the device does.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("guard.cpp")
COMPILER = os.environ.get("CXX", "g++")


def has_compiler() -> bool:
    """Whether this machine can compile the guard."""
    return shutil.which(COMPILER) is not None


def load_guard() -> None:
    """Register a device guard and hooks for CUDA that do nothing."""
    assert "torch" not in sys.modules, "the simulated device must be loaded before torch"
    torch_directory = Path(sysconfig.get_paths()["purelib"]) / "torch"
    library = _compiled(torch_directory)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_directory / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _compiled(torch_directory: Path) -> Path:
    """The library for this source and this torch; two processes may compile it at once."""
    version = importlib.metadata.version("torch")
    about = "|".join([str(torch_directory), version, COMPILER]).encode() + SOURCE.read_bytes()
    digest = hashlib.blake2b(about, digest_size=8).hexdigest()
    library = _cache_directory() / f"guard-{digest}.so"
    if library.exists():
        return library

    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        include = torch_directory / "include"
        command = [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", str(SOURCE)]
        command += ["-o", str(unfinished), f"-I{include}"]
        command += [f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
        command += [f"-L{torch_directory / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        unfinished.replace(library)
    return library


def _cache_directory() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "mrlhf" / "simulated_device"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory
