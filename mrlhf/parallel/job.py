"""The place of this process in the job: its launcher, its store, and how it joins the others.

This is the one file that reads the environment variables of the launcher. It knows neither models
nor layouts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from mrlhf.device import Device
from mrlhf.errors import ConfigError, HangError

STORE_S = 10.0  # for the store to answer, where nothing has to be waited for
_POLL_S = 0.02
_MOST_LOOKS = 4000  # a second, of all ranks together
_MOST_DIGITS = 18
T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """The place of this process in the job; `local_rank` counts on one machine."""

    rank: int
    world_size: int
    local_rank: int


def launch_alone() -> None:
    """Make this process the only rank of a job, unless a launcher has started it."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def read_launch() -> Launch:
    """Read the place of this process, and check the launcher's other variables.

    Raises:
        ConfigError: the process was not started by torchrun, or a variable of the launcher or of
            Slurm has an impossible value.
    """
    launch = read_place()

    # These are used later, but must be checked before this process joins the others.
    processes_on_this_machine()
    end_of_allocation()
    read_launch_history()
    return launch


def read_place() -> Launch:
    """Read the place of this process from the environment variables that torchrun sets.

    Raises:
        ConfigError: the process was not started by torchrun, or a variable has an impossible value.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        program = sys.argv[0]
        if not program.endswith(".py"):  # an installed command
            program = f"--no-python {Path(program).name}"
        raise ConfigError(
            f"environment variables {', '.join(missing)} are not set; "
            f"start with torchrun --nproc-per-node=N {program} (N = 1 for a single process)"
        )

    world_size = _number("WORLD_SIZE", least=1)
    _number("MASTER_PORT", least=1, most=65535)
    return Launch(
        rank=_number("RANK", most=world_size - 1, bound="WORLD_SIZE - 1"),
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", most=world_size - 1, bound="WORLD_SIZE - 1"),
    )


def speaks_without_place() -> bool:
    """Whether this process reports bad launcher variables, if `read_place` fails.

    The ranks cannot agree then. All ranks of a machine read the same variables, so the first one
    reports, and one whose own number is too high.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name, "") for name in names]
    rank, world_size, local_rank = [int(t) if t.isdecimal() else None for t in texts]
    is_too_high = rank is not None and world_size is not None and rank >= world_size
    return is_too_high or not (rank if local_rank is None else local_rank)


def end_of_allocation() -> float | None:
    """When Slurm ends the job, in seconds since 1970; None if it does not say."""
    name = "SLURM_JOB_END_TIME"
    return float(_number(name)) if name in os.environ else None


def processes_on_this_machine() -> int:
    """Number of the job's processes on this machine; 1 without a launcher."""
    return _number("LOCAL_WORLD_SIZE", least=1, default="1")


def _number(
    name: str,
    *,
    least: int = 0,
    most: int | None = None,
    bound: str | None = None,
    default: str | None = None,
) -> int:
    """The whole number in the environment variable `name`.

    Args:
        most: the largest allowed number; None: any.
        bound: the name of `most` in messages; None: the number itself.
        default: the text for a variable that is not set; without it the variable must be set.
    """
    text = os.environ[name] if default is None else os.environ.get(name, default)
    start = f"environment variable {name} is {text[:40]!r}"
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise ConfigError(f"{start}, no number; what starts the job sets it, so leave it alone")

    number = int(text)
    if number < least or (most is not None and number > most):
        highest = "" if most is None else f" and at most {bound or most}"
        if bound is not None:
            highest += f" = {most}"
        raise ConfigError(f"{start}, and must be at least {least}{highest}")
    return number


