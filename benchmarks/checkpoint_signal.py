"""A run that is asked to stop in the middle of an update, and how long it takes to end.

It starts a real run by `launch/torchrun.py` and looks at its files and its process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sizes import model_config

from configs.recipes.data.arithmetic import write_arithmetic
from mrlhf.checkpoint.manifest import MANIFEST, read_manifest

_ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.005
_STEPS = 1000  # far more than the run lives
_PATIENCE_S = 600.0

# The policy's loss: that of PPO, and a file that says that the update has begun, and in which rank.
_LOSS = """
import os
import pathlib

from mrlhf.rl.policy_losses import vanilla

MARK = pathlib.Path(__file__).with_name("updating")


def marked(inputs, options):
    with MARK.open("a") as file:
        file.write(f"{os.getpid()}\\n")
    return vanilla(inputs, options)
"""


def interrupt_run(size: str, root: Path) -> dict[str, Any]:
    """Start a run of a model of this size, interrupt it, and measure.

    Returns:
        `manifest_s` and `end_s`: seconds from the signal until the checkpoint was complete, and
        until the job had ended; its exit code; the bytes of the checkpoint.
    """
    root.mkdir()
    arguments = _write_inputs(size, root)
    command = [str(_ROOT / "launch/torchrun.py"), "--nproc-per-node=2", "--standalone"]

    with (root / "log").open("wb") as log:
        run = subprocess.Popen(
            [sys.executable, *command, str(_ROOT / "launch/train_ppo.py"), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return _interrupt(run, root)
        except AssertionError as error:
            tail = (root / "log").read_text()[-4000:]
            raise AssertionError(f"{error}; the end of its log:\n{tail}") from error
        finally:
            run.kill()


def _interrupt(run: subprocess.Popen[bytes], root: Path) -> dict[str, Any]:
    rank = _rank_in_second_update(run, root)
    os.kill(rank, signal.SIGUSR1)
    began = time.monotonic()

    checkpoints = root / "run/checkpoints"
    manifest_s = None
    while run.poll() is None:
        assert time.monotonic() - began < _PATIENCE_S, "the run did not end"
        if manifest_s is None and any(checkpoints.glob(f"step_*/{MANIFEST}")):
            manifest_s = time.monotonic() - began
        time.sleep(_POLL_S)
    end_s = time.monotonic() - began

    saved = list(checkpoints.glob(f"step_*/{MANIFEST}"))
    assert len(saved) == 1, "the run left no checkpoint"
    return {
        "manifest_s": end_s if manifest_s is None else manifest_s,
        "end_s": end_s,
        "exit_code": run.returncode,
        "bytes": sum(file.nbytes for file in read_manifest(saved[0].parent).files),
    }


def _rank_in_second_update(run: subprocess.Popen[bytes], root: Path) -> int:
    """Wait until the policy is updated in the second step; returns the process of a rank.

    Only then do the models have moments to be saved.
    """
    mark = root / "updating"
    metrics = root / "run/metrics.jsonl"
    began = time.monotonic()
    while not (metrics.is_file() and metrics.read_text().count("\n")):
        _assert_runs(run, began)
        time.sleep(_POLL_S)

    before = mark.read_text().count("\n")
    while (text := mark.read_text()).count("\n") == before:
        _assert_runs(run, began)
        time.sleep(_POLL_S)
    return int(text.splitlines()[-1])


def _assert_runs(run: subprocess.Popen[bytes], began: float) -> None:
    assert run.poll() is None, "the run ended before its second update"
    assert time.monotonic() - began < _PATIENCE_S, "the run did not come to its second update"


def _write_inputs(size: str, root: Path) -> list[str]:
    """Write model, data, tokenizer and loss; returns the arguments of the launcher."""
    config = model_config(size)
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "model")

    write_arithmetic(
        root / "data",
        digits=2,
        operations="+",
        sft=8,
        train=512,
        validation=4,
        held_out=8,
        wrong_fraction=0.0,
        wrong_kind="near",
        vocab_size=32,
        seed=1,
    )
    (root / "loss.py").write_text(_LOSS)
    values: dict[str, Any] = {
        "actor": {
            "path": str(root / "model"),
            "tp": 2,
            "ppo_mini_batch_size": 16,
            "micro_batch_tokens": 128,
            "policy_loss": {"loss_mode": f"{root}/loss.py:marked"},
        },
        "critic": {"tp": 2, "micro_batch_tokens": 128},
        "reward": {"terms": [{"name": "exact_match"}]},
        "data": {
            "train_files": str(root / "data/train.jsonl"),
            "val_files": str(root / "data/held_out.jsonl"),
            "tokenizer": str(root / "data/tokenizer"),
            "train_batch_size": 32,
            "max_prompt_length": 8,
            "max_response_length": 8,
        },
        "trainer": {
            "output_dir": str(root / "run"),
            "total_steps": _STEPS,
            "val_before_train": False,
        },
        "distributed": {"device": "cpu"},
    }
    (root / "run.yaml").write_text(json.dumps(values))  # JSON is YAML
    return ["--config", str(root / "run.yaml")]
