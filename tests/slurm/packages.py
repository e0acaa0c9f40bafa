"""Installs programs from Debian's packages where a test needs them and may install them."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock


class Unavailable(Exception):
    """Something that a test needs cannot be had here; the message says why."""


def need(programs: Sequence[str], packages: Sequence[str]) -> None:
    """Install the packages with `apt-get`, if one of the programs is missing.

    Raises:
        Unavailable: it cannot be done.
    """
    if platform.system() != "Linux":
        raise Unavailable(f"this needs Linux, and here is {platform.system()}")
    if os.geteuid() != 0:
        raise Unavailable("this needs root")
    # Another worker of the tests may need packages at the same time.
    with FileLock(Path(tempfile.gettempdir()) / "mrlhf-test-packages.lock"):
        if _missing(programs):
            _install(programs, packages)


def _install(programs: Sequence[str], packages: Sequence[str]) -> None:
    if shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(_missing(programs))} missing, and there is no apt-get")

    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    get = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            [*get, *arguments], env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise Unavailable(f"apt-get {arguments[0]} failed: {lines[-1] if lines else ''}")
    if _missing(programs):
        raise Unavailable(f"apt-get has not brought {', '.join(_missing(programs))}")


def _missing(programs: Sequence[str]) -> list[str]:
    return [name for name in programs if shutil.which(name) is None]
