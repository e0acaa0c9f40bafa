"""A start that is refused says why once, and leaves the output directory as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import settings
from tests.faults.runs import Ended, Sequel, Undisturbed


def contents(directory: Path) -> dict[str, bytes | None]:
    """Every folder and file in `directory`, with the bytes of a file."""
    paths = sorted(directory.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def refusal(ended: Ended) -> str:
    """The one line that a refused job says."""
    assert ended.codes == [2, 2], ended.text
    assert "Traceback" not in ended.text, ended.text
    lines = ended.text.splitlines()
    (line,) = [line for line in lines if " ERROR " in line or line.startswith("error: ")]
    return line


def other_rows(inputs: Path, directory: Path) -> Path:
    """A copy of the training rows without the first one."""
    file = directory / "fewer.jsonl"
    lines = (inputs / "data" / "sft.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    return file


def changed_rows(inputs: Path, directory: Path) -> Iterator[Path]:
    """Copies of the training rows: in another order, and with another response in one of them."""
    lines = (inputs / "data" / "sft.jsonl").read_text().splitlines(keepends=True)
    last = {**json.loads(lines[-1]), "response": "7"}
    for name, changed in {
        "reversed.jsonl": lines[::-1],
        "other.jsonl": [*lines[:-1], json.dumps(last) + "\n"],
    }.items():
        (directory / name).write_text("".join(changed))
        yield directory / name


@pytest.mark.parametrize("state", ["finished", "interrupted"])
def test_a_refused_start_changes_no_run(
    state: str, inputs: Path, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    whole = undisturbed(settings.sft(inputs))
    run = Sequel(whole.setting, tmp_path / "run")
    shutil.copytree(whole.directory, run.directory)
    if state == "interrupted":
        (run.directory / "summary.json").unlink()
        newest = run.directory / "checkpoints" / run.checkpoints[-1]
        file = next(newest.glob("model/*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
    before = contents(run.directory)

    refused = {
        f"data.train_files={other_rows(inputs, tmp_path)}": "does not hold the rows",
        f"model.path={inputs / 'qwen3'}": "restore that, or begin a new run",
        "trainer.resume=never": "or give another trainer.output_dir",
    }
    for file in changed_rows(inputs, tmp_path) if state == "interrupted" else ():
        refused[f"data.train_files={file}"] = "does not hold the rows, in their order,"
    for key, message in refused.items():
        assert message in refusal(run.run(keys=[key])), key
        assert contents(run.directory) == before, key

    new = Sequel(whole.setting, tmp_path / "below" / "new")
    checkpoint = whole.directory / "checkpoints" / whole.checkpoints[0]
    keys = [*list(refused)[:1], f"trainer.resume={checkpoint}"]
    assert "does not hold the rows" in refusal(new.run(keys=keys))
    assert not new.directory.exists()


def test_ranks_that_were_not_started_alike(inputs: Path, tmp_path: Path) -> None:
    """As with a copy of each file on each node."""
    for rank in (0, 1):
        (tmp_path / f"lr_{rank}.yaml").write_text(f"optim: {{lr: {rank + 1}e-3}}\n")
        (tmp_path / f"tp_{rank}.yaml").write_text(f"model: {{tp: {rank + 1}}}\n")

    run = Sequel(settings.sft(inputs), tmp_path / "run")
    start = "error: the ranks were not started alike: "
    cases = {
        f"--config={tmp_path}/lr_<rank>.yaml": "optim.lr is 0.001 on rank 0 and 0.002 on rank 1",
        f"--config={tmp_path}/tp_<rank>.yaml": "model.tp is 1 on rank 0 and 2 on rank 1",
        "trainer.output_dir=runs/of_$RANK": (
            "trainer.output_dir is 'runs/of_0' on rank 0 and 'runs/of_1' on rank 1"
        ),
    }
    for argument, difference in cases.items():
        line = refusal(run.run(keys=[argument]))
        assert line == (f"{start}{difference}; give every node the same files, code and command")
    assert not run.directory.exists()
