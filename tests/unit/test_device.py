"""Device choice, and the launcher's environment."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from torch.torch_version import TorchVersion

from mrlhf import nvidia
from mrlhf.device import (
    Device,
    dtype_on,
    peak_tflops,
    pick_device,
    seed_everything,
    set_variables_of_torch,
)
from mrlhf.errors import ConfigError
from mrlhf.parallel.job import check_interfaces, read_launch, speaks_without_place
from mrlhf.run.library_variables import set_allocator

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", torch.device("cpu"))
OF_TORCH = ("THP_MEM_ALLOC_ENABLE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
GPU = Device("cuda", torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this machine says its driver's version; it has no GPU, and a compiler."""
    file = tmp_path / "driver"
    monkeypatch.setattr(nvidia, "_DRIVER", file)
    monkeypatch.setattr(nvidia, "_DEVICES", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("sysconfig.get_path", lambda name, scheme: str(tmp_path))
    (tmp_path / "Python.h").touch()
    for name in ("CUDA_VISIBLE_DEVICES", "CC"):
        monkeypatch.delenv(name, raising=False)
    return file


@pytest.mark.parametrize(
    ("cuda", "written", "words"),
    [
        (None, "535.161.07", "is a build without CUDA, and driver 535.161.07 has GPUs; install"),
        ("13.0", "535.161.07", "needs driver 580.65 or newer; here it is 535.161.07; have"),
        ("12.8", "580.82.07", "finds no GPU, with driver 580.82.07; look at CUDA_VISIBLE_DEVICES"),
        (None, None, "driver of unknown version has GPUs"),  # no file of the driver's can be read
    ],
)
def test_the_cpus_do_not_take_the_place_of_gpus_in_silence(
    cuda: str | None,
    written: str | None,
    words: str,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if written is not None:
        text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {written}  Sat Feb 17 22:55:48 UTC"
        driver.write_text(f"{text}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1)\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert pick_device("auto", local_rank=0) == CPU  # as in a container that was given no GPU
    assert not caplog.messages

    (nvidia._DEVICES / "nvidia3").touch()
    if cuda is None:
        assert pick_device("auto", local_rank=0) == pick_device("auto", local_rank=1) == CPU
        (said,) = caplog.messages
    else:
        with pytest.raises(ConfigError) as refusal:
            pick_device("auto", local_rank=0)
        said = str(refusal.value)
    assert words in said and "computes on CPUs" in said and "\n" not in said

    assert pick_device("cpu", local_rank=0) == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert pick_device("auto", local_rank=0) == CPU


def test_a_gpu_needs_a_compiler_and_the_header_of_python(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert nvidia.fault_of_compiler() is None
    (driver.parent / "Python.h").unlink()
    seen, advice = nvidia.fault_of_compiler() or ("", "")
    assert "Python.h is missing" in seen and re.match(r"install python3\.\d+-dev ", advice)
    monkeypatch.setattr("shutil.which", lambda name: None)
    seen, advice = nvidia.fault_of_compiler() or ("", "")
    assert "there is no C compiler (gcc, clang)" in seen and "install gcc" in advice


def test_pick_device_on_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto", local_rank=3) == pick_device("cpu", local_rank=0) == CPU
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        pick_device("cuda", local_rank=0)


@pytest.mark.parametrize(
    ("engine", "version", "has_gpu", "given", "becomes"),
    [
        ("native", "2.13.0+cu130", True, None, "expandable_segments:True"),
        ("native", "2.13.0+cu130", True, "PYTORCH_ALLOC_CONF", "set"),
        ("native", "2.13.0+cu130", True, "PYTORCH_CUDA_ALLOC_CONF", None),
        ("native", "2.13.0+cpu", False, None, None),
        ("native", "2.12.1+cu130", True, None, None),
        ("vllm", "2.13.0+cu130", True, None, None),
    ],
)
def test_memory_of_a_gpu_grows_in_place_where_the_engine_allows_it(
    monkeypatch: pytest.MonkeyPatch,
    engine: Literal["native", "vllm"],
    version: str,
    has_gpu: bool,
    given: str | None,
    becomes: str | None,
) -> None:
    environment = {} if given is None else {given: "set"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    set_allocator(engine)
    assert environment.get("PYTORCH_ALLOC_CONF") == becomes


def test_a_process_on_a_cpu_keeps_the_memory_that_it_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    glibc = SimpleNamespace(mallopt=lambda parameter, value: calls.append((parameter, value)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (*OF_TORCH, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.nns=4")

    for library in (glibc, SimpleNamespace()):  # other C libraries have no mallopt
        monkeypatch.setattr(ctypes, "CDLL", lambda name, library=library: library)
        assert pick_device("cpu", local_rank=0) == CPU

    assert calls == [(-3, 33554432), (-1, -1)]  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
    set_variables_of_torch()
    assert [os.environ[name] for name in OF_TORCH] == ["1", "512", "512"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "1048576"),
        ("GLIBC_TUNABLES", "glibc.rtld.nns=4:glibc.malloc.mmap_threshold=1048576"),
    ],
)
def test_what_the_user_says_of_memory_stays(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library(name: str | None) -> None:
        raise AssertionError("glibc's limits must not change")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    monkeypatch.setenv(name, value)
    for variable in OF_TORCH:
        monkeypatch.setenv(variable, "0")

    assert pick_device("cpu", local_rank=0) == CPU
    set_variables_of_torch()
    assert [os.environ[variable] for variable in OF_TORCH] == ["0", "0", "0"]


def test_pick_device_on_a_machine_with_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("auto", local_rank=1) == Device("cuda", torch.device("cuda", 1))
    assert current == [1]
    with pytest.raises(ConfigError, match="local rank 2 has no GPU of its own: torch sees 2"):
        pick_device("cuda", local_rank=2)
    with pytest.raises(ConfigError, match="hide it with CUDA_VISIBLE_DEVICES=''"):
        pick_device("cpu", local_rank=0)


def test_dtype() -> None:
    assert dtype_on("auto", CPU.kind) is torch.float32
    assert dtype_on("auto", GPU.kind) is torch.bfloat16
    assert dtype_on("bfloat16", CPU.kind) is torch.bfloat16
    assert dtype_on("float32", GPU.kind) is torch.float32


def test_launch_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    launch = read_launch()
    assert (launch.rank, launch.world_size, launch.local_rank) == (5, 8, 1)

    monkeypatch.delenv("RANK")
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(
        ConfigError, match="RANK, MASTER_PORT are not set; start with torchrun --nproc-per-node"
    ):
        read_launch()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("RANK", "8", "RANK is '8', and must be at least 0 and at most WORLD_SIZE - 1 = 7"),
        ("RANK", "-1", "RANK is '-1', no number; what starts the job sets it, so leave it alone"),
        ("LOCAL_RANK", "9", "LOCAL_RANK is '9', and must be at least 0 and at most WORLD_SIZE"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is '0', and must be at least 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE is '', no number"),
        ("MASTER_PORT", "0", "MASTER_PORT is '0', and must be at least 1 and at most 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT is '65536', and must be at least 1 and at most"),
        ("LOCAL_WORLD_SIZE", "x", "LOCAL_WORLD_SIZE is 'x', no number"),
        ("SLURM_JOB_END_TIME", "nan", "SLURM_JOB_END_TIME is 'nan', no number"),
        ("SLURM_JOB_END_TIME", "9" * 5000, "SLURM_JOB_END_TIME is '999"),
        ("SLURM_RESTART_COUNT", "once", "SLURM_RESTART_COUNT is 'once', no number"),
        ("TORCHELASTIC_RESTART_COUNT", "-1", "TORCHELASTIC_RESTART_COUNT is '-1', no number"),
    ],
)
def test_values_that_no_launcher_gives(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    store = {"MASTER_ADDR": "x", "MASTER_PORT": "65535"}
    for variable, text in {**given, **store, name: value}.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigError) as caught:
        read_launch()
    assert str(caught.value).startswith(f"environment variable {message}")
    assert "\n" not in str(caught.value)


def test_ranks_that_cannot_agree_speak_once_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(**given: str) -> bool:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(name, given.get(name, "x"))
        return speaks_without_place()

    assert speak(RANK="0", LOCAL_RANK="0") and not speak(RANK="5", LOCAL_RANK="1")
    assert speak(LOCAL_RANK="0", WORLD_SIZE="8") and not speak(LOCAL_RANK="1", WORLD_SIZE="8")
    assert speak(RANK="0", WORLD_SIZE="8") and not speak(RANK="5", WORLD_SIZE="8")
    assert speak(RANK="8", WORLD_SIZE="8", LOCAL_RANK="3"), "its own number is wrong"
    assert speak()


@pytest.mark.parametrize(
    ("variable", "value", "backend", "is_known"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "gloo", True),
        ("GLOO_SOCKET_IFNAME", "lo,none0", "gloo", False),
        ("NCCL_SOCKET_IFNAME", "none", "gloo", True),  # no NCCL on CPUs
        ("NCCL_SOCKET_IFNAME", "none", "cpu:gloo,cuda:nccl", False),
        ("NCCL_SOCKET_IFNAME", "none,l", "cpu:gloo,cuda:nccl", True),  # prefixes
        ("NCCL_SOCKET_IFNAME", "=l", "cpu:gloo,cuda:nccl", False),
        ("NCCL_SOCKET_IFNAME", "=none,lo", "cpu:gloo,cuda:nccl", True),
        ("NCCL_SOCKET_IFNAME", "^none", "cpu:gloo,cuda:nccl", True),
    ],
)
def test_network_interfaces_must_be_there(
    variable: str, value: str, backend: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setenv(variable, value)
    if is_known:
        check_interfaces(backend)
        return
    with pytest.raises(ConfigError, match=f"{variable} is '{value}', .*name one of lo, eth0"):
        check_interfaces(backend)


def test_peak_memory_on_the_cpu_counts_what_was_touched() -> None:
    before = CPU.max_memory_allocated()
    # With four bytes an element this is more than the process has ever held.
    block = torch.ones(before // 4 + 2**24)
    CPU.synchronize()
    assert CPU.max_memory_allocated() >= before + 2**24
    del block


def test_the_same_seed_gives_the_same_numbers() -> None:
    seed_everything(7)
    first = torch.rand(4)
    seed_everything(7)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100 80GB PCIe", 312.0, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.5, 51.2),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA H200", 989.4, 66.9),
        ("NVIDIA GH200 480GB", 989.4, 66.9),
        ("NVIDIA H20", 148.0, 44.0),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA GB200", 2500.0, 80.0),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA L40", 181.05, 90.5),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 4090 D", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA RTX A4000", None, None),
        ("Tesla V100-SXM2-16GB", None, None),
    ],
)
def test_peak_of_known_cards(name: str, bfloat16: float | None, float32: float | None) -> None:
    assert peak_tflops(name, torch.bfloat16) == peak_tflops(name, torch.float16) == bfloat16
    assert peak_tflops(name, torch.float32) == float32
    assert peak_tflops(name, torch.int8) is None


def test_the_peak_is_that_of_the_devices_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: {0: "NVIDIA L4"}[device.index]
    )
    assert GPU.peak_tflops(torch.bfloat16) == 121.0
    assert CPU.peak_tflops(torch.float32) is None
