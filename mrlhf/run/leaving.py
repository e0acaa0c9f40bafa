"""Ends a process of the job at once, and when its launcher is gone.

This file uses the standard library alone. The package imports it before torch, so that the launcher
is known from the start. It does not know what the process does.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

logger = logging.getLogger(__name__)

ENDED_BY_SIGTERM = 143

_LOOK_EVERY_S = 1.0
_SAY_S = 2.0
_STOPPED_BEFORE_START = 75  # nothing is lost: start the same command again
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_LAUNCHERS = re.compile(r"(mrlhf-)?(torchrun|generate|train[-_](dpo|ppo|rm|sft))(\.py)?")
# This process and its parent, when the package was imported; a launcher may go while torch is.
_AT_IMPORT = (os.getpid(), os.getppid())


def leave(code: int, why: str = "") -> NoReturn:
    """End the process at once, even if nobody reads its output; log the error `why` first."""
    # A pipe that is full, or a lock that a blocked thread holds, must not keep the process.
    limit = threading.Timer(_SAY_S, os._exit, [code])
    limit.daemon = True
    limit.start()
    try:
        if why:
            logger.error("%s", why)
        logging.shutdown()
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        # No destructor runs: one might wait for ranks that hang in a collective.
        os._exit(code)


def end_on_signals() -> None:
    """Let a stop signal that is not ignored end this process with one line."""
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end_before_start)


def is_launcher() -> bool:
    """Whether this process launches or trains, and does not merely import the package."""
    words = [os.path.basename(sys.argv[0] if sys.argv else ""), *sys.argv[1:2]]
    # As `python -m mrlhf` imports the package, its name stands in `orig_argv` alone.
    if words[0] == "mrlhf" or (words[0] == "-m" and "mrlhf" in sys.orig_argv):
        words = words[1:]
    return bool(words) and bool(_LAUNCHERS.fullmatch(words[0]))


def _end_before_start(number: int, frame: FrameType | None) -> None:
    # One rank speaks for all, since all of them get the signal.
    if os.environ.get("RANK", "0") == "0":
        name = signal.Signals(number).name
        text = f"stopped early: {name} came when nothing was to save; start it again\n"
        os.write(2, text.encode())
    os._exit(_STOPPED_BEFORE_START)


def end_with_launcher() -> None:
    """End this process soon after its parent has ended, even while the main thread waits."""
    threading.Thread(target=_look_for_launcher, name="launcher", daemon=True).start()


def _look_for_launcher() -> None:
    pid, parent = _AT_IMPORT
    if pid != os.getpid():  # a fork of the process that has imported this file
        parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    leave(ENDED_BY_SIGTERM, "the launcher has gone, so this rank ends")
