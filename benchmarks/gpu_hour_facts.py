"""Says what a machine has, and which ways of computing a small model takes on it.

    python benchmarks/gpu_hour_facts.py --json FILE

The small model is trained and generates. "operators" are those of this package and the attentions
that ran. A warning tells if a slower way was taken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu import decode, train
from gpu_record import write_json
from torch.profiler import ProfilerActivity, profile

from mrlhf.device import Device, pick_device

PACKAGES = (
    *("torch", "triton", "megatron-core", "transformers", "transformer-engine", "apex", "vllm"),
    *("flash-attn", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "pydantic"),
)


def main() -> None:
    """Write the facts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    file: Path = parser.parse_args().json

    facts = machine()
    write_json(file, facts)  # of worth even if the small model fails
    facts["operators"] = ", ".join(operators(pick_device("auto", local_rank=0)))
    write_json(file, facts)


def machine() -> dict[str, Any]:
    """Driver, GPUs, how they are linked, and versions."""
    cuda = torch.version.cuda is not None and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "links": _output("nvidia-smi", "topo", "-m"),
        "gpus": [
            str(torch.cuda.get_device_properties(index))
            for index in range(torch.cuda.device_count() if cuda else 0)
        ],
        "cpus": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": ", ".join(f"{name} {_version(name)}" for name in PACKAGES),
    }


def operators(device: Device) -> list[str]:
    """What a small model takes in bfloat16, in updates and in decoding."""
    backend = "gloo" if device.kind == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for measure in (train, decode):
            list(measure("tiny", device))
    dist.destroy_process_group()

    names = {event.key for event in profiler.key_averages() if "evaluate_function" not in event.key}
    return sorted(
        name for name in names if re.search("mrlhf::|attention|attn", name, re.IGNORECASE)
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    main()
