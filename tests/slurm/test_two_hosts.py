"""Two torchrun agents on two hosts: they find each other, weights travel over the network, and no
number differs from a run on one machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT
from tests.slurm.packages import Unavailable
from tests.slurm.tiny_runs import Gate, records
from tests.slurm.two_hosts import ADDRESSES, INTERFACE, command_on, two_hosts


def start(host: str, number: int, arguments: list[str], output: Path) -> subprocess.Popen[str]:
    """Start what a job of Slurm starts on node `number`."""
    variables = {
        "SLURM_NODEID": str(number),
        "SLURMD_NODENAME": host,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }

    torchrun = [
        *(sys.executable, "launch/torchrun.py", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", "--rdzv-id=7", f"--rdzv-endpoint={ADDRESSES[0]}:29400"),
        *("--redirects=3", "--tee=3"),
    ]
    program = ["launch/train_ppo.py", *arguments, f"trainer.output_dir={output}"]
    on_node = ["bash", "launch/slurm/on_node.sh", str(output / "logs"), INTERFACE]

    return subprocess.Popen(
        command_on(host, [*on_node, *torchrun, *program]),
        cwd=ROOT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_numbers_are_those_of_one_machine(undisturbed: Path, inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    gate = Gate(tmp_path / "gate")
    gate.make()
    arguments = ["--config", f"{inputs}/ppo.yaml", "rollout.verify_reshard=true", gate.reward]
    try:
        with two_hosts() as hosts:
            agents = []
            try:
                for number, host in enumerate(hosts):
                    agents.append(start(host, number, arguments, output))
                logs = [agent.communicate()[0] for agent in agents]
            finally:
                for agent in agents:
                    agent.kill()
    except Unavailable as reason:
        pytest.skip(f"no second host here: {reason}")
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(logs)

    assert records(output) == records(undisturbed)

    weights = [file.relative_to(undisturbed) for file in undisturbed.glob("actor/*.safetensors")]
    assert weights
    for name in weights:
        assert (output / name).read_bytes() == (undisturbed / name).read_bytes()
