"""Checks of one machine: versions, GPUs, compiler, limits and disk.

Each check is given what was found, and so can be tried with values of another machine.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from mrlhf.device import cores, host_memory_bytes
from mrlhf.doctor.findings import Finding, judged, ok
from mrlhf.errors import MrlhfError
from mrlhf.inference.installed import require_engine

# What each optional package is for.
_OPTIONAL = {
    "transformer-engine": "fused layers on GPUs",
    "apex": "a fused optimizer on GPUs",
    "wandb": "trainer.trackers wandb",
    "trackio": "trainer.trackers trackio",
}
# The oldest driver for each major version of CUDA: NVIDIA, "CUDA Compatibility", minor versions.
_OLDEST_DRIVER = {"11": (450, 80), "12": (525, 60), "13": (580, 65)}
_TRIED_MB = 64
_LEAST_FILES = 4096
_LEAST_DISK_MB_S = 100
_LEAST_ROOM_GB = 20


def machine(output_dir: Path) -> Iterator[Finding]:
    """Look over this machine, which would write a run into `output_dir`."""
    yield ok("Python", f"{platform.python_version()} on {platform.platform()}")
    yield from torch_build(torch.version.cuda, driver_version(), torch.cuda.is_available())
    if torch.cuda.is_available():
        yield from _gpus()
        yield nccl(torch.cuda.nccl.version(), platform.machine())
    yield _packages()
    yield from processor(cores(), host_memory_bytes() / 1e9)
    yield from limits()
    yield from disk(output_dir)
    yield from _slurm()


def torch_build(cuda: str | None, driver: str | None, available: bool) -> Iterator[Finding]:
    """Look at torch's build (its CUDA version) beside the driver of this machine."""
    version = torch.__version__
    if cuda is None and driver is None:
        yield ok("torch", f"{version}, a build for CPUs; no NVIDIA driver was found")
    elif cuda is None:
        yield Finding(
            "broken",
            "torch",
            f"{version} is a build without CUDA, and driver {driver} has GPUs",
            "install a build for CUDA; 'mrlhf docs gpu' says which",
        )
    elif driver is None:
        seen = f"{version} for CUDA {cuda}, but there is no NVIDIA driver"
        yield Finding("look", "torch", seen, "runs take the CPUs here; a GPU needs its driver")
    else:
        oldest = _OLDEST_DRIVER.get(cuda.split(".")[0], (0, 0))
        parts = tuple(int(part) for part in driver.split(".")[:2])
        if parts < oldest:
            needed = ".".join(map(str, oldest))
            yield Finding(
                "broken",
                "torch",
                f"{version} for CUDA {cuda} needs driver {needed} or newer; here it is {driver}",
                "have the driver updated, or install a build of torch for an older CUDA",
            )
        elif not available:
            yield Finding(
                "broken",
                "torch",
                f"{version} for CUDA {cuda}, driver {driver}, but torch finds no GPU",
                "look at CUDA_VISIBLE_DEVICES, at nvidia-smi, and whether a container got its GPUs",
            )
        else:
            yield ok("torch", f"{version} for CUDA {cuda}, driver {driver}")


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None


def _gpus() -> Iterator[Finding]:
    for number in range(torch.cuda.device_count()):
        free, whole = torch.cuda.mem_get_info(number)
        yield judged(
            free > 0.9 * whole,
            f"GPU {number}",
            f"{torch.cuda.get_device_name(number)}, {free / 1e9:.0f} of {whole / 1e9:.0f} GB free",
            "another process holds its memory; nvidia-smi names it",
        )


def nccl(version: tuple[int, ...], processor_name: str) -> Finding:
    """Look for versions of NCCL that are known to hang."""
    shown = ".".join(map(str, version))
    update = "install another one: pip install -U nvidia-nccl-cu12 (or -cu13, as torch has it)"
    if version == (2, 29, 2):  # pytorch/pytorch#174338
        return Finding("broken", "NCCL", f"{shown} hangs; 2.29.3 mends that", update)
    if version < (2, 29, 3) and processor_name == "aarch64":  # release notes of NCCL 2.29.3
        seen = f"{shown} on ARM can hang without an error; 2.29.3 mends that"
        return Finding("broken", "NCCL", seen, update)
    if version < (2, 26, 2):  # pytorch/pytorch#149351
        seen = f"{shown} can hang when a failed job ends; 2.26.2 mends that"
        return Finding("look", "NCCL", seen, update)
    return ok("NCCL", shown)


def _packages() -> Finding:
    found = []
    absent = []
    for name, use in _OPTIONAL.items():
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            absent.append(f"{name} ({use})")
    try:
        require_engine("vllm")
        found.append("vLLM")
    except MrlhfError as error:
        absent.append(f"vLLM ({error})")
    parts = {"found": found, "without": absent}
    seen = [f"{word} {', '.join(names)}" for word, names in parts.items() if names]
    return ok("optional packages", "; ".join(seen))


def processor(cores: int, memory_gb: float) -> Iterator[Finding]:
    """Look at cores, memory, and whether kernels for this processor can be compiled."""
    yield ok("processor", f"{cores} cores, {memory_gb:.0f} GB of memory")
    compiler = shutil.which("g++") or shutil.which("c++")
    yield judged(
        compiler is not None,
        "C++ compiler",
        compiler or "none on PATH",
        "install g++: without it training and generation on CPUs run on torch's slower operators",
    )


def limits() -> Iterator[Finding]:
    """Look at the limits of this process."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judged(
        files >= _LEAST_FILES,
        "open files",
        f"at most {files}",
        f"raise it before a start of many ranks: ulimit -n {most}",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir():
        yield judged(
            locked == resource.RLIM_INFINITY,
            "locked memory",
            "unlimited" if locked == resource.RLIM_INFINITY else f"at most {locked} bytes",
            "InfiniBand needs it without a limit: ulimit -l unlimited, or the scheduler's setting",
        )
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free / 1e9
        yield judged(
            free > 1,
            "/dev/shm",
            f"{free:.1f} GB free",
            "NCCL exchanges through it: give a container --shm-size=8g or --ipc=host",
        )


def disk(directory: Path) -> Iterator[Finding]:
    """Write into the directory, or beside it if it does not exist yet, and look at its room."""
    place = directory
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        yield Finding("broken", "output", f"{place} is no directory", "give another --out")
        return
    file = place / f".mrlhf_doctor_{os.getpid()}"
    begin = time.perf_counter()
    try:
        with file.open("wb") as output:
            block = os.urandom(2**20)
            for _ in range(_TRIED_MB):
                output.write(block)
            output.flush()
            os.fsync(output.fileno())
    except OSError as error:
        advice = "free some room, or give another --out"
        yield Finding("broken", "output", f"{place}: {error.strerror}", advice)
        return
    finally:
        file.unlink(missing_ok=True)

    speed = _TRIED_MB * 2**20 / 1e6 / (time.perf_counter() - begin)
    free = shutil.disk_usage(place).free / 1e9
    yield judged(
        free > _LEAST_ROOM_GB,
        "output",
        f"{free:.0f} GB free in {place}",
        "a checkpoint takes 12 to 16 bytes a parameter that is trained, an export 2 or 4",
    )
    yield judged(
        speed > _LEAST_DISK_MB_S,
        "output",
        f"written at {speed:.0f} MB/s",
        "checkpoints will take long; trainer.async_save lets training go on meanwhile",
    )


def _slurm() -> Iterator[Finding]:
    names = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK")
    found = [f"{name} {os.environ[name]}" for name in names if name in os.environ]
    if found:
        yield ok("Slurm", ", ".join(found))
