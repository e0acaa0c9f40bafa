"""A thread of the main rank that shows the board: in `status.json`, and on a terminal.

The main thread may be in one phase for long, and it must not wait for a slow disk or terminal. This
file does not know the contents of the board.
"""

from __future__ import annotations

import logging
import threading
import time

from mrlhf.run.board import Board, State
from mrlhf.run.status import StatusFile
from mrlhf.run.view import View

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_WRITE_S = 1.0  # from one writing of the status to the next, at least
_ALIVE_S = 10.0  # and at most, so that a reader can tell whether the run is alive


class Monitor:
    """Shows the board from `start` to `close`."""

    def __init__(self, board: Board, view: View | None) -> None:
        self._board = board
        self._file: StatusFile | None = None
        self._view = view
        self._written = 0.0
        self._shown: tuple[object, ...] = ()
        self._is_failing = False
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def start(self) -> None:
        """Open the view, and start the thread."""
        if self._view is not None:
            self._view.show()
            self._board.has_view = True
        self._thread.start()

    def write_to(self, file: StatusFile) -> None:
        """Write the first status; from then on the run's `status.json` is kept fresh."""
        self._file = file
        self.write()

    def write(self) -> None:
        """Write the status now. A failure is logged once, and the run continues."""
        if self._file is None:
            return
        with self._writing:
            self._shown = self._place()
            self._written = time.monotonic()
            try:
                self._file.write(self._board)
            except OSError as error:
                if not self._is_failing:
                    logger.warning("cannot write the status of the run: %s", error)
                self._is_failing = True
            else:
                self._is_failing = False

    def close_view(self) -> None:
        """Stop showing; later log lines appear below the last view."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._view is not None:
            self._view.close()
            self._board.has_view = False

    def end(self, state: State, message: str = "") -> None:
        """Write how the run has ended; any thread may call it."""
        self._closed.set()
        self._board.state = state
        self._board.message = message
        self.write()

    def _run(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self._view is not None:
                self._view.show()
            since = time.monotonic() - self._written
            has_changed = self._place() != self._shown
            if since >= _ALIVE_S or (has_changed and since >= _WRITE_S):
                self.write()

    def _place(self) -> tuple[object, ...]:
        """A value that changes when the status must be written again."""
        phases = self._board.phases
        return self._board.state, self._board.step, phases.entered, phases.progress
