"""Checks that a test leaves neither processes nor names in shared memory behind.

Other tests may run beside it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_MEMORY = Path("/dev/shm")
_LIMIT_S = 1200.0


def assert_nothing_is_left(root: Path) -> None:
    """No process that names `root` stays alive, and no file stays in the shared memory.

    A worker of a killed rank ends by itself a moment later, when its socket closes.
    """
    deadline = time.monotonic() + _LIMIT_S
    while (left := _processes_naming(root)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes are left: {left}"
    assert_no_memory_is_left()


def assert_no_memory_is_left() -> None:
    """No file that is now in the shared memory stays there.

    Ranks name what they share for the moment in which they open it.
    """
    deadline = time.monotonic() + _LIMIT_S
    left = _memory_names()
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left &= _memory_names()
    assert not left, f"names are left in shared memory: {left}"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that its own parent has yet to collect does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_all_end(*pids: int) -> None:
    """All processes end by themselves; those that do not are killed."""
    deadline = time.monotonic() + _LIMIT_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes are left: {left}"


def _memory_names() -> set[str]:
    names = {path.name for path in _MEMORY.iterdir()}
    return {name for name in names if name.startswith(("mrlhf", "torch_"))}


def _processes_naming(root: Path) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if str(root) in command:
            found.append(f"{folder.name}: {command}")
    return found
