"""Checks of one machine (torch and driver, GPUs, compiler, limits, disk) and of a job's ranks.

Most are given what was found, and so can be tried with values of another machine. Versions of
packages are in `versions.py`; `python -m torch.utils.collect_env` lists more.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.device import Device
from mrlhf.doctor.findings import Finding, broken, judged, look, ok
from mrlhf.doctor.versions import versions
from mrlhf.nvidia import driver_version, fault_of_compiler, fault_of_torch
from mrlhf.parallel.collectives import all_gather_objects

_TRIED_MB = 64
_LEAST_FILES = 4096
_LEAST_DISK_MB_S = 100
_LEAST_ROOM_GB = 20
# Of ranks.
_BYTES = 16 * 2**20
_ROUNDS = 5
_LATE_S = 0.5
_SLOW = 0.5  # of the median


def machine(output_dir: Path) -> Iterator[Finding]:
    """Look over this machine, which would write a run into `output_dir`."""
    yield torch_build(torch.version.cuda, driver_version(), torch.cuda.is_available())
    yield from versions()
    if torch.cuda.is_available():
        yield from _gpus()
        yield nccl(torch.cuda.nccl.version(), platform.machine())
        if (fault := fault_of_compiler()) is not None:
            yield broken("C compiler", *fault)
    yield compiler()
    yield from limits()
    yield from disk(output_dir)


def torch_build(cuda: str | None, driver: str | None, available: bool) -> Finding:
    """Look at torch's build (its CUDA version) beside the driver of this machine."""
    version = torch.__version__
    if (fault := fault_of_torch(cuda, driver, available)) is not None:
        return broken("torch", *fault)
    if cuda is None:
        return ok("torch", f"{version}, a build for CPUs; no NVIDIA driver was found")
    if driver is None and available:  # as in WSL
        return ok("torch", f"{version} for CUDA {cuda}")
    if driver is None:
        seen = f"{version} for CUDA {cuda}, but there is no NVIDIA driver"
        return look("torch", seen, "runs take the CPUs here; a GPU needs its driver")
    return ok("torch", f"{version} for CUDA {cuda}, driver {driver}")


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
        return broken("NCCL", f"{shown} hangs; 2.29.3 mends that", update)
    if version < (2, 29, 3) and processor_name == "aarch64":  # release notes of NCCL 2.29.3
        seen = f"{shown} on ARM can hang without an error; 2.29.3 mends that"
        return broken("NCCL", seen, update)
    if version < (2, 26, 2):  # pytorch/pytorch#149351
        seen = f"{shown} can hang when a failed job ends; 2.26.2 mends that"
        return look("NCCL", seen, update)
    return ok("NCCL", shown)


def compiler() -> Finding:
    """Look whether kernels for this processor can be compiled."""
    found = shutil.which("g++") or shutil.which("c++")
    return judged(
        found is not None,
        "C++ compiler",
        found or "none on PATH",
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
        yield broken("output", f"{place} is no directory", "give another --out")
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
        yield broken("output", f"{place}: {error.strerror}", advice)
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


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank."""

    rank: int
    host: str
    gflops: float  # of a product of matrices
    link: float  # GB/s from the rank before it
    clock: float  # seconds by which its clock is ahead of that of rank 0


def measure_ranks(device: Device) -> tuple[list[Measured], dict[str, float]]:
    """Measure this rank, with all others; returns what each measured, and GB/s of collectives."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    matrix = torch.ones(512, 512, device=device.torch_device)
    product_s = _median_seconds(lambda: matrix @ matrix, device)
    own = Measured(
        rank=rank,
        host=platform.node(),
        gflops=2 * 512**3 / product_s / 1e9,
        link=_BYTES / _ring_seconds(rank, world, device) / 1e9 if world > 1 else math.inf,
        clock=_clock_ahead(rank, world),
    )
    every = all_gather_objects(own, None)

    speeds = {}
    if world > 1:
        sent = _numbers(device, _BYTES // 4)
        reduce_s = _median_seconds(lambda: dist.all_reduce(sent), device)
        shared = _numbers(device, _BYTES // 4 // world * world)
        others = torch.empty_like(shared)
        share_s = _median_seconds(lambda: dist.all_to_all_single(others, shared), device)
        speeds = {"all-reduce": _BYTES / reduce_s / 1e9, "all-to-all": _BYTES / share_s / 1e9}
    return every, speeds


def _median_seconds(work: Callable[[], object], device: Device) -> float:
    """The median seconds of the work, after a round that is not counted."""
    seconds = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        work()
        device.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])


def _ring_seconds(rank: int, world: int, device: Device) -> float:
    """Seconds in which each rank sends to the next one and gets the previous one's."""
    sent = _numbers(device, _BYTES // 4)
    received = torch.empty_like(sent)

    def exchange() -> None:
        work = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for each in dist.batch_isend_irecv(work):
            each.wait()

    return _median_seconds(exchange, device)


def _numbers(device: Device, count: int) -> Tensor:
    return torch.ones(count, device=device.torch_device)


def judge_ranks(measured: Sequence[Measured], speeds: dict[str, float]) -> Iterator[Finding]:
    """Look for ranks that are much slower than the others, and for clocks that differ."""
    hosts = sorted({each.host for each in measured})
    yield ok("ranks", f"{len(measured)} on {len(hosts)} {'hosts' if len(hosts) > 1 else 'host'}")
    yield from _slowest(measured, "product", "GFLOP/s", lambda each: each.gflops)
    if len(measured) > 1:
        yield from _slowest(measured, "link", "GB/s", lambda each: each.link)
    for name, speed in speeds.items():
        yield ok(name, f"{speed:.2f} GB/s, {_BYTES // 2**20} MB a rank")

    for host in hosts:
        ahead = next(each.clock for each in measured if each.host == host)
        if abs(ahead) > _LATE_S:
            way = "ahead of" if ahead > 0 else "behind"
            yield look(
                "clocks",
                f"that of {host} is {abs(ahead):.1f} s {way} that of {measured[0].host}",
                "let both follow a time server; times in logs and timelines do not fit otherwise",
            )


def _slowest(
    measured: Sequence[Measured], name: str, unit: str, speed: Callable[[Measured], float]
) -> Iterator[Finding]:
    median = statistics.median(map(speed, measured))
    slow = [each for each in measured if speed(each) < _SLOW * median]
    whom = ", ".join(f"rank {each.rank} on {each.host} {speed(each):.2f}" for each in slow)
    shown = f"median {median:.2f} {unit}"
    yield judged(
        not slow,
        name,
        f"{shown}; slow: {whom}" if slow else shown,
        "every step waits for the slowest rank: look for other programs there, for a GPU that is "
        "throttled, or for a network interface that is not the fast one (NCCL_SOCKET_IFNAME)",
    )


def _clock_ahead(rank: int, world: int) -> float:
    """Seconds by which this rank's clock is ahead of that of rank 0."""
    ahead = 0.0
    for other in range(1, world):
        for _ in range(3):  # the last one counts, since the first connects
            moment = torch.tensor([time.time()], dtype=torch.float64)
            if rank == other:
                asked = time.time()
                dist.send(moment, 0)
                dist.recv(moment, 0)
                ahead = (asked + time.time()) / 2 - float(moment)
            elif rank == 0:
                dist.recv(moment, other)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
    return ahead
