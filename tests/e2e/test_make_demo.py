"""`make demo` and `make sums` on a terminal, with two steps of each training: short, with a view.

`test_demo.py` and `test_sums_recipe.py` run all steps, and see what they teach. Here a small model
with random weights stands for the real one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT, on_terminal
from tests.models.chat import chat_tokenizer
from tests.models.checkpoints import save_model
from tests.pages import commands_of
from tools.demo import STAGES, SUMS_STAGES, Stage, run

# This environment stands for the one that `make` would install.
READY = ("ready", "dev-ready", "english-ready")
VARIABLES = [
    f"VENV={sys.prefix}",
    *(f"{name.upper().replace('-', '_')}={name}" for name in READY),
]


@dataclass(frozen=True)
class Demo:
    """`make demo` in a copy of the repository in which the two trainings take two steps."""

    place: Path  # the copy
    code: int  # the exit code
    screen: str  # what the terminal has got


def copy_repository(place: Path, *configs: str) -> None:
    """Put what `make` needs there, with two steps in these configurations."""
    for name in ("Makefile", "constraints-cpu.txt", "launch", "setup.py", "tools"):
        (place / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", place / "configs")
    for name in configs:
        file = place / "configs" / name
        text = re.sub(r"total_steps: \d+", "total_steps: 2", file.read_text(encoding="utf-8"))
        text = re.sub(r"lr_warmup_steps: \d+", "lr_warmup_steps: 1", text)
        text = text.replace("freq: 10", "freq: 1")
        file.write_text(text, encoding="utf-8")
    for name in READY:
        (place / name).touch()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    place = tmp_path_factory.mktemp("demo")
    copy_repository(place, "demo_sft_cpu.yaml", "demo_cpu.yaml")
    (command,) = commands_of("README.md", "^make demo$")
    return Demo(place, *_on_a_terminal([*command.split(), *VARIABLES], place))


def test_the_second_command_teaches_a_real_model_sums(tmp_path: Path) -> None:
    """Here a small one, which is already where the first stage would write the real one."""
    copy_repository(tmp_path, "recipes/english/sums.yaml")
    model = tmp_path / "runs" / "english" / "model"
    tokenizer = chat_tokenizer("chatml")
    save_model("llama", model, vocab_size=tokenizer.highest_id + 1, max_position_embeddings=256)
    tokenizer.save_pretrained(model)
    # It cuts a text into more tokens than the real one.
    file = tmp_path / "configs/recipes/english/sums.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"prompt_length: \d+", "prompt_length: 200", text), encoding="utf-8")

    (command,) = commands_of("README.md", "^make sums$")
    assert commands_of("configs/recipes/english/README.md", "^make sums$") == [command]
    code, screen = _on_a_terminal([*command.split(), *VARIABLES], tmp_path)
    assert code == 0, screen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    for number, stage in enumerate(SUMS_STAGES, start=1):
        assert f"{number}/4 {stage.title}" in plain
    assert re.search(r"learned: \d+% -> \d+% right answers to sums .* minutes", plain)

    summary = json.loads((tmp_path / "runs/sums/summary.json").read_text(encoding="utf-8"))
    assert 0 <= summary["start_accuracy"] <= 1 and 0 <= summary["final_accuracy"] <= 1
    assert summary["seconds"] > summary["training_seconds"] > 0
    assert (tmp_path / "runs/sums/report.html").is_file()


def test_it_is_short_and_shows_what_it_does(demo: Demo) -> None:
    screen = demo.screen
    assert demo.code == 0, screen

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    for number, stage in enumerate(STAGES, start=1):
        assert f"{number}/4 {stage.title}" in plain
        assert f"$ {stage.command}" in plain
    assert "\x1b[1m1/4" in screen  # bold
    # The view. It is drawn four times a second, so that a quick machine may skip any one phase.
    assert re.search(r"[01]/2 steps", plain)
    assert re.search("generating|validating|updating the policy", plain)
    assert re.search(r"learned: \d+% -> \d+% right answers", plain)
    assert re.search(r"go on +source \S+/bin/activate, then the commands of README.md", plain)
    # Two steps teach nothing, and the run says so.
    lines = [line for line in plain.splitlines() if "alarm" not in line]
    assert not [line for line in lines if re.search("WARNING|INFO|Warning", line)]
    assert (demo.place / "runs/demo/report.html").is_file()


@pytest.mark.recipes
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_its_pictures_are_taken(demo: Demo) -> None:
    code, screen = _on_a_terminal(["make", "screenshots", *VARIABLES], demo.place)
    assert code == 0, screen
    for name in ("report", "rollouts", "terminal"):
        picture = (demo.place / f"docs/images/{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000, name
    assert not (demo.place / "runs/demo-again").exists()


def test_a_stage_that_fails_shows_its_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Stage("failing", "python -c 'print(1 + 1); raise SystemExit(3)'")) == 3
    assert capfd.readouterr().err == "2\n"


def _on_a_terminal(command: list[str], cwd: Path) -> tuple[int, str]:
    """Run a command on a terminal; returns its exit code, and what the terminal has got."""
    variables = {"PET_STANDALONE": "1", "PYTHONPATH": str(ROOT)}
    with on_terminal(command, cwd, variables, with_output=True) as (process, screen):
        code = process.wait()
    return code, b"".join(screen).decode(errors="replace")
