"""Measures what models and engine hold in each phase of a PPO step, beside what a plan says.

    python benchmarks/memory.py [--quick] [--size 110M]

A step of PPO with actor, critic, reference and reward model of one size, in bfloat16 on two ranks
with tp 2: once as it is, once with the gradients offloaded, once with everything. Figures are
10⁶ bytes of rank 0, without activations; `planned` adds up shapes before the run (see
`mrlhf plan`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sizes import SIZES, model_config

from configs.recipes.data.arithmetic import write_arithmetic
from mrlhf.config import PPOConfig, load_config
from mrlhf.preflight.footprint import GENERATION, OWNERS, footprint, update_of
from mrlhf.preflight.model_checks import check_models

LAUNCHER = Path(__file__).resolve().parents[1] / "launch" / "train_ppo.py"
RANKS = 2
FORMS: dict[str, list[str]] = {"nothing": [], "grads": ["grads"], "everything": list(OWNERS)}
# The phases of a run, and their names in a plan.
PHASES = {
    "gen": GENERATION,
    "reward": "passes of reward_model",
    "ref": "passes of reference",
    "update_critic": update_of("critic"),
    "update_actor": update_of("actor"),
}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: tiny models")
    parser.add_argument("--size", choices=SIZES, default="110M", help="of each of the models")
    arguments = parser.parse_args()

    print("| offloaded | phase | measured | planned |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        _write_inputs(root, "tiny" if arguments.quick else arguments.size)
        for form, owners in FORMS.items():
            planned, measured = _planned_and_measured(root, form, owners)
            for phase, nbytes in planned.items():
                cells = (form, phase, f"{measured[phase] / 1e6:.1f}", f"{nbytes / 1e6:.1f}")
                print(f"| {' | '.join(cells)} |", flush=True)


def _write_inputs(root: Path, size: str) -> None:
    """A policy and a reward model with random weights, prompts and a tokenizer."""
    torch.manual_seed(0)
    config = model_config(size)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "policy")
    config.num_labels = 1
    config.pad_token_id = 0
    LlamaForSequenceClassification(config).to(torch.bfloat16).save_pretrained(root / "reward")
    write_arithmetic(
        root / "data",
        digits=2,
        operations="+",
        sft=8,
        train=64,
        validation=4,
        held_out=4,
        wrong_fraction=0.0,
        wrong_kind="near",
        vocab_size=config.vocab_size,
        seed=1,
    )


def _planned_and_measured(
    root: Path, form: str, owners: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes by phase, of a plan and of a run."""
    file = root / f"{form}.yaml"
    file.write_text(yaml.safe_dump(_keys(root, form, owners)), encoding="utf-8")
    config = load_config(PPOConfig, str(file), [])
    specs = {name: spec for name, spec in check_models(config).items() if spec is not None}
    plan = footprint(config, specs, RANKS)
    planned: dict[str, float] = {}
    for phase, name in PHASES.items():
        kept = [size for owner, size in plan.phases[name].items() if owner.endswith("activations")]
        planned[phase] = plan.total(name) - sum(kept)

    run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    program = [*run, "--standalone", str(LAUNCHER), "--config", str(file)]
    subprocess.run(program, check=True, capture_output=True)
    *_, row = (root / form / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = json.loads(row)
    return planned, {phase: 1e9 * metrics[f"perf/memory_in/{phase}"] for phase in PHASES}


def _keys(root: Path, form: str, owners: list[str]) -> dict[str, Any]:
    """The configuration of the run; its cache has room for one response, as a plan counts it."""
    optim = {"use_distributed_optimizer": False}  # whose buffers are padded
    trained = {"offload": owners, "optim": optim, "ppo_mini_batch_size": 4, "tp": RANKS}
    frozen = {"offload": [owner for owner in owners if owner == "params"], "tp": RANKS}
    roles: dict[str, dict[str, Any]] = {
        "actor": {"path": "policy", **trained},
        "critic": {"path": "policy", **trained},
        "reference": {"path": "policy", **frozen},
        "reward_model": {"path": "reward", **frozen},
    }
    for role in roles.values():
        role |= {"path": str(root / role["path"]), "dtype": "bfloat16"}
    return {
        **roles,
        "rollout": {"n": 2, "tp": RANKS, "max_num_seqs": 1},
        "reward": {"terms": [{"name": "reward_model"}]},
        "algorithm": {"use_kl_in_reward": True},
        "data": {
            "train_files": str(root / "data/train.jsonl"),
            "tokenizer": str(root / "data/tokenizer"),
            "train_batch_size": 4,
            "max_prompt_length": 8,
            "max_response_length": 8,
        },
        "trainer": {"total_steps": 2, "output_dir": str(root / form)},
    }


if __name__ == "__main__":
    main()
