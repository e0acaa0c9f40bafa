"""Compiles a C++ source for this machine, once, and loads it.

Libraries are kept in the user's cache folder. The name of each changes with the source, the
compiler and the processor. Sources and the headers that they include lie beside this file, which
knows none of their functions.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mrlhf.host.user_cache import cache_directory

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)

# The letters of a signature: p pointer, i int64, f float, n int.
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
    "n": ctypes.c_int,
}


def functions_of(
    library: ctypes.CDLL, signatures: Mapping[str, str], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the functions of a library for one dtype, by their names without the dtype's suffix.

    Each function's signature has a letter for each argument: p pointer, i int64, f float, n int.
    Blanks have no meaning.
    """
    functions = {}
    for name, signature in signatures.items():
        function = library[f"{name}_{SUFFIXES[dtype]}"]
        function.argtypes = [_TYPES[letter] for letter in signature.replace(" ", "")]
        function.restype = None
        functions[name] = function
    return functions


def threads_for(elements: int) -> int:
    """Return how many threads to use for `elements` numbers: starting a team takes microseconds."""
    return torch.get_num_threads() if elements >= 2**14 else 1


def threads_for_products(multiplications: int) -> int:
    """Return how many threads to use for a matrix product with this number of multiplications."""
    # About 4 of them cost as much as one number of an elementwise function.
    return threads_for(multiplications // 4)


@cache
def load_library(source: Path, user: str) -> ctypes.CDLL | None:
    """Return the compiled `source`; None if this machine cannot compile it.

    The warning then says that `user` runs on torch's operators.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.warning(
            "no C++ compiler (g++) found: %s runs on torch's operators, which is slower", user
        )
        return None

    try:
        return ctypes.CDLL(str(_library_path(compiler, source)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            detail = error.stderr.decode(errors="replace")
        logger.warning(
            "%s could not be compiled: %s runs on torch's operators, which is slower. %s",
            source,
            user,
            detail,
        )
        return None


def _library_path(compiler: str, source: Path) -> Path:
    """Return the path of the library; the first process on a machine makes it, others wait.

    If the first one fails, those that waited fail with the same message; later ones try again.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    headers = [header.read_bytes() for header in sorted(SOURCES.glob("*.h"))]
    texts = (source.read_bytes(), *headers, version)
    identity = (*texts, " ".join(_FLAGS).encode(), _processor().encode())
    digest = hashlib.blake2b(b"|".join(identity), digest_size=8).hexdigest()
    name = f"{source.stem}-{digest}"
    directory = cache_directory()
    library = directory / f"{name}.so"
    failure = directory / f"{name}.failed"

    failed_before = _written_at(failure)
    with open(directory / f"{name}.lock", "w") as lock:
        # Some network file systems have no locks. Then each process compiles for itself.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            if _written_at(failure) != failed_before:  # while this process waited
                raise subprocess.SubprocessError(failure.read_text(errors="replace"))
            _compile([compiler, *_FLAGS, f"-I{SOURCES}", str(source)], library, failure)
    return library


def _compile(command: list[str], library: Path, failure: Path) -> None:
    """Write the whole `library` at once, or the compiler's error to `failure`."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        unfinished = Path(scratch) / library.name
        try:
            subprocess.run([*command, "-o", str(unfinished)], capture_output=True, check=True)
        except subprocess.CalledProcessError as error:
            failure.write_bytes(error.stderr)
            raise
        unfinished.replace(library)
    failure.unlink(missing_ok=True)


def _written_at(path: Path) -> int | None:
    """Return a file's time of change in nanoseconds; None if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _processor() -> str:
    """Return a text that differs between processors that need different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
