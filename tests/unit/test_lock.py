"""One job at a time has an output directory, whatever becomes of the jobs; on real processes."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from mrlhf.checkpoint.output_files import METRICS
from mrlhf.device import pick_device
from mrlhf.errors import CheckpointError, ConfigError
from mrlhf.run.failures import explain
from mrlhf.run.lock import DirectoryLock
from mrlhf.run.startup import Run

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import logging, os, sys
from pathlib import Path
from mrlhf.errors import ConfigError
from mrlhf.run.lock import DirectoryLock

def lost(message):
    print("lost:", message, flush=True)
    os._exit(1)

logging.basicConfig(level="INFO")
lock = DirectoryLock(Path(sys.argv[1]), sys.argv[3], lost, float(sys.argv[2]))
sys.stdin.readline()
try:
    lock.acquire()
except ConfigError as error:
    print("refused:", error, flush=True)
else:
    lock.remove_earlier()
    print("held", flush=True)
    for line in sys.stdin:
        lock.release()
        print("released", flush=True)
"""


class Job:
    """A process that takes the lock when told to."""

    def __init__(self, directory, interval_s=10.0):
        self.popen = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(directory), str(interval_s), "4711"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self):
        """Tell the process to go on: to take the lock first, to release it then."""
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def says(self):
        """The next line that the process prints."""
        return self.popen.stdout.readline().strip()

    def take(self):
        self.ask()
        return self.says()

    def kill(self):
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


@contextmanager
def jobs(directory, count=1, **options):
    started = [Job(directory, **options) for _ in range(count)]
    try:
        yield started if count > 1 else started[0]
    finally:
        for job in started:
            job.kill()
            job.popen.communicate()


def lock_of(directory, interval_s=10.0):
    lost = []
    return DirectoryLock(directory, None, lost.append, interval_s), lost


@contextmanager
def taken(directory, interval_s=10.0):
    """The directory's lock in this process; it is released if it can be, and not lost."""
    lock, lost = lock_of(directory, interval_s)
    lock.acquire()
    yield lock
    lock.release()
    assert lost == []


def lock_files(directory):
    return sorted((directory / ".lock").glob("*.json"))


def change_owner(directory, **facts):
    """Change what the newest lock file says of its process."""
    file = lock_files(directory)[-1]
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))
    return file


def pretend_other_machine(directory, silent_s=0):
    """Make the newest lock file that of a process elsewhere, last touched `silent_s` ago."""
    file = change_owner(directory, host="node7")
    touch = file.stat().st_mtime - silent_s
    os.utime(file, (touch, touch))


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path):
    with jobs(tmp_path / "run") as job:
        assert job.take() == "held"
        lock, _ = lock_of(tmp_path / "run")
        with pytest.raises(ConfigError) as caught:
            lock.acquire()
        message = str(caught.value)
        host = os.uname().nodename
        assert f"in use by process {job.popen.pid} of job 4711 on host {host}, since 20" in message
        assert "another trainer.output_dir" in message and "\n" not in message

        assert job.take() == "released"
        lock.acquire()
        lock.remove_earlier()
        lock.verify()
        lock.release()
        lock.release()
        assert len(lock_files(tmp_path / "run")) == 1


def is_killed(job, directory):
    job.kill()


def is_killed_and_not_yet_collected(job, directory):
    job.popen.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, job.popen.pid, os.WEXITED | os.WNOWAIT)


def has_its_number_used_again(job, directory):
    job.kill()
    change_owner(directory, pid=os.getpid())  # lives, but has started at another time


# On this machine, where six missed touches would take a minute.
@pytest.mark.parametrize(
    "end", [is_killed, is_killed_and_not_yet_collected, has_its_number_used_again]
)
def test_a_process_of_this_machine_is_followed_at_once_if_it(tmp_path, end):
    with jobs(tmp_path) as job:
        assert job.take() == "held"
        end(job, tmp_path)
        with taken(tmp_path) as lock:
            lock.verify()


@pytest.mark.parametrize("silent_s", [0, -3600, 3600])  # the clocks of the machines may differ
def test_a_job_of_another_machine_is_followed_when_it_has_been_silent(tmp_path, caplog, silent_s):
    with jobs(tmp_path, interval_s=0.05) as job:
        assert job.take() == "held"
        job.kill()
    pretend_other_machine(tmp_path, silent_s)
    with taken(tmp_path):
        assert "on host node7" in caplog.text
        assert re.search(r"silent for \d+ s", caplog.text)


def test_a_stopped_process_of_this_machine_still_holds_the_lock(tmp_path):
    with jobs(tmp_path, interval_s=0.01) as job:
        assert job.take() == "held"
        job.popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, job.popen.pid, os.WSTOPPED | os.WNOWAIT)
        os.utime(lock_files(tmp_path)[0], (1, 1))
        lock, _ = lock_of(tmp_path, 0.01)
        with pytest.raises(ConfigError, match="in use"):
            lock.acquire()


