"""Keeps a second job out of an output directory while the first one lives, on any file system.

`output_dir/.lock/` holds one small numbered file for each job; the file with the highest number
names the holder. To take the directory, a job creates the file with the next number. A file system
lets exactly one job create a file of a given name, so one of several newcomers wins, and none ever
touches the file of another living job.

The holder touches its file again and again. A job that was killed stops doing so, and another that
has watched the file for long enough takes the directory. No clock is compared with that of another
machine, and no `flock` is needed, which some network file systems lack. A job that is refused
leaves the directory as it found it.

This file knows neither the directory's contents nor ranks: one process of a job holds the lock.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from mrlhf.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
MISSED_BEATS = 6
_FOLDER = ".lock"
_FILE = re.compile(r"(\d{6,})\.json")
_RELEASED = 0  # the touch of a file that could not say so otherwise


@dataclass(frozen=True)
class Owner:
    """The process that holds an output directory, or held it."""

    token: str  # random, new each time that a lock is taken
    host: str  # name of its machine
    pid: int  # its process
    # Distinguishes it from any other on its machine, see `_process`; "" if nothing does.
    process: str
    job: str | None  # the scheduler's name of the job; None if there is no scheduler
    since: str  # local time at which it took the directory, for people
    interval_s: float  # seconds between two touches of its file
    released: bool = False  # whether it has given the directory back

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.pid}{job} on host {self.host}, since {self.since}"


class DirectoryLock:
    """The right of one job to write into an output directory."""

    def __init__(
        self,
        directory: Path,
        job: str | None,
        on_lost: Callable[[str], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Prepare the lock; nothing is written yet.

        If another job has taken the directory, `on_lost` is called in a thread of the lock, with a
        message; it must end the process. `job` and `interval_s` are those of `Owner`.
        """
        self._directory = directory
        self._folder = directory / _FOLDER
        self._on_lost = on_lost

        self._owner = Owner(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            pid=os.getpid(),
            process=_process(os.getpid()),
            job=job,
            since=datetime.now().astimezone().isoformat(" ", "seconds"),
            interval_s=interval_s,
        )

        self._file: Path | None = None
        self._made: list[Path] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="output-dir-lock", daemon=True)

    def living_holder(self) -> Owner | None:
        """The present holder of the directory, if one can be seen without waiting or writing."""
        newest = self._newest()
        touch = _touched(self._path(newest)) if newest else None
        owner = _read(self._path(newest)) if newest else None
        if touch is None or owner is None or owner.released:
            return None
        lives = _lives(owner)
        if lives is None:
            lives = time.time() - touch / 1e9 <= MISSED_BEATS * owner.interval_s
        return owner if lives else None

    def acquire(self) -> None:
        """Take the directory.

        It returns at once if nobody holds it, or if the holder ran on this machine and is dead. For
        a holder on another machine it waits for one touch, or for six missing ones.

        Raises:
            ConfigError: another living process holds the directory.
            OSError: the directory cannot be written.
        """
        assert self._file is None, "a lock is taken once"
        folders = (self._folder, *self._folder.parents)
        self._made = [folder for folder in folders if not folder.exists()]
        try:
            self._file = self._take()
        finally:
            if self._file is None:
                self._remove_made()
        self._thread.start()

    def _take(self) -> Path:
        """Create the next lock file after the last holder has ended."""
        file: Path | None = None
        while file is None:
            newest = self._newest()
            if newest:
                self._wait_for_end(newest)
            if self._newest() == newest:  # it has not withdrawn, and left its number to another
                file = self._create(newest + 1)
        return file

    def verify(self) -> None:
        """Raise a CheckpointError if another job has the directory; OSError if none can tell."""
        assert self._file is not None, "verify() before acquire()"
        owner = _read(self._file)
        newest = self._newest()
        if newest == _number(self._file) and owner is not None and owner.token == self._owner.token:
            return

        other = _read(self._path(newest)) if newest else None
        if other is not None:
            raise CheckpointError(
                f"output directory {self._directory} was taken by {other}; this run ends, so that "
                "only one writes there"
            )
        raise CheckpointError(
            f"output directory {self._directory} lost its lock file: it was deleted or replaced "
            "during the run, and with it the metrics and checkpoints that this run had written; "
            "this run ends"
        )

    def remove_earlier(self) -> None:
        """Remove the files of earlier jobs; from then on this one cannot withdraw."""
        assert self._file is not None, "remove_earlier() before acquire()"
        for path in self._folder.iterdir():
            match = _FILE.fullmatch(path.name)
            if match and int(match[1]) < _number(self._file):
                path.unlink(missing_ok=True)

    def withdraw(self) -> None:
        """Leave the directory as it was before `acquire`; nothing has been done in it."""
        if self._stop():
            assert self._file is not None
            with suppress(CheckpointError, OSError):
                self.verify()
                self._file.unlink()
            self._remove_made()

    def release(self) -> None:
        """Give the directory back; a second call does nothing."""
        if not self._stop():
            return
        assert self._file is not None
        temporary = self._folder / f"{self._owner.token}.tmp"

        try:
            self.verify()
            temporary.write_text(_text(replace(self._owner, released=True)), encoding="utf-8")
            # The file stays, so that its number is not used again.
            temporary.replace(self._file)
        except CheckpointError:
            return
        except OSError:  # without room the file can still be marked
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                os.utime(self._file, ns=(_RELEASED, _RELEASED))

    def _stop(self) -> bool:
        """Stop touching the file; returns whether this lock was held until now."""
        if self._file is None or self._closing.is_set():
            return False
        self._closing.set()
        self._thread.join(MISSED_BEATS * self._owner.interval_s)
        return True

    def _remove_made(self) -> None:
        """Remove the folders that this lock has made, if they are empty."""
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def _beat(self) -> None:
        """Touch the file until the lock is released or lost."""
        assert self._file is not None
        while not self._closing.wait(self._owner.interval_s):
            try:
                self.verify()
                os.utime(self._file)
            except CheckpointError as error:
                self._on_lost(str(error))
                return
            except OSError as error:
                logger.warning("cannot touch the lock file %s: %s", self._file, error)

    def _newest(self) -> int:
        """The highest number of a lock file; 0 if there is none."""
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return 0
        numbers = [int(match[1]) for match in map(_FILE.fullmatch, names) if match]
        return max(numbers, default=0)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.json"

    def _create(self, number: int) -> Path | None:
        """Create the lock file of this number; None if another job was faster."""
        path = self._path(number)
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            return None
        try:
            with file:
                file.write(_text(self._owner))
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # other jobs would wait for a file that names no owner
            path.unlink(missing_ok=True)
            raise

        # A newcomer that slept since it looked may find its number free again, because the jobs
        # after it have come and tidied up.
        if self._newest() != number:
            path.unlink(missing_ok=True)
            return None
        return path

    def _wait_for_end(self, number: int) -> None:
        """Return once the holder with this number has ended; raise ConfigError if it lives."""
        path = self._path(number)
        first_touch = _touched(path)
        began = time.monotonic()
        is_said = False
        while True:
            touch = _touched(path)
            owner = _read(path)
            if touch in (None, _RELEASED) or (owner is not None and owner.released):
                return
            lives = None if owner is None else _lives(owner)
            if lives or touch != first_touch:
                raise self._refusal(owner)

            interval_s = self._owner.interval_s if owner is None else owner.interval_s
            silent_s = time.monotonic() - began
            if lives is False or silent_s > MISSED_BEATS * interval_s:
                why = "is dead" if lives is False else f"was silent for {silent_s:.0f} s"
                who = owner or "another process"
                logger.warning("%s held %s and %s, so it is taken", who, self._directory, why)
                return

            if not is_said:
                is_said = True
                logger.info(
                    "waiting for a sign of life of %s, which holds %s", owner, self._directory
                )
            time.sleep(interval_s / 10)

    def _refusal(self, owner: Owner | None) -> ConfigError:
        return ConfigError(
            f"trainer.output_dir {self._directory} is in use by {owner or 'another process'}; wait "
            "for its end, end it, or give this run another trainer.output_dir"
        )


def _number(path: Path) -> int:
    return int(path.stem)


def _text(owner: Owner) -> str:
    return json.dumps(asdict(owner), indent=1) + "\n"


def _read(path: Path) -> Owner | None:
    """The owner that a lock file names; None if the file is gone or incomplete."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        return Owner(process=str(stated.pop("process")), **stated)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _touched(path: Path) -> int | None:
    """When a file was last touched, nanoseconds on its file system's clock; None if it is gone."""
    try:
        # A network file system asks its server when a file is opened, and may not for a mere stat.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _lives(owner: Owner) -> bool | None:
    """Whether the owner's process lives; None if this machine cannot tell."""
    here = _process(os.getpid()).split()
    if not here or owner.host != socket.gethostname() or owner.process.split()[:1] != here[:1]:
        return None
    return _process(owner.pid) == owner.process


def _process(pid: int) -> str:
    """The pid namespace and the start time of process `pid`; "" if it is dead or /proc is missing.

    Pids are used again, and containers with one host name number their processes alike.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")
        # After the name, which may hold any character: the state, and 19 fields on, the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else f"{namespace} {fields[19]}"