def write_error_file(message: str, moment: float) -> None:
    """Leave the message for the summary of torchrun, if it has started this process.

    The summary shows the failure with the earliest `moment`, in seconds since 1970.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    details = {"py_callstack": message, "timestamp": str(int(moment))}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))


@dataclass(frozen=True)
class LaunchHistory:
    """The job and the launcher that started this process, and those that have done so before."""

    job: str | None  # the scheduler's number of the job; None if there is no scheduler
    names: tuple[str, ...]  # of the job and of the launcher's run; the same after a restart
    again: tuple[str, ...]  # the `names` that have restarted


def read_launch_history() -> LaunchHistory:
    """Read the launch history from the environment variables of Slurm and torchrun."""
    job = os.environ.get("SLURM_JOB_ID")
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    launcher = f"torchrun {run}" if run != "none" else f"torchrun process {os.getppid()}"
    names = (launcher,) if job is None else (launcher, f"Slurm job {job}")

    again = []
    if _number("TORCHELASTIC_RESTART_COUNT", default="0") > 0:
        again.append(launcher)
    if _number("SLURM_RESTART_COUNT", default="0") > 0 and job is not None:
        again.append(names[-1])
    return LaunchHistory(job, names, tuple(again))


@dataclass(frozen=True)
class Job:
    """The job that this process has joined; nothing else uses the connection of its store."""

    rank: int
    world_size: int
    store: dist.Store


def is_store_of_launcher() -> bool:
    """Whether the launcher holds the job's store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout_s: float) -> dist.Store:
    """Make a new connection to the store of this attempt of the job.

    Raises:
        ConfigError: the process was not started by torchrun.
        HangError: there is no store within the time.
    """
    place = read_place()
    host = os.environ["MASTER_ADDR"]
    port = _number("MASTER_PORT", least=1, most=65535)

    outcome: list[dist.Store | Exception] = []

    def build() -> None:
        try:
            store = dist.TCPStore(
                host,
                port,
                is_master=place.rank == 0 and not is_store_of_launcher(),
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
            outcome.append(store)
        except (RuntimeError, ValueError) as error:
            outcome.append(error)

    # torch bounds the time until something accepts the connection, but not until it answers.
    builder = threading.Thread(target=build, name="store", daemon=True)
    builder.start()
    builder.join(timeout_s)
    result = outcome[0] if outcome else None
    if isinstance(result, dist.Store):
        return result

    if "address already in use" in str(result):
        raise ConfigError(
            f"port {port} of this machine is in use; give torchrun another --master-port, or "
            "--standalone, which chooses a free one"
        ) from result
    raise HangError(
        f"rank {place.rank} does not reach the job's store at {host}:{port} within {timeout_s:g} "
        "s; has its launcher ended?"
    ) from result


def connect_before_start(timeout_s: float) -> dist.Store:
    """A connection for keys that the processes share before they join the job; see `connect`."""
    # The count of restarts keeps the keys of two attempts apart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"mrlhf before start {attempt}", connect(timeout_s))


def init_distributed(
    device: Device, timeout_s: float, look: Callable[[], None] | None = None
) -> Job:
    """Join the job's process group: gloo for host tensors, and NCCL for tensors on a GPU.

    Args:
        timeout_s: seconds after which a collective gives up.
        look: called again and again while this process waits for the others; it may raise.

    Raises:
        ConfigError: the process was not started by torchrun.
        HangError: another process does not come in time.
    """
    launch = read_launch()
    timeout = timedelta(seconds=timeout_s)
    connections = []
    for _ in range(2):
        connection = connect(max(timeout_s, STORE_S))
        connection.set_timeout(timeout)
        connections.append(connection)
    name = _name_attempt(connections[0], launch, timeout_s, look)

    own, for_groups = (dist.PrefixStore(f"mrlhf {name}", store) for store in connections)
    backend = "gloo" if device.kind == "cpu" else "cpu:gloo,cuda:nccl"
    check_interfaces(backend)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("process groups", for_groups),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    return Job(launch.rank, launch.world_size, dist.PrefixStore("job", own))


def meet(
    connection: dist.Store, launch: Launch, timeout_s: float, look: Callable[[], None] | None
) -> dist.Store:
    """Wait for all processes of this attempt; returns a store that only they share."""
    name = _name_attempt(connection, launch, timeout_s, look)
    return dist.PrefixStore(f"mrlhf {name}", connection)


def polling_s(world_size: int, least_s: float) -> float:
    """Seconds between two looks of a rank into the job's store: `least_s`; more in large jobs."""
    # One thread serves all ranks. `Store.wait` would log two warnings each time that it runs out.
    return max(least_s, world_size / _MOST_LOOKS)


def wait_for(
    store: dist.Store,
    keys: Sequence[str],
    launch: Launch,
    timeout_s: float,
    look: Callable[[], None] | None,
) -> None:
    """Wait until other processes have set all of these keys; else a HangError."""
    latest = time.monotonic() + timeout_s
    while not store.check(list(keys)):
        if time.monotonic() >= latest:
            raise _in_vain(launch, timeout_s)
        if look is not None:
            look()
        time.sleep(polling_s(launch.world_size, _POLL_S))


def one_of_each_machine_first(
    store: dist.Store, launch: Launch, action: Callable[[bool], T], look: Callable[[], None]
) -> T:
    """Do `action(True)` on one rank of each machine, and when all have, `action(False)` elsewhere.

    The others wait however long it takes; `look` ends their wait when a rank fails.
    """
    is_first = launch.local_rank == 0
    result = action(True) if is_first else None
    if store.add("ranks that let others go on", 1) == launch.world_size:
        store.set("go on", "1")
    wait_for(store, ["go on"], launch, math.inf, look)
    return action(False) if result is None else result


def check_interfaces(backend: str) -> None:
    """Refuse a choice of network interfaces that this machine does not have.

    gloo needs every name of its list. NCCL needs one of a list of prefixes, or of names after "=";
    a list after "^" excludes names.

    Raises:
        ConfigError: an environment variable names an interface that is not there.
    """
    present = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if any(name not in present for name in chosen.split(",") if name):
        raise _no_interface("GLOO_SOCKET_IFNAME", chosen, present)

    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if "nccl" not in backend or not chosen or chosen.startswith("^"):
        return
    names = chosen.removeprefix("=").split(",")
    if chosen.startswith("="):
        is_there = any(name in present for name in names)
    else:
        is_there = any(name.startswith(tuple(names)) for name in present)
    if not is_there:
        raise _no_interface("NCCL_SOCKET_IFNAME", chosen, present)


def _no_interface(variable: str, chosen: str, present: list[str]) -> ConfigError:
    return ConfigError(
        f"environment variable {variable} is {chosen!r}, which this machine does not have; name "
        f"one of {', '.join(present)}, or unset it"
    )


def _name_attempt(
    store: dist.Store, launch: Launch, timeout_s: float, look: Callable[[], None] | None
) -> str:
    """Agree on a name that all processes of this attempt share, and no earlier attempt had.

    torchrun may keep its store when it starts the processes again. It then still holds keys of the
    last attempt, such as the addresses of its processes. torchrun's count of restarts is no name,
    since it may differ from machine to machine. So each process publishes a fresh random number,
    and rank 0 answers each number with its own.
    """
    rank = launch.rank
    mine = secrets.token_hex(8)
    store.set(f"number of rank {rank}", mine)
    numbers = [f"number of rank {other}" for other in range(launch.world_size)]
    known = [f"{mine} is known to rank {other}" for other in range(1, launch.world_size)]
    answered: set[str] = set()
    latest = time.monotonic() + timeout_s

    while time.monotonic() < latest:
        # A number may be that of a process of the last attempt, until the new one replaces it.
        if rank == 0 and store.check(numbers):
            shown = {number.decode() for number in store.multi_get(numbers)}
            for number in shown - answered:
                store.set(f"the answer to {number}", mine)
            answered |= shown
            if store.check(known):
                return mine
        elif rank > 0 and store.check([f"the answer to {mine}"]):
            name = store.get(f"the answer to {mine}").decode()
            store.set(f"{name} is known to rank {rank}", "1")
            return name
        if look is not None:
            look()
        time.sleep(polling_s(launch.world_size, _POLL_S))
    raise _in_vain(launch, timeout_s)


def _in_vain(launch: Launch, timeout_s: float) -> HangError:
    return HangError(
        f"rank {launch.rank} waited {timeout_s:g} s in vain for all {launch.world_size} processes "
        "of the job; if none has died, raise distributed.timeout_s"
    )
