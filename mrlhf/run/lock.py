"""Keeps a second job out of an output directory while the first one lives, on any file system.

`output_dir/.lock/` holds one small file for each job, numbered in the order in which the jobs came;
the file with the highest number tells who holds the directory. To take the directory, a job creates
the file with the next number. A file system lets exactly one job create a file of a given name, so
of several newcomers one wins, and no newcomer ever touches the file of another job that lives.

The holder touches its file again and again. A job that was killed stops doing so, and another may
then take the directory. Ages are read from the file system's own clock, since the clocks of two
machines differ. The lock needs no `flock`, which not every network file system has.

A job that is refused withdraws: it leaves the directory as it found it.

This file does not know what the directory holds, nor ranks: one process of a job holds the lock.
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


@dataclass(frozen=True)
class Owner:
    """Who holds an output directory, or held it.

    Attributes:
        token: random, made anew each time that a lock is taken.
        host: name of its machine.
        pid: its process.
        process: tells this process from any other: the boot of the machine, the namespace of
            process numbers, and when the process started.
        job: what the scheduler calls the job; None if there is no scheduler.
        since: local time at which it took the directory, for people.
        interval_s: seconds between two touches of its file.
        released: whether it has given the directory back.
    """

    token: str
    host: str
    pid: int
    process: tuple[str, str, str]
    job: str | None
    since: str
    interval_s: float
    released: bool = False

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

        Args:
            directory: the output directory; `acquire` creates it if it is missing.
            job: what the scheduler calls this job.
            on_lost: called in a thread of the lock, with a message, if another job has taken the
                directory; it must end the process.
            interval_s: seconds between two touches of the lock's file. A holder on another machine
                counts as dead after six that did not come.
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
        """Who holds the directory now, as far as can be seen without a wait or a write."""
        newest = self._newest()
        touch = _touched(self._path(newest)) if newest else None
        owner = _read(self._path(newest)) if newest else None
        if touch is None or owner is None or owner.released:
            return None
        if _is_here(owner):
            lives = _process(owner.pid) == owner.process
        else:
            lives = time.time() - touch / 1e9 <= MISSED_BEATS * owner.interval_s
        return owner if lives else None

    def acquire(self) -> None:
        """Take the directory.

        It returns at once if nobody holds it, or if the holder ran on this machine and is dead.
        If the holder is on another machine, it waits for the holder's next touch, or for six
        touches that do not come.

        Raises:
            ConfigError: another process holds the directory, and lives.
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
        """Create the lock file after that of the last holder, who has ended."""
        file: Path | None = None
        while file is None:
            newest = self._newest()
            if newest:
                self._wait_for_end(newest)
            if self._newest() == newest:  # it has not withdrawn, and left its number to another
                file = self._create(newest + 1)
        return file

    def verify(self) -> None:
        """Make sure that the directory still belongs to this process.

        Raises:
            CheckpointError: another job has taken it, or the lock's file is gone.
            OSError: the file system does not answer.
        """
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
        """Give the directory back as it was before `acquire`, in which nothing was done."""
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
        except OSError:  # without room the file can still look as old as that of a dead job
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                os.utime(self._file, (0, 0))

    def _stop(self) -> bool:
        """Touch the file no more; returns whether this lock was held until now."""
        if self._file is None or self._closing.is_set():
            return False
        self._closing.set()
        self._thread.join(MISSED_BEATS * self._owner.interval_s)
        return True

    def _remove_made(self) -> None:
        """Remove the folders that this lock has made, if nothing lies in them."""
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
        except OSError:  # a file without its owner would be waited for, as if he lived
            path.unlink(missing_ok=True)
            raise

        # A newcomer that slept since it looked may find its number free again, because the jobs
        # after it have come and tidied up.
        if self._newest() != number:
            path.unlink(missing_ok=True)
            return None
        return path

    def _wait_for_end(self, number: int) -> None:
        """Return once the holder with this number has ended.

        Raises:
            ConfigError: it lives.
        """
        path = self._path(number)
        first_touch: int | None = None
        began = time.monotonic()
        while True:
            touch = _touched(path)
            owner = _read(path)
            if touch is None or (owner is not None and owner.released):
                return

            if owner is not None and _is_here(owner):
                if _process(owner.pid) == owner.process:
                    raise self._refusal(owner)
                logger.warning("%s held %s and is dead, so it is taken", owner, self._directory)
                return

            interval_s = self._owner.interval_s if owner is None else owner.interval_s
            # The file system's clock may be put back, and the age is then too small.
            age_s = max((self._now() - touch) / 1e9, time.monotonic() - began)
            if age_s > MISSED_BEATS * interval_s:
                who = owner or "another process"
                logger.warning(
                    "%s held %s; silent for %.0f s, so it is taken", who, self._directory, age_s
                )
                return

            if first_touch is None:
                first_touch = touch
                logger.info(
                    "waiting for a sign of life of %s, which holds %s", owner, self._directory
                )
            elif touch != first_touch:
                raise self._refusal(owner)
            time.sleep(interval_s / 10)

    def _now(self) -> int:
        """The file system's clock, nanoseconds."""
        probe = self._folder / f"{self._owner.token}.probe"
        try:
            probe.write_bytes(b"")
            os.utime(probe)
            now = _touched(probe)
        finally:
            probe.unlink(missing_ok=True)
        assert now is not None, f"{probe} has vanished"
        return now

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
    """The owner that a lock file names; None if the file is gone, or not yet written in full."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        boot, namespace, start = stated.pop("process")
        return Owner(process=(boot, namespace, start), **stated)
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


def _is_here(owner: Owner) -> bool:
    """Whether this machine can tell if the owner's process lives."""
    here = _process(os.getpid())
    return owner.host == socket.gethostname() and owner.process[:2] == here[:2]


def _process(pid: int) -> tuple[str, str, str]:
    """What tells process `pid` of this machine from all others; the last is "" if it is dead."""
    boot = namespace = start = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")

    try:
        # After the name, which may hold any character: the state, and 19 fields on, the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        start = "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if not boot and _answers(pid):
            start = "alive"
    return boot, namespace, start


def _answers(pid: int) -> bool:
    """Whether there is a process `pid`, on a machine without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
