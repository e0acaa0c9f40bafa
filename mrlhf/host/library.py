"""Compiles C++ sources to a library for this machine, once, and loads it.

Libraries are kept in the user's cache folder. The name of each changes with the source and its
headers, which lie beside this file, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import platform
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from mrlhf.host.user_cache import cache_directory

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_CONSEQUENCE = "training and generation run on torch's operators, which is slower"
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


@cache
def load_library(*sources: Path) -> ctypes.CDLL | None:
    """Return the compiled sources; None, after a warning, if this machine cannot compile them."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.warning("no C++ compiler (g++) found: %s", _CONSEQUENCE)
        return None

    try:
        return ctypes.CDLL(str(_library_path(compiler, sources)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            detail = error.stderr.decode(errors="replace")
        logger.warning("%s could not be compiled: %s. %s", sources[0], _CONSEQUENCE, detail)
        return None


def _library_path(compiler: str, sources: tuple[Path, ...]) -> Path:
    """Return the path of the library; the first process on a machine makes it, others wait.

    If the first one fails, those that waited fail with the same message; later ones try again.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    texts = [path.read_bytes() for path in (*sources, *sorted(SOURCES.glob("*.h")))]
    processor = processor_says("flags|Features") or platform.machine()
    identity = (*texts, version, " ".join(_FLAGS).encode(), processor.encode())
    digest = hashlib.blake2b(b"|".join(identity), digest_size=8).hexdigest()
    name = f"{sources[0].stem}-{digest}"
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
            _compile([compiler, *_FLAGS, f"-I{SOURCES}", *map(str, sources)], library, failure)
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


def processor_says(name: str) -> str:
    """Return what the system says of the processor under `name`, a pattern; "" if nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(rf"^(?:{name})\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else ""