def test_a_job_of_another_machine_that_lives_is_noticed_by_its_next_touch(tmp_path):
    with jobs(tmp_path, interval_s=2.0) as job:  # six of them without a touch mean that it is dead
        assert job.take() == "held"
        pretend_other_machine(tmp_path)
        lock, _ = lock_of(tmp_path)
        with pytest.raises(ConfigError, match="job 4711 on host node7"):
            lock.acquire()
        assert job.popen.poll() is None


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_newcomers_exactly_one_wins(tmp_path, stale):
    """They all find the directory free, or a lock whose holder is dead, at the same moment."""
    if stale:
        with jobs(tmp_path, interval_s=0.2) as job:
            assert job.take() == "held"
            job.kill()
        pretend_other_machine(tmp_path)

    with jobs(tmp_path, count=4) as rivals:
        for rival in rivals:
            rival.ask()
        said = [rival.says() for rival in rivals]
        assert said.count("held") == 1, said
        assert sum(line.startswith("refused:") for line in said) == 3, said
        winner = rivals[said.index("held")]
        assert json.loads(lock_files(tmp_path)[-1].read_text())["pid"] == winner.popen.pid
        assert len(lock_files(tmp_path)) == 1


def test_a_newcomer_that_slept_while_others_came_and_went_gives_way(tmp_path):
    """It creates a lock file with a number that others have used and removed since."""
    directory = tmp_path / "run"
    for _ in range(2):
        with taken(directory) as earlier:
            earlier.remove_earlier()
    with jobs(directory) as job:
        assert job.take() == "held"
        late, _lost = lock_of(directory)
        assert late._create(2) is None  # the step of `acquire` in which it wakes up
        assert [path.name for path in lock_files(directory)] == ["000003.json"]
        assert job.take() == "released"


@pytest.mark.parametrize("how", ["taken over", "deleted", "replaced"])
def test_a_holder_whose_lock_is_gone_ends(tmp_path, how):
    with jobs(tmp_path, interval_s=0.2) as job:
        assert job.take() == "held"
        file = lock_files(tmp_path)[0]
        if how == "taken over":
            other = json.loads(file.read_text()) | {"host": "node9", "pid": 12, "token": "t"}
            file.with_name("000002.json").write_text(json.dumps(other))
        elif how == "deleted":
            file.unlink()
        else:
            other = json.loads(file.read_text()) | {"token": "another"}
            temporary = file.with_suffix(".new")
            temporary.write_text(json.dumps(other))
            temporary.replace(file)

        said = job.says()
        assert said.startswith("lost: output directory") and "this run ends" in said
        assert ("taken by process 12 of job 4711 on host node9" in said) == (how == "taken over")
        assert job.popen.wait() == 1


def test_verify_tells_at_once(tmp_path):
    with taken(tmp_path) as lock:
        lock.verify()
        lock_files(tmp_path)[0].unlink()
        with pytest.raises(CheckpointError, match="lost its lock file"):
            lock.verify()
    assert lock_files(tmp_path) == []


def test_a_file_that_was_not_written_in_full_counts_as_held_until_it_is_old(tmp_path):
    (tmp_path / ".lock").mkdir()
    file = tmp_path / ".lock" / "000001.json"
    file.write_text('{"token": "a", "ho')
    with taken(tmp_path, 0.05) as lock:  # after six intervals
        lock.remove_earlier()
        assert [path.name for path in lock_files(tmp_path)] == ["000002.json"]


@pytest.mark.parametrize("earlier", [False, True])
def test_a_job_that_withdraws_leaves_no_trace(tmp_path, earlier):
    run = tmp_path / "below" / "run"
    if earlier:
        with jobs(run) as job:
            assert job.take() == "held"
            job.kill()
    before = {path: path.read_bytes() for path in lock_files(run)}
    lock, lost = lock_of(run)
    lock.acquire()
    assert len(lock_files(run)) == 1 + earlier
    lock.withdraw()
    lock.withdraw()
    lock.release()
    assert {path: path.read_bytes() for path in lock_files(run)} == before
    assert run.exists() == earlier and (tmp_path / "below").exists() == earlier and lost == []

    with taken(run) as following:
        following.verify()


@contextmanager
def files_of_at_most(size):
    """As on a full disk: a file that would be longer cannot be written."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_start_on_a_full_disk_leaves_no_lock(tmp_path):
    lock, _ = lock_of(tmp_path / "run")
    with files_of_at_most(16), pytest.raises(OSError, match="too large"):
        lock.acquire()
    assert not (tmp_path / "run").exists()


def test_a_lock_that_is_given_back_on_a_full_disk_is_followed_at_once(tmp_path):
    with taken(tmp_path) as first, files_of_at_most(16):
        first.release()
    assert [path.name for path in (tmp_path / ".lock").iterdir()] == ["000001.json"]
    pretend_other_machine(tmp_path)
    os.utime(lock_files(tmp_path)[0], (0, 0))  # which the line before has undone
    with taken(tmp_path) as following:
        following.verify()


def test_other_users_cannot_write_the_lock(tmp_path):
    before = os.umask(0o022)
    try:
        with taken(tmp_path / "run"):
            modes = [path.stat().st_mode & 0o022 for path in (tmp_path / "run").rglob("*")]
            assert modes == [0, 0]
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("lost", "message"), [(".", "lost its lock file: it was deleted"), (METRICS, "was deleted")]
)
def test_a_run_whose_directory_was_deleted_says_what_is_lost_and_where_the_model_is(
    lost, message, tmp_path
):
    directory = tmp_path / "run"
    with taken(directory) as lock:
        (directory / METRICS).touch()
        run = Run(pick_device("cpu", 0), 0, 1, None, directory, lock=lock)  # it makes no groups
        run.require_directory(directory / "actor")

        # As a reward function might.
        (shutil.rmtree if lost == "." else os.unlink)(directory / lost)
        where = f"{message}.*the trained model is in .*actor"
        with pytest.raises(CheckpointError, match=where) as said:
            run.require_directory(directory / "actor")
        assert explain(said.value, 0, at_start=False).code == 1
