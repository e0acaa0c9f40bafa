"""What this machine lacks for torch to use its NVIDIA GPUs: a driver, a build of torch, a compiler.

Each fault is a pair: what was seen, and what to do. This file chooses no device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

Fault = tuple[str, str]

# The oldest driver for each major version of CUDA: NVIDIA, "CUDA Compatibility", minor versions.
_OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}
_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")


def driver_version() -> str | None:
    """The version of the driver of the NVIDIA GPUs of this machine or container; None: it has none.

    The driver's file alone is no sign of a GPU: it is there in each container of the machine.
    """
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return None
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else "of unknown version"


def fault_of_torch(cuda: str | None, driver: str | None, available: bool) -> Fault | None:
    """What keeps torch, built for a version of CUDA, from the GPUs of a driver; None: nothing."""
    if driver is None:
        return None
    build = f"{torch.__version__} for CUDA {cuda}"
    oldest = _OLDEST_DRIVER.get((cuda or "").split(".")[0], (0, 0))
    own = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    if cuda is None:
        seen = f"{torch.__version__} is a build without CUDA, and driver {driver} has GPUs"
        return seen, "install a build for CUDA; 'mrlhf docs gpu' says which"
    if own and own < oldest:
        seen = f"{build} needs driver {'.'.join(map(str, oldest))} or newer; here it is {driver}"
        return seen, "have the driver updated, or install a build of torch for an older CUDA"
    if not available:
        advice = "look at CUDA_VISIBLE_DEVICES, at nvidia-smi, and whether a container got its GPUs"
        return f"{build} finds no GPU, with driver {driver}", advice
    return None


def fault_of_compiler() -> Fault | None:
    """What Triton lacks to build what launches its kernels; None: nothing, or no Triton is here."""
    if importlib.util.find_spec("triton") is None:
        return None
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    # As Triton does: Debian's own scheme names a directory that has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    if not any(map(shutil.which, compilers)):
        seen = f"there is no C compiler ({', '.join(compilers)}) to launch kernels"
        return seen, "install gcc, or let CC name one"
    if not header.is_file():
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        advice = f"install {package} (Debian, Ubuntu) or {package}el (Fedora, Red Hat)"
        return f"{header} is missing, with which kernels are launched", advice
    return None
