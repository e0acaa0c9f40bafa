"""The command `mrlhf`: its subcommands, its pages, its ranks and what a shell completes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest

from mrlhf.commands import completion, docs
from mrlhf.commands.entry import SUBCOMMANDS, Subcommand, help_text, main
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
    for name, near in (
        ("train_ppo", "'train-ppo'"),
        ("convert-checkpoint", "'convert'"),
        ("train", " or ".join(f"'train-{x}'" for x in ("sft", "rm", "critic", "dpo", "ppo"))),
        ("ppo", "'train-ppo'"),
    ):
        assert main([name]) == 2
        assert f"did you mean {near}?" in capsys.readouterr().err
    for arguments in (
        *(["train-ppo", "-n"], ["train-sft", "-n", "0"], ["torchrun", "-n", "2"]),
        ["train-rm", "--config", "some.yaml", "-n"],
    ):
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
    """Wherever the number of ranks stands among the arguments."""
    command = [sys.executable, "-m", "mrlhf", "train-sft", "--config", "nowhere.yaml", "-n", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.count("nowhere.yaml") == 1


def test_a_dry_run_is_for_the_ranks_that_would_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["mrlhf"])
    given = ["--config", str(ROOT / "configs" / "demo_sft_cpu.yaml"), "--dry-run"]
    for arguments in (["-n", "2", *given], [*given, "--ranks", "2"]):
        assert main(["train-sft", *arguments, "--allow-missing"]) == 0
        assert "fits 2 ranks" in capsys.readouterr().out


def test_pages_and_the_sections_of_all_alarms_are_found() -> None:
    pages = docs.read_pages(ROOT)
    listed = docs.list_of_pages(pages)
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        assert re.search(rf"^{page.stem} ", listed, re.MULTILINE)
        assert docs.find(pages, page.stem) == docs.find(pages, f"docs/{page.name}")
    for page in (ROOT / "configs" / "recipes").glob("*/README.md"):
        path = str(page.relative_to(ROOT))
        assert docs.find(pages, path) == docs.find(pages, f"recipes/{page.parent.name}") != ""
    for rule in RULES:
        section = docs.find(pages, rule.name)
        assert section == docs.find(pages, rule.link), rule.name
        assert section.startswith("##") and "**" in section, rule.name
    assert docs.find(pages, "slurm#variables").startswith("## Variables\n")


def test_a_page_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["slrum"]) == 2
    assert "did you mean 'slurm'" in capsys.readouterr().err
    assert docs.main(["gsm8k"]) == 2
    assert "did you mean 'recipes/rlhf_gsm8k' or 'recipes/rlvr_gsm8k'" in capsys.readouterr().err


def completed(*words: str) -> list[str]:
    """What bash offers for the last word of a line."""
    line = " ".join(words)
    lines = [
        completion.script(),
        f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _mrlhf",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_and_keys() -> None:
    assert completed("mrlhf", "train-p") == ["train-ppo"]
    keys = [f"{key}=" for key in nodes(PPOConfig) if key.startswith("actor.lora.")]
    assert completed("mrlhf", "train-ppo", "actor.lora.") == keys and len(keys) > 4
    assert completed("mrlhf", "train-sft", "--conf") == ["--config"]
    assert completed("mrlhf", "plan", "--config", "a.yaml", "actor.lora.") == keys
    assert completed("mrlhf", "docs", "slu") == ["slurm"]
    for start in (
        ["torchrun", "--nproc-per-node=2", "launch/train_ppo.py"],
        ["torchrun", "--nproc-per-node", "=", "2", "--no-python", "mrlhf-train-ppo"],
        ["mrlhf-train-ppo"],
    ):
        assert completed(*start, "--config", "a.yaml", "actor.lora.") == keys
    assert completed("torchrun", "--nproc") == []


def test_bash_completes_values() -> None:
    """As bash cuts words, at "=", and as zsh does."""
    presets = completed("mrlhf", "train-ppo", "algorithm.preset", "=", "dr_")
    assert presets == ["dr_grpo"]
    assert completed("mrlhf", "train-ppo", "algorithm.preset=dr_") == ["algorithm.preset=dr_grpo"]
    both = completed("torchrun", "launch/train_ppo.py", "actor.share_prompts", "=")
    assert both == ["true", "false"]
    assert completed("mrlhf", "train-dpo", "dpo.loss_type", "=", "") == ["sigmoid", "ipo"]
    assert completed("mrlhf", "train-ppo", "actor.tp", "=", "") == []


@pytest.mark.parametrize("row", SUBCOMMANDS, ids=lambda row: row.name)
def test_bash_completes_all_options(
    row: Subcommand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the program's own help names, and no others."""
    if row.name == "torchrun":
        return  # torch's
    called = [["--help"]]
    if row.name == "prepare-data":
        called += [[task, "--help"] for task in ("arithmetic", "gsm8k", "gsm8k_chat")]
    texts = []
    for arguments in called:
        monkeypatch.setattr(sys, "argv", [row.name, *arguments])
        with pytest.raises(SystemExit):
            getattr(import_module(row.module), row.function)()
        texts.append(capsys.readouterr().out)
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", "\n".join(texts), re.MULTILINE))
    assert set(completed("mrlhf", row.name, "--")) == options
