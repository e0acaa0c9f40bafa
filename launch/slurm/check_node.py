"""Checks one node of a job before anything is built on it, and prints what it runs, in one line.

The lines of all nodes must be equal behind the node's name. It knows no configuration of a run.

Usage: python launch/slurm/check_node.py --ranks N --gpus N --interface NAME --output-dir DIR
       python launch/slurm/check_node.py --address-of NAME
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import socket
import struct
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("torch", "megatron-core", "transformers", "safetensors")
BAD_INPUT = 2
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


class NodeError(Exception):
    """This node cannot run the job; the message says what to do."""


def main() -> int:
    """Check the node as the arguments say; returns the exit code."""
    parser = argparse.ArgumentParser(description="check one node of a job")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the node")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that the job has on the node")
    parser.add_argument("--interface", default="", help="network interface that must be there")
    parser.add_argument("--output-dir", type=Path, help="must be writable")
    parser.add_argument("--address-of", metavar="INTERFACE", help="print its address, and end")
    arguments = parser.parse_args()

    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        if arguments.address_of:
            line = address_of(arguments.address_of)
        else:
            line = f"{node} {check(arguments)}"
    except NodeError as error:
        sys.stderr.write(f"error: node {node}: {error}\n")
        return BAD_INPUT
    sys.stdout.write(line + "\n")
    return 0


def check(arguments: argparse.Namespace) -> str:
    """What this node runs, if it can run the job."""
    if arguments.interface:
        address_of(arguments.interface)
    if arguments.output_dir is not None:
        _check_writable(arguments.output_dir)
    _check_cpus(arguments.ranks)
    return f"{_software()} gpus={_check_gpus(arguments.ranks, arguments.gpus)}"


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface of this node."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise NodeError(
                f"interface {interface} has no IPv4 address; set INTERFACE to one of {names}"
            ) from error
    return socket.inet_ntoa(reply[20:24])


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise NodeError(
            f"cannot write to {directory} ({error.strerror}); set OUTPUT_DIR to a folder that all "
            "nodes share"
        ) from error


def _check_cpus(ranks: int) -> None:
    cpus = len(os.sched_getaffinity(0))
    if cpus < ranks:
        raise NodeError(
            f"the job has {cpus} CPUs here for {ranks} ranks; submit with --exclusive or with "
            f"--cpus-per-task={ranks} or more"
        )


def _software() -> str:
    """The versions of Python, of what mrlhf stands on, and of mrlhf's own source."""
    source = find_spec("mrlhf")
    if source is None or source.origin is None:
        raise NodeError(f"{sys.executable} finds no mrlhf; install it, or set PYTHON")

    digest = hashlib.sha256()
    for file in sorted(Path(source.origin).parent.rglob("*.py")):
        digest.update(file.read_bytes())

    versions = [f"python={platform.python_version()}", f"mrlhf={digest.hexdigest()[:12]}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name}={metadata.version(name)}")
        except metadata.PackageNotFoundError as error:
            raise NodeError(f"{sys.executable} has no {name}; install it, or set PYTHON") from error
    return " ".join(versions)


def _check_gpus(ranks: int, gpus: int) -> int:
    """The GPUs that torch sees, if they suffice."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise NodeError(f"cannot import torch: {error}") from error

    seen = torch.cuda.device_count()
    if gpus and not seen:
        raise NodeError(
            f"the job has {gpus} GPUs here, but torch sees none; check driver and build"
        )
    if seen and ranks > seen:
        raise NodeError(f"torch sees {seen} GPUs for {ranks} ranks; set RANKS_PER_NODE={seen}")
    return seen


if __name__ == "__main__":
    sys.exit(main())
