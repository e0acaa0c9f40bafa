"""The command `mrlhf`: its subcommands, its pages, its ranks and what a shell completes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

from mrlhf.commands import completion, docs
from mrlhf.commands.entry import SUBCOMMANDS, help_text, main
from mrlhf.config import PPOConfig
from mrlhf.config.tree import nodes
from mrlhf.run.alarms.rules import RULES
from mrlhf.version import __version__
from tests.pages import ROOT

SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


def test_each_installed_program_is_a_subcommand() -> None:
    programs = {
        (module, function)
        for module, function in re.findall(r'"mrlhf-[\w-]+ = ([\w.]+):(\w+)"', SETUP)
    }
    of_entry = {(row.module, row.function): row for row in SUBCOMMANDS}
    assert len(programs) >= 10 and programs <= of_entry.keys()
    for row in SUBCOMMANDS:
        assert callable(getattr(import_module(row.module), row.function))
        assert re.search(rf"^  {row.name} +{row.does}$", help_text(), re.MULTILINE)


def test_help_version_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    assert capsys.readouterr().out == 2 * (help_text() + "\n")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mrlhf {__version__}\n"

    assert main(["repot"]) == 2
    assert "no command 'repot'; did you mean 'report'?" in capsys.readouterr().err
    for arguments in (["train-ppo", "-n"], ["train-sft", "-n", "0"], ["torchrun", "-n", "2"]):
        assert main(arguments) == 2
        assert "-n takes the number of ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["nothing"], ["docs"], ["docs", "slurm"], ["init", "--help"]]
    + [["completion", shell] for shell in ("bash", "zsh")],
)
def test_a_command_that_only_prints_does_not_wait_for_torch(arguments: list[str]) -> None:
    script = """
import sys
from mrlhf.commands.entry import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
assert "mrlhf" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.DEVNULL, check=True
    )


def test_a_subcommand_reads_what_follows_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mrlhf"])
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert capsys.readouterr().out.startswith("usage: mrlhf report ")
    assert main(["train-ppo", "--config", "nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_ranks_are_started_and_say_what_is_wrong_once() -> None:
    command = [sys.executable, "-m", "mrlhf", "train-sft", "-n", "2", "--config", "nowhere.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("nowhere.yaml") == 1


def test_pages_and_the_sections_of_all_alarms_are_found() -> None:
    folder = ROOT / "docs"
    listed = docs.list_of_pages(folder)
    for page in folder.glob("*.md"):
        assert re.search(rf"^{page.stem} ", listed, re.MULTILINE)
        assert docs.find(folder, page.stem) == docs.find(folder, f"docs/{page.name}")
    for rule in RULES:
        section = docs.find(folder, rule.name)
        assert section == docs.find(folder, rule.link), rule.name
        assert section.startswith("##") and "**" in section, rule.name
    assert docs.find(folder, "slurm#variables").startswith("## Variables\n")


def test_a_page_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["slrum"]) == 2
    assert "did you mean 'slurm'" in capsys.readouterr().err


def test_bash_completes_commands_and_keys() -> None:
    def completed(*words: str) -> list[str]:
        line = " ".join(["mrlhf", *words])
        lines = [
            completion.script(),
            f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _mrlhf",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert completed("train-p") == ["train-ppo"]
    keys = [f"{key}=" for key in nodes(PPOConfig) if key.startswith("actor.lora.")]
    assert completed("train-ppo", "actor.lora.") == keys and len(keys) > 4
    assert completed("train-sft", "--conf") == ["--config"]
