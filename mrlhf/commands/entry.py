"""The command `mrlhf`, with all others as its subcommands.

Usage: mrlhf COMMAND [argument ...]
       mrlhf train-ppo [-n RANKS] --config FILE ...

A subcommand is imported when it is called, so that `mrlhf --help` is at once there.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from mrlhf.printable import show
from mrlhf.version import __version__


class Subcommand(NamedTuple):
    """One row of the help."""

    group: str
    name: str
    module: str
    function: str  # called without arguments; it reads those of the process
    does: str


# fmt: off
SUBCOMMANDS = (
    Subcommand("start", "init", "mrlhf.commands.init", "main",
               "copy the shipped configurations, launch scripts and pages"),
    Subcommand("start", "prepare-data", "mrlhf.commands.prepare_data", "main",
               "write the data and tokenizers of the examples"),
    Subcommand("start", "doctor", "mrlhf.commands.doctor", "main",
               "look over a machine, its ranks, a model, a configuration"),
    Subcommand("start", "plan", "mrlhf.commands.plan", "main",
               "find layouts that fit so many GPUs, the fastest first"),
    Subcommand("start", "import-config", "mrlhf.commands.import_config", "main",
               "turn a configuration of verl, TRL or OpenRLHF into ours"),
    Subcommand("start", "docs", "mrlhf.commands.docs", "main",
               "print a page, or the section of an alarm"),
    Subcommand("start", "completion", "mrlhf.commands.completion", "main",
               "print what makes bash or zsh complete commands and keys"),
    Subcommand("train", "train-sft", "mrlhf.commands.train", "sft",
               "fine-tune a language model"),
    Subcommand("train", "train-rm", "mrlhf.commands.train", "reward_model",
               "train a reward model"),
    Subcommand("train", "train-critic", "mrlhf.commands.train", "critic",
               "train a critic on stored rollouts"),
    Subcommand("train", "train-dpo", "mrlhf.commands.train", "dpo",
               "train a policy on preference pairs"),
    Subcommand("train", "train-ppo", "mrlhf.commands.train", "ppo",
               "train a policy with PPO, GRPO or one of their family"),
    Subcommand("train", "torchrun", "mrlhf.run.elastic", "main",
               "torchrun with exit codes and signals for schedulers"),
    Subcommand("look", "generate", "mrlhf.commands.generate", "main",
               "answer a file of prompts, and score the answers"),
    Subcommand("look", "chat", "mrlhf.commands.chat", "main",
               "talk to a policy in the terminal"),
    Subcommand("look", "report", "mrlhf.commands.report", "main",
               "write one HTML file about one run or several"),
    Subcommand("go on", "convert", "mrlhf.commands.convert_checkpoint", "main",
               "convert checkpoints from and to Hugging Face and Megatron-LM"),
)
# fmt: on
BY_NAME = {subcommand.name: subcommand for subcommand in SUBCOMMANDS}
_RANKS = ("-n", "--ranks")
_ON_RANKS = {"generate", *(row.name for row in SUBCOMMANDS if row.group == "train")}


def main(argv: Sequence[str] | None = None) -> int:
    """Call a subcommand; returns its exit code, or 2 if there is none of that name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        show(help_text())
        return 0
    if name == "--version":
        show(f"mrlhf {__version__}")
        return 0
    if name not in BY_NAME:
        part = [known for known in BY_NAME if name in known or known in name]
        near = part or difflib.get_close_matches(name.replace("_", "-"), BY_NAME, n=1)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        sys.stderr.write(f"error: there is no command {name!r}{hint}; mrlhf --help lists all\n")
        return 2

    rest = arguments[1:]
    # What follows torchrun's first argument is for the program that it starts.
    asked = rest[:1] if name == "torchrun" else rest
    place = next((i for i, argument in enumerate(asked) if argument in _RANKS), None)
    if name in _ON_RANKS and place is not None:
        return _on_ranks(name, rest[place : place + 2], rest[:place] + rest[place + 2 :])
    sys.argv = [f"mrlhf {name}", *rest]
    module = importlib.import_module(BY_NAME[name].module)
    return getattr(module, BY_NAME[name].function)()


def help_text() -> str:
    """What `mrlhf --help` prints."""
    lines = ["usage: mrlhf COMMAND [argument ...]; mrlhf COMMAND --help says more"]
    width = max(map(len, BY_NAME))
    group = ""
    for subcommand in SUBCOMMANDS:
        if subcommand.group != group:
            group = subcommand.group
            lines += ["", f"{group}:"]
        lines.append(f"  {subcommand.name:<{width}}  {subcommand.does}")
    lines += [
        "",
        "mrlhf train-ppo -n 4 --config FILE starts 4 ranks on this machine. Without -n, torchrun",
        "must start them: torchrun --no-python --nproc-per-node=4 mrlhf train-ppo ...",
    ]
    return "\n".join(lines)


def _on_ranks(name: str, ranks: Sequence[str], arguments: Sequence[str]) -> int:
    """Start as many ranks of a command on this machine as `ranks` says, an option and its value.

    A dry run is one process, and looks whether the run fits so many ranks.
    """
    count = ranks[1] if len(ranks) > 1 else ""
    if not count.isdecimal() or int(count) < 1 or name == "torchrun":
        sys.stderr.write(f"error: {ranks[0]} takes the number of ranks of a training program\n")
        return 2
    if "--dry-run" in arguments:
        return main([name, *arguments, "--world-size", count])
    return start_ranks(int(count), name, arguments)


def start_ranks(count: int, name: str, arguments: Sequence[str]) -> int:
    """Start a subcommand on so many ranks of this machine; returns its exit code."""
    from mrlhf.run.elastic import main as launch

    # torchrun would set 1, and say so on five lines.
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    program = ["-m", "--", "mrlhf", name, *arguments]  # torchrun would take --n for its own
    return launch(["--standalone", f"--nproc-per-node={count}", *program])
