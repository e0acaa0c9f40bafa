"""A manifest says what a checkpoint is made of, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlhf.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredModel,
    StoredTensor,
    check_sizes,
    checkpoint_name,
    checkpoints_in,
    read_manifest,
)
from mrlhf.checkpoint.tensor_file import WrittenFile, write_bytes
from mrlhf.errors import CheckpointError


def save(directory: Path) -> Manifest:
    """A checkpoint with one file, which holds a tensor in two slices."""
    directory.mkdir()
    file = write_bytes(directory, "actor.bin", b"0123456789")
    tensor = StoredTensor((4, 2), ((0, (0, 0), (1, 2)), (0, (1, 0), (4, 2))))
    model = StoredModel("lm", {}, "float32", {"tp": 1}, ("weight",), 3, {"w": tensor})
    manifest = Manifest(5, False, "PPOConfig", 2, {"seed": 1}, {}, (file,), {"actor": model})
    write_bytes(directory, MANIFEST, manifest.to_json().encode())
    return manifest


def change(directory: Path, **values: Any) -> None:
    raw = json.loads((directory / MANIFEST).read_text())
    (directory / MANIFEST).write_text(json.dumps(raw | values))


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = save(tmp_path / "step_000005")
    assert read_manifest(tmp_path / "step_000005") == manifest
    check_sizes(tmp_path / "step_000005", manifest)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/../../b", ""])
def test_a_file_outside_of_the_checkpoint_is_refused(tmp_path: Path, path: str) -> None:
    save(tmp_path / "c")
    change(tmp_path / "c", files=[{"path": path, "nbytes": 1, "xxh3": "0"}])
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        read_manifest(tmp_path / "c")


def test_damage_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "c"
    manifest = save(directory)
    (directory / "actor.bin").write_bytes(b"012")
    with pytest.raises(CheckpointError, match=r"actor\.bin has 3 bytes and not 10"):
        check_sizes(directory, manifest)
    (directory / "actor.bin").unlink()
    with pytest.raises(CheckpointError, match=r"actor\.bin is missing"):
        check_sizes(directory, manifest)

    change(directory, format=99)
    with pytest.raises(CheckpointError, match="has format 99"):
        read_manifest(directory)
    change(directory, format=1, models={"actor": {}})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(directory)
    (directory / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        read_manifest(directory)
    (directory / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        read_manifest(directory)


def test_slices_that_leave_a_gap_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    raw = json.loads((tmp_path / "c" / MANIFEST).read_text())
    raw["models"]["actor"]["tensors"]["w"]["slices"].pop()
    change(tmp_path / "c", models=raw["models"])
    with pytest.raises(CheckpointError, match="actor w has 8 elements, and 2 are stored"):
        read_manifest(tmp_path / "c")


def test_the_newest_checkpoint_comes_first(tmp_path: Path) -> None:
    for step, part in ((9, False), (10, True), (10, False), (1000000, False)):
        save(tmp_path / checkpoint_name(step, part))
    (tmp_path / ".step_000011.saving").mkdir()
    (tmp_path / "step_000012").mkdir()
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names == ["step_1000000", "step_000010_interrupted", "step_000010", "step_000009"]
    assert checkpoints_in(tmp_path / "missing") == []


def test_a_written_file_is_what_a_manifest_lists(tmp_path: Path) -> None:
    written = write_bytes(tmp_path, "x", b"abc")
    assert written == WrittenFile("x", 3, "78af5f94892f3950")  # XXH3-64 of "abc"
