"""What is shown on a terminal: control characters are written out, and a broken output is told."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from mrlhf.commands.train import main
from mrlhf.config import SFTConfig
from mrlhf.errors import ConfigError, UserTraceback
from mrlhf.log import configure_logging
from mrlhf.printable import printable

ROOT = Path(__file__).parents[2]
RED = "\x1b[31m"


def test_control_characters_are_written_out_and_all_others_stay() -> None:
    assert printable(f"{RED}a\r\x07\x7f\x9b\u202e\u2028") == (
        "\\x1b[31ma\\r\\x07\\x7f\\x9b\\u202e\\u2028"
    )
    assert printable("two\n\tlines, é 漢 🙂") == "two\n\tlines, é 漢 🙂"


def test_errors_and_log_lines_show_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert str(ConfigError(f"{RED}x")) == "\\x1b[31mx"
    assert str(UserTraceback(f"{RED}x")) == "\n\\x1b[31mx"

    root = logging.getLogger()
    before = root.handlers[:]
    try:
        configure_logging(0)
        logging.getLogger("mrlhf").warning("a name %s and\na line", RED)
    finally:
        root.handlers[:] = before
    assert capsys.readouterr().err.endswith("a name \\x1b[31m and\na line\n")


def _start(arguments: list[str]) -> int:
    def never(_: object) -> None:
        raise AssertionError("nothing must start")

    try:
        return main(SFTConfig, never, arguments)
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--config", "configs/demo_sft_cpu.yaml", "--dry-run", "--allow-missing"]],
)
def test_an_output_that_is_full_is_an_error_and_one_that_is_closed_is_none(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert _start(arguments) == 1
    assert capsys.readouterr().err == "error: standard output: No space left on device\n"

    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as closed:  # as `head` leaves it
        monkeypatch.setattr(sys, "stdout", closed)
        assert _start(arguments) == 0
    assert capsys.readouterr().err == ""
