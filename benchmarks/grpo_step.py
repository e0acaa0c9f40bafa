"""Compares a GRPO step with adapters with the same work in TRL's `GRPOTrainer`.

    python benchmarks/grpo_step.py [--quick] [--json FILE] [--set KEY=VALUE] [--distil BETA]

A step is 8 prompts of 40 tokens with 8 samples of 40 tokens each, in bfloat16: sampling, a reward
that costs nothing, the KL to the base in the loss, and one optimizer step of adapters of rank 16 on
all linear layers. Nobody may end a response, so all have the same lengths. Ours runs on as many
ranks of one thread as there are cores, TRL on one process with as many threads. They take turns;
the first round is not counted. A step with other numbers of tokens or optimizer steps is refused.
Processor seconds are those of all cores; with `--cores 1` other programs hardly disturb them.

With `--distil` it is a step of on-policy distillation, beside TRL's `DistillationTrainer`: one
sample a prompt, no reward and no reference, and a teacher with twice as many layers. With
`--greedy --dtype float32` both draw the same tokens, so that the divergences of the first step,
before any update, can be compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from model_sizes import SIZES, model_config
from teams import Start, Team
from train_step_case import FIRST_WORD, Case, write_case
from train_step_contenders import HERE, prepare_trl
from transformers import LlamaForCausalLM

TRL = "trl==1.16.0"
LENGTH = 40  # of a prompt, and of a response
SAMPLES = 8


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", metavar="FILE", help="write all figures there too")
    add("--quick", action="store_true", help="a smoke run of a tiny model, without TRL")
    add("--size", choices=SIZES, default="SmolLM2-135M")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--cores", type=int, default=2)
    add("--prompts", type=int, default=8)
    add("--repeats", type=int, default=3)
    add("--distil", type=float, metavar="BETA", help="0: forward KL; 1: reverse; between: JSD")
    add("--greedy", action="store_true", help="draw the likeliest tokens")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of ours")
    add("--before", type=Path, metavar="DIR", help="a checkout that takes part as well")
    add("--no-trl", action="store_true", help="ours alone")
    add("--trl-venv", type=Path, default=HERE.parent / "runs" / "grpo-trl-venv", metavar="DIR")
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(size="tiny", cores=1, repeats=1, no_trl=True)

    with tempfile.TemporaryDirectory() as directory:
        case = _case(arguments.size, arguments.dtype, arguments.prompts)
        write_case(case, Path(directory), batches=1)
        if arguments.distil is not None:
            _write_teacher(arguments.size, Path(directory))
        rows = _measure(Path(directory), arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(table(rows)))


def _case(size: str, dtype: str, count: int) -> Case:
    draw = random.Random(1)
    words = range(FIRST_WORD, model_config(size).vocab_size)
    prompts = [draw.choices(words, k=LENGTH) for _ in range(count)]
    return Case(size, dtype, "equal", prompts, [LENGTH] * count)


def _write_teacher(size: str, directory: Path) -> None:
    config = model_config(size)
    config.num_hidden_layers *= 2
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(directory / "teacher")


def _samples(arguments: argparse.Namespace) -> int:
    """Responses to a prompt; to distil, TRL draws one."""
    return SAMPLES if arguments.distil is None else 1


def _starts(directory: Path, arguments: argparse.Namespace) -> dict[str, Start]:
    cores = arguments.cores
    work = [str(directory), str(_samples(arguments))]
    if arguments.distil is not None:
        work.append(f"--distil={arguments.distil}")
    if arguments.greedy:
        work.append("--greedy")
    starts = {}
    trees = {"ours": HERE.parent}
    if arguments.before is not None:
        trees["before"] = arguments.before
    for name, tree in trees.items():
        command = [sys.executable, str(HERE / "grpo_step_ours.py"), *work]
        command += [f"--set={setting}" for setting in arguments.set]
        starts[name] = Start(name, command, cores, 1, cores, str(tree))
    if not arguments.no_trl:
        python = prepare_trl(arguments.trl_venv, TRL)
        command = [python, str(HERE / "grpo_step_trl.py"), *work]
        starts["trl"] = Start("trl", command, 1, cores, cores, "", {"TQDM_DISABLE": "1"})
    return starts


def _measure(directory: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    teams: dict[str, Team] = {}
    rows: dict[str, dict[str, Any]] = {}
    try:
        for name, start in _starts(directory, arguments).items():
            sys.stderr.write(f"starting {name}\n")
            teams[name] = Team(start)
            teams[name].wait_until_ready()
            lists: dict[str, Any] = {"seconds": [], "processor": [], "phases": []}
            rows[name] = {"contender": name, "size": arguments.size, **lists}
        for number in range(arguments.repeats + 1):
            for name, team in teams.items():
                answers = team.ask("step")
                answer = answers[0]
                _check(name, answer, arguments.prompts * _samples(arguments))
                processor = sum(one["seconds"]["cpu"] for one in answers)
                clock = answer["seconds"]["clock"]
                sys.stderr.write(
                    f"round {number}: {name} {clock:.2f} s, {processor:.2f} of cores\n"
                )
                if number == 0 and arguments.distil is not None:
                    rows[name]["divergence"] = answer["divergence"]
                if number:
                    rows[name]["seconds"].append(clock)
                    rows[name]["processor"].append(processor)
                    rows[name]["phases"].append(answer.get("phases", {}))
    finally:
        for team in teams.values():
            team.end()
    return list(rows.values())


def _check(name: str, answer: dict[str, Any], responses: int) -> None:
    """Stop if a contender did other work than the step asks for."""
    wanted = {"tokens": responses * LENGTH, "optimizer_steps": 1}
    found = {what: answer[what] for what in wanted}
    if found != wanted:
        raise SystemExit(f"{name} did {found} in a step, not {wanted}")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as lines of a table."""
    heads = ("model", "contender", "step, s", "× TRL", "processor, s", "× TRL", "phases")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["size"], row["contender"]]
        for kind in ("seconds", "processor"):
            own = statistics.median(row[kind])
            trl = [statistics.median(one[kind]) for one in rows if one["contender"] == "trl"]
            cells += [f"{own:.2f}", f"{trl[0] / own:.2f}" if trl else ""]
        phases = {
            name: statistics.median(one.get(name, 0.0) for one in row["phases"])
            for name in row["phases"][0]
            if name != "step"
        }
        words = [f"{name} {seconds:.2f}" for name, seconds in phases.items()]
        if "divergence" in row:
            words.append(f"first divergence {row['divergence']:.7g}")
        cells.append(", ".join(words))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
