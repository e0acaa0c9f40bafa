"""Two hosts on one machine: each has its own network, host name, shared memory and processes.

A pair of virtual network interfaces joins them, as a switch joins two machines; both sides are
named `fabric0`. They share the file system. It knows nothing of mrlhf.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.slurm.packages import Unavailable, need

INTERFACE = "fabric0"
ADDRESSES = ("10.213.7.1", "10.213.7.2")

# The host's own name, loopback and /dev/shm; then the command.
_ENTER = """
hostname "$0"
ip link set lo up
mount -t tmpfs -o size=256m tmpfs /dev/shm
exec "$@"
"""


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """The names of two hosts that reach each other, for as long as the context lasts.

    Raises:
        Unavailable: they cannot be made.
    """
    need(["ip", "unshare", "mount", "hostname"], ["iproute2"])
    hosts = (f"host-a-{os.getpid()}", f"host-b-{os.getpid()}")

    try:
        for host in hosts:
            _do(f"ip netns add {host}")
        ends = [f"netns {host} name {INTERFACE}" for host in hosts]
        _do(f"ip link add {ends[0].split(' name ')[1]} netns {hosts[0]} type veth peer {ends[1]}")
        for host, address in zip(hosts, ADDRESSES, strict=True):
            _do(f"ip -n {host} address add {address}/24 dev {INTERFACE}")
            _do(f"ip -n {host} link set {INTERFACE} up")
        _do(shlex.join(command_on(hosts[0], ["true"])))
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)


def command_on(host: str, command: list[str]) -> list[str]:
    """The command that runs `command` on a host; all its processes end with it."""
    enter = ["unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
    return [
        "ip",
        "netns",
        "exec",
        host,
        *enter,
        "--mount-proc",
        "bash",
        "-ec",
        _ENTER,
        host,
        *command,
    ]


def _do(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{command}` failed: {(done.stderr or done.stdout).strip()}")
