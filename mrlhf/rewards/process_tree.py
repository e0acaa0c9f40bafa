"""The processes that descend from a process, and their end; read from /proc.

On a machine without /proc there are none to be seen. This file does not know what they run.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

_MOST_ROUNDS = 1000


def descendants(pid: int) -> list[int]:
    """The living processes that descend from `pid` or are in its session; not `pid` itself.

    A process whose parent has died descends from `pid` only if `pid` adopts orphans.
    """
    parents: dict[int, int] = {}
    family = {pid}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold any character: state, parent, group, session.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == pid:
                family.add(int(entry.name))

    known = 0
    while known < len(family):
        known = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    return sorted(family - {pid})


def kill_tree(pid: int) -> None:
    """Kill `pid`, a child of this process that leads a session, and all that descend from it."""
    # It adopts orphans as long as it is there, and must not start others meanwhile.
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    for _ in range(_MOST_ROUNDS):
        living = descendants(pid)
        if not living:
            break
        for other in living:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)

    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
