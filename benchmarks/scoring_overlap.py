"""Measures what `rollout.overlap` saves: PPO whose reward function takes a while for each response.

    python benchmarks/scoring_overlap.py [--quick] [--function-s 0.3] [--steps 3] [--repeats 3]

Two ranks on the host, each an engine of its own, draw 32 responses a step with a random model of
3M parameters, whose lengths spread from a few tokens to the longest. Runs with and without the key
take turns, and their scores must be equal. Figures are medians over the steps of all turns, without
the first step of a run: seconds of generation and of scoring, and the share of responses whose
scoring began while the engine drew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from model_sizes import model_config
from transformers import AutoModelForCausalLM

from configs.recipes.data.vocabulary import train_sentencepiece

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
PROMPTS, SAMPLES = 16, 2  # of a step
FUNCTION = """
import time


def judge(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    return len(set(solution_str)) / 100
"""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: short responses")
    parser.add_argument("--function-s", type=float, default=0.3, help="seconds for a response")
    parser.add_argument("--tokens", type=int, default=768, help="of the longest response")
    parser.add_argument("--steps", type=int, default=3, help="that count in each run")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each form")
    arguments = parser.parse_args()
    seconds = 0.01 if arguments.quick else arguments.function_s
    tokens = 32 if arguments.quick else arguments.tokens
    steps, repeats = (1, 1) if arguments.quick else (arguments.steps, arguments.repeats)

    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as directory:
        config = _write_inputs(Path(directory), seconds, tokens)
        for _ in range(repeats):
            for overlaps, found in rows.items():
                found += _run(config, steps + 1, overlaps)[1:]
    scores = [[row["reward/judge"] for row in found] for found in rows.values()]
    assert scores[0] == scores[1], scores

    print("| `rollout.overlap` | generation, s | scoring, s | both, s | scored early |")
    print("|---|---|---|---|---|")
    for overlaps, found in rows.items():
        gen = [row["timing_s/gen"] for row in found]
        reward = [row["timing_s/reward"] for row in found]
        both = [one + other for one, other in zip(gen, reward, strict=True)]
        early = [row.get("perf/scored_early", 0.0) for row in found]
        cells = [f"{statistics.median(column):.2f}" for column in (gen, reward, both, early)]
        print(f"| {str(overlaps).lower()} | {' | '.join(cells)} |")


def _write_inputs(root: Path, seconds: float, tokens: int) -> Path:
    """Data, a model with random weights, the function and the configuration, all in `root`."""
    prompts = [f"{number}+{number + 1}=" for number in range(256)]
    # Any of about 270 tokens may be drawn, and one of them ends a response.
    train_sentencepiece(prompts, root / "tokenizer", vocab_size=280)
    rows = [json.dumps({"prompt": prompt, "answer": ""}) for prompt in prompts]
    (root / "train.jsonl").write_text("\n".join(rows))
    AutoModelForCausalLM.from_config(model_config("3M")).save_pretrained(root / "model")
    function = root / "judge.py"
    function.write_text(FUNCTION.format(seconds=seconds))
    keys: dict[str, Any] = {
        "actor": {
            "path": str(root / "model"),
            "ppo_mini_batch_size": PROMPTS,
            "optim": {"lr": 1e-5},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward": {"terms": [{"name": f"{function}:judge"}]},
        "rollout": {"n": SAMPLES},
        "data": {
            "train_files": str(root / "train.jsonl"),
            "tokenizer": str(root / "tokenizer"),
            "train_batch_size": PROMPTS,
            "max_prompt_length": 32,
            "max_response_length": tokens,
        },
    }
    path = root / "ppo.json"
    path.write_text(json.dumps(keys))
    return path


def _run(config: Path, steps: int, overlaps: bool) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={RANKS}", "launch/train_ppo.py", "--config", str(config)),
            f"trainer.total_steps={steps}",
            f"trainer.output_dir={out}/run",
            f"rollout.overlap={str(overlaps).lower()}",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        lines = (Path(out) / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "timing_s/gen" in row]


if __name__ == "__main__":
    main()
