"""Tiny models, data and configurations for jobs of two ranks, and what their runs leave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.programs import read_lines
from tests.oracle import plain_models
from tests.tiny_task import ppo_keys, sft_keys, write_tiny_task

# What no two runs have alike: times, and what follows from them or from an interruption.
FREE = ("timing", "perf/", "reshard/seconds", "rollout/")

# A user's reward function. If the file `gate` holds a number and a path, a call waits as soon as
# that file of metrics has that many lines, until the gate is gone; the file `reached` says so.
REWARD = """
import time
from pathlib import Path

GATE = Path({folder!r}) / "gate"
REACHED = Path({folder!r}) / "reached"


def variety(data_source, solution_str, ground_truth, extra_info):
    while GATE.exists():
        lines, metrics = GATE.read_text().split(maxsplit=1)
        if not Path(metrics).exists() or Path(metrics).read_text().count("\\n") < int(lines):
            break
        REACHED.touch()
        time.sleep(0.05)
    return len(set(solution_str)) / 10
"""


@dataclass(frozen=True)
class Gate:
    """Holds up a run in the scoring of its responses, at the step that a test chooses."""

    folder: Path  # belongs to this gate

    @property
    def reward(self) -> str:
        """The override by which a run uses this gate's reward function."""
        return f"reward.terms=[{{name: {self.folder}/reward.py:variety}}]"

    def make(self) -> None:
        """Write the reward function."""
        self.folder.mkdir()
        file = self.folder / "reward.py"
        file.write_text(REWARD.format(folder=str(self.folder)), encoding="utf-8")

    def close_after(self, lines: int, output: Path) -> None:
        """Hold up the run as soon as it has written so many lines of metrics."""
        self.reached.unlink(missing_ok=True)
        new = self.folder / "new"
        new.write_text(f"{lines} {output}/metrics.jsonl", encoding="utf-8")
        new.replace(self.folder / "gate")

    def open(self) -> None:
        """Let the run go on."""
        (self.folder / "gate").unlink()

    @property
    def reached(self) -> Path:
        """A file that is there once the run waits."""
        return self.folder / "reached"


def write_inputs(root: Path) -> None:
    """Write models, data, `ppo.yaml` and `sft.yaml` into `root`."""
    plain_models.save_models(root)
    write_tiny_task(root / "data")
    (root / "ppo.yaml").write_text(yaml.safe_dump(_ppo(root)), encoding="utf-8")
    (root / "sft.yaml").write_text(yaml.safe_dump(_sft(root)), encoding="utf-8")


def records(output: Path) -> list[dict[str, Any]]:
    """The metrics of each step that must be the same in each run."""
    kept = []
    for record in read_lines(output / "metrics.jsonl"):
        kept.append({name: value for name, value in record.items() if not name.startswith(FREE)})
    return kept


def _ppo(root: Path) -> dict[str, Any]:
    keys = ppo_keys(root, {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}})
    kl_ctrl = {"type": "adaptive", "kl_coef": 0.2, "target_kl": 1e-4, "horizon": 100}
    return keys | {
        "reward": {"terms": [{"name": "exact_match"}]},
        "rollout": {"n": 2, "tp": 1},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": kl_ctrl},
        "trainer": {"total_steps": 4, "save_freq": 1, "output_dir": "set by the job"},
        "distributed": {"timeout_s": 120.0},
    }


def _sft(root: Path) -> dict[str, Any]:
    return sft_keys(root, max_length=12) | {
        "trainer": {"total_steps": 2, "output_dir": "set by the job"},
        "distributed": {"timeout_s": 120.0},
    }
