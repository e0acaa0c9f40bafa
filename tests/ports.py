"""Chooses ports for programs that a test starts and that cannot choose one themselves."""

from __future__ import annotations

import random
import socket

# Linux gives higher ones to connections and to sockets that ask for any port, so that one of these
# is hardly taken between its choice and its use.
_LOWEST = 20_000
_HIGHEST = 29_999


def free_ports(count: int) -> list[int]:
    """So many ports on which nobody listens."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randint(_LOWEST, _HIGHEST)
        with socket.socket() as probe:
            is_free = probe.connect_ex(("127.0.0.1", port)) != 0
        if is_free and port not in ports:
            ports.append(port)
    return ports
