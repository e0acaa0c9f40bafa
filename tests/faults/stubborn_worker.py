"""A worker for `test_launcher`: what it does stands in its arguments. It imports no torch.

Arguments: a directory for its notes, and what to do at the start and on a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def note(directory: Path, text: str) -> None:
    """Append a line to this rank's file."""
    with (directory / f"rank_{os.environ['RANK']}.txt").open("a") as file:
        file.write(f"{text}\n")


def main() -> None:
    directory = Path(sys.argv[1])
    behaviour = sys.argv[2]
    rank = int(os.environ["RANK"])

    def on_signal(number: int, frame: FrameType | None) -> None:
        note(directory, signal.Signals(number).name)
        if behaviour == "saves":
            time.sleep(0.5 * rank)  # the last rank ends later
            note(directory, "saved")
            os._exit(75)

    if behaviour == "imports":
        note(directory, "imports")
        while not (directory / "go").exists():
            time.sleep(0.05)
        behaviour = "saves"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, on_signal)
    note(directory, f"started, attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}")

    if behaviour == "tells and exits with 1" and rank == 1:
        sys.stderr.write("the cause\n")
        sys.stderr.flush()
        details = {"py_callstack": "the cause", "timestamp": str(int(time.time()))}
        message = {"message": {"message": "the cause", "extraInfo": details}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(message))
        behaviour = "exits with 1"
    if behaviour.startswith("exits with ") and rank == 1:
        os._exit(int(behaviour.removeprefix("exits with ")))
    if behaviour == "fails once":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os._exit(3)
        behaviour = "saves"
    if behaviour == "all exit with 2":
        os._exit(2)
    if behaviour == "succeeds":
        return
    # The launcher has held these back.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
