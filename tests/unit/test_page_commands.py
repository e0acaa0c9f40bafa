"""Every command of a page is run by a test, or is on a short list that says why not.

Beyond that, whatever a page gives to a program of ours is read by the parser of that program, and a
configuration passes the dry run as far as this machine can check it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from mrlhf.commands import (
    convert_checkpoint,
    doctor,
    generate,
    import_config,
    init,
    prepare_data,
    report,
)
from mrlhf.config import parse_args
from mrlhf.preflight import dry_run
from tests.pages import PAGES, ROOT, Command, files, read_commands
from tools.pages.configuration import LAUNCHERS

ALL = [command for page in PAGES for command in read_commands(page)]

# Page, part of the command, and why no test runs it.
NOT_RUN = [
    ("README.md", "git clone", "the tests are of a clone"),
    ("README.md", "source .venv/bin/activate", "tests run with the environment's programs"),
    ("docs/install.md", "source .venv/bin/activate", "tests run with the environment's programs"),
    ("README.md", "whl/cpu", "an index that tests do not ask"),
    ("docs/install.md", "whl/cpu", "an index that tests do not ask"),
    ("README.md", "make test", "it runs these tests"),
    ("docs/first_gpu_run.md", "make install", "e2e/test_make_demo runs `make demo`"),
    ("docs/first_gpu_run.md", "source .venv/bin/activate", "tests run with its programs"),
    ("docs/first_gpu_run.md", "hf download", "a hub that tests do not ask"),
    ("docs/first_gpu_run.md", "torchrun", "a model of 1.5B parameters on 8 GPUs"),
    ("docs/install.md", ".[gpu]'", "TransformerEngine needs a GPU"),
    ("docs/install.md", "image.txt", "an index that tests do not ask"),
    ("docs/gpu.md", "pip install --no-build-isolation", "TransformerEngine needs a GPU"),
    ("docs/gpu.md", "--nnodes=2", "two nodes with 8 GPUs each"),
    ("README.md", "mrlhf train-ppo -n 8", "a model of 7B parameters on 8 GPUs"),
    ("docs/lora.md", "--nproc-per-node=8 launch/train_ppo.py", "README's model on 8 GPUs"),
    ("configs/recipes/rlvr_gsm8k/README.md", "--nproc-per-node=8", "a model on 8 GPUs"),
    ("configs/recipes/critic/README.md", "compare.py", "twenty runs; e2e/test_critic has such"),
    ("docs/generation.md", "rollout.engine=vllm", "needs `make vllm`; tests/vllm trains with it"),
]

PARSERS: dict[str, Callable[[list[str]], Any]] = {
    "convert_checkpoint": convert_checkpoint.parse,
    "doctor": doctor.parse,
    "generate": generate.parse,
    "import_config": import_config.parse,
    "init": init.parse,
    "prepare_data": prepare_data.parse,
    "report": report.parse,
}


@dataclass(frozen=True)
class Call:
    """What a command starts: a program of ours, its arguments, and on how many ranks if it says."""

    program: str
    arguments: list[str]
    ranks: int | None = None


def call(command: Command) -> Call | None:
    """What the command starts; None: no program of ours."""
    words = command.words
    variables = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    words = [word.removeprefix("$MRLHF/") for word in words]

    if words[0] == "python":
        words = words[1:]
    if words[0] == "mrlhf":
        name, *arguments = words[1:]
        ranks = int(arguments[1]) if arguments[0] == "-n" else None
        return Call(name.replace("-", "_"), arguments[2:] if ranks else arguments, ranks)
    program = Path(words[0]).stem.removeprefix("mrlhf-").replace("-", "_")
    if program == "torchrun":
        options = get_args_parser().parse_args(words[1:])
        inner = call(Command(command.page, options.training_script))
        assert inner is not None, f"{options.training_script} is no program of ours"
        return Call(inner.program, options.training_script_args, int(options.nproc_per_node))

    if words[0] in ("sbatch", "bash"):
        script = next(index for index, word in enumerate(words) if word.endswith(".sbatch"))
        assert (ROOT / words[script]).is_file()
        arguments = words[script + 1 :]
        if "--" in arguments:
            arguments = arguments[arguments.index("--") + 1 :]
        return Call(variables.get("PROGRAM", "train_ppo"), arguments)

    if program not in {**LAUNCHERS, **PARSERS}:
        return None
    assert words[0].startswith("mrlhf-") or (ROOT / words[0]).is_file()
    return Call(program, words[1:])


@cache
def run_by_tests() -> list[tuple[str, str]]:
    """The page and the pattern of every call of `commands_of` in the tests."""
    found = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "commands_of":
                continue
            arguments = [ast.literal_eval(argument) for argument in node.args]
            found.append((arguments[0], arguments[1] if len(arguments) > 1 else ""))
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the shipped files, and what the pages tell to write."""
    for name in ("configs", "launch", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ALL, ids=lambda command: f"{command.page}: {command.text[:60]}")
def test_a_test_runs_it(command: Command) -> None:
    started = call(command)
    is_dry = started is not None and "--dry-run" in started.arguments
    reasons = [why for page, part, why in NOT_RUN if page == command.page and part in command.text]
    is_run = is_dry or any(
        page == command.page and re.search(pattern, command.text)
        for page, pattern in run_by_tests()
    )
    assert is_run or reasons, (
        "no test runs this command: get it from tests.pages.commands_of and run it, or add it to "
        "NOT_RUN with the reason"
    )
    assert not (is_run and reasons), "a test runs it, so it must not stand in NOT_RUN"


@pytest.mark.parametrize(
    "command",
    [command for command in ALL if call(command) is not None],
    ids=lambda command: f"{command.page}: {command.text[:60]}",
)
def test_the_program_takes_its_arguments(command: Command, place: Path) -> None:
    minimal = files("README.md")["my.yaml"]
    own = {"my.yaml": minimal, "my_run.yaml": minimal, **files(command.page)}
    for name, content in own.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(content, encoding="utf-8")

    started = call(command)
    assert started is not None
    if started.program in PARSERS:
        assert PARSERS[started.program](started.arguments) is not None
        return
    config, dry, _ = parse_args(LAUNCHERS[started.program], started.arguments)
    ranks = started.ranks if dry is None else dry.world_size
    if not files(command.page).keys() >= set(started.arguments) & own.keys():
        ranks = None  # the page leaves open what stands in the file
    assert " fits " in dry_run(config, ranks).text


def test_every_reason_is_of_a_command() -> None:
    for page, part, _ in NOT_RUN:
        assert any(command.page == page and part in command.text for command in ALL), part


def test_the_commands_of_the_pages_are_found() -> None:
    """As many as a reader counts on two pages."""
    texts = [command.text for command in ALL]
    assert sum(command.page == "docs/conversion.md" for command in ALL) == 6
    assert sum(command.page == "configs/recipes/dpo/README.md" for command in ALL) == 5
    assert "make demo" in texts
