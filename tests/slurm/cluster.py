"""A real Slurm on this machine: one controller and two node daemons, in a folder of its own.

The packages come from Debian. Everything else (authentication, ports, logs, state) belongs to the
folder, so a Slurm that the machine has otherwise is not touched. It knows nothing of mrlhf.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.ports import free_ports
from tests.slurm.packages import need

NODES = ("n1", "n2")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "setpriv")
LIMIT_S = 1200.0  # Slurm on a busy machine is slow, and what takes longer hangs
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Cluster:
    """A running Slurm of two nodes; its commands take the environment that names it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {**os.environ, "SLURM_CONF": str(root / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._hastened: set[tuple[str, str]] = set()

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle.

        Raises:
            Unavailable: Slurm cannot be installed.
        """
        need(PROGRAMS, PACKAGES)
        for name in ("state", "log", "munge", *NODES):
            (self.root / name).mkdir()
        (self.root / "munge").chmod(0o755)
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        (self.root / "slurm.conf").write_text(self._configuration(), encoding="utf-8")

        self._start_munge()
        self._start("slurmctld", ["slurmctld", "-D"])
        for node in NODES:
            self.start_node(node)
        self.wait(self._nodes_are_idle, "both nodes to be idle")

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, ["slurmd", "-D", "-N", node])

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        if "slurmctld" in self._daemons and self._daemons["slurmctld"].poll() is None:
            self.run("scancel", "--full", "--signal=KILL", "--user=root")
            self.run("scancel", "--user=root")
            self.wait(lambda: not self.run("squeue", "-h").stdout.strip(), "all jobs to end")
        for name in reversed(self._daemons):
            self._daemons[name].terminate()
        for daemon in self._daemons.values():
            daemon.wait(timeout=LIMIT_S)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm, or one that calls Slurm."""
        return subprocess.run(
            command,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def submit(self, *command: str, **variables: str) -> str:
        """Submit with `sbatch`, or with a command that ends in it; returns the id of the job."""
        done = self.run(*command, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job; on a busy machine it is asked more than once."""
        for _ in range(20):
            done = self.run("scontrol", "--oneliner", "show", "job", job)
            if "Socket timed out" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        return dict(word.split("=", 1) for word in done.stdout.split() if "=" in word)

    def wait_until_ended(self, job: str) -> dict[str, str]:
        """Wait for the end of a job, and say what became of it."""

        def ended() -> bool:
            return self._show_started(job)["JobState"] in ENDED

        self.wait(ended, f"job {job} to end")
        return self.show(job)

    def wait_for_restart(self, job: str, number: int) -> None:
        """Wait until a job has been put back into the queue for the `number`th time."""
        self.wait_in_job(
            job, lambda: int(self.show(job)["Restarts"]) == number, f"restart {number}"
        )

    def wait_in_job(self, job: str, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that a job does before it ends."""

        def fulfilled() -> bool:
            shown = self._show_started(job)
            if condition():
                return True
            assert shown["JobState"] not in ENDED, (
                f"waited for {what}, but job {job} has ended with {shown['ExitCode']}:\n"
                + Path(shown["StdOut"]).read_text()
            )
            return False

        self.wait(fulfilled, what)

    def _show_started(self, job: str) -> dict[str, str]:
        """What Slurm says of a job; one that was put back starts soon, not after two minutes.

        A node refuses a job that starts in the second in which it was put back. A node that was
        lost is told to end the job's processes when it is back, old and new.
        """
        shown = self.show(job)
        start = (job, shown["Restarts"])
        waits = shown["JobState"] == "PENDING" and shown["Reason"] == "BeginTime"
        if waits and start not in self._hastened and self._nodes_are_idle():
            self.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
            self._hastened.add(start)
        return shown

    def kill_node(self, node: str) -> None:
        """Kill the daemon of a node and the job's processes there, as Slurm is then told."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait(timeout=LIMIT_S)

        for process in self._processes_on(node):
            # One that ends when its parent is killed may be gone already.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes_on(self, node: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["environ"]):
            variables = process.info["environ"] or {}
            is_ours = variables.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            if is_ours and variables.get("SLURMD_NODENAME") == node:
                found.append(process)
        return found

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Ask again and again until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            for name, daemon in self._daemons.items():
                if daemon.poll() is not None:
                    log = (self.root / "log" / f"{name}.log").read_text()[-2000:]
                    raise AssertionError(f"{name} has ended with {daemon.returncode}:\n{log}")
            if time.monotonic() > deadline:
                state = self.run("sinfo", "--Node", "--long").stdout
                queue = self.run("squeue", "--long").stdout
                raise AssertionError(f"waited {LIMIT_S:g} s for {what}\n{state}\n{queue}")
            time.sleep(0.2)

    def _start_munge(self) -> None:
        directory = self.root / "munge"
        options = [
            f"--socket={directory}/socket",
            f"--key-file={directory}/key",
            f"--pid-file={directory}/pid",
            f"--log-file={directory}/log",
            f"--seed-file={directory}/seed",
        ]
        self._start("munged", ["munged", "--foreground", "--force", *options])
        self.wait((directory / "socket").exists, "munge's socket")

    def _start(self, name: str, command: list[str]) -> None:
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],  # they end with the tests
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _nodes_are_idle(self) -> bool:
        states = self.run("sinfo", "-h", "--Node", "-o", "%T").stdout.split()
        return states == ["idle"] * len(NODES)

    def _configuration(self) -> str:
        host = socket.gethostname().split(".")[0]
        root = self.root
        controller, *ports = free_ports(1 + len(NODES))

        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={controller}",
            "SlurmUser=root",
            "SlurmdUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={root}/munge/socket",
            "CredType=cred/munge",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/%n",
            f"SlurmctldPidFile={root}/slurmctld.pid",
            f"SlurmdPidFile={root}/%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/linear",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none",
            "ReturnToService=2",
            "JobRequeue=1",
            "KillWait=20",
            "SlurmctldTimeout=10",
            "MessageTimeout=3",
            "SlurmdTimeout=5",
        ]

        for node, port in zip(NODES, ports, strict=True):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
                "State=UNKNOWN"
            )
        lines.append("PartitionName=p Nodes=ALL Default=YES State=UP")
        return "\n".join(lines) + "\n"
