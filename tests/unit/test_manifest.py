"""A manifest says what a checkpoint is made of, or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mrlhf.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    StoredModel,
    StoredTensor,
    check_sizes,
    checkpoint_name,
    checkpoints_in,
    parse_manifest,
    read_manifest,
    seal,
    with_manifest,
)
from mrlhf.checkpoint.tensor_file import WrittenFile, write_bytes
from mrlhf.errors import CheckpointError


def save(directory: Path, step: int = 5, part: bool = False) -> Manifest:
    """A checkpoint with one file, which holds a tensor in two slices."""
    directory.mkdir()
    file = write_bytes(directory, "actor.bin", b"0123456789")
    tensor = StoredTensor((4, 2), ((0, (0, 0), (1, 2)), (0, (1, 0), (4, 2))))
    model = StoredModel("lm", {}, "float32", {"tp": 1}, ("weight",), 3, {"w": tensor})
    manifest = Manifest(step, part, "PPOConfig", 2, {"seed": 1}, {}, (file,), {"actor": model})
    write_bytes(directory, MANIFEST, manifest.to_bytes())
    return manifest


def change(directory: Path, **values: Any) -> None:
    """Write the manifest with other values, as an attacker may who knows about the hash."""
    raw = json.loads((directory / MANIFEST).read_text())
    del raw["xxh3"]
    (directory / MANIFEST).write_bytes(seal(raw | values))


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = save(tmp_path / "step_000005")
    assert read_manifest(tmp_path / "step_000005") == manifest
    check_sizes(tmp_path / "step_000005", manifest.files)


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
        check_sizes(directory, manifest.files)
    (directory / "actor.bin").unlink()
    with pytest.raises(CheckpointError, match=r"actor\.bin is missing"):
        check_sizes(directory, manifest.files)

    change(directory, format=99)
    with pytest.raises(CheckpointError, match="has format 99"):
        read_manifest(directory)
    change(directory, format=FORMAT, models={"actor": {}})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(directory)
    for content in (b"", b"{", b"[]", b"\xff", b"[" * 100_000, (seal({"format": FORMAT})[:-1])):
        (directory / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
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
        save(tmp_path / checkpoint_name(step, part), step, part)
    (tmp_path / ".step_000011.saving").mkdir()
    (tmp_path / "step_000012").mkdir()
    (tmp_path / "step_000013").write_text("")
    names = [path.name for path in checkpoints_in(tmp_path)]
    assert names.pop(1) == "step_000012"  # whoever opens it finds that it is not whole
    assert names == ["step_1000000", "step_000010_interrupted", "step_000010", "step_000009"]
    assert [path.name for path in with_manifest(tmp_path)] == names
    assert checkpoints_in(tmp_path / "missing") == []


def test_a_written_file_is_what_a_manifest_lists(tmp_path: Path) -> None:
    written = write_bytes(tmp_path, "x", b"abc")
    assert written == WrittenFile("x", 3, "78af5f94892f3950")  # XXH3-64 of "abc"


def _flipped(content: bytes) -> Iterator[bytes]:
    """The content with each of its bits flipped in turn."""
    for number in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[number // 8] ^= 1 << number % 8
        yield bytes(flipped)


def test_no_flipped_bit_is_accepted(tmp_path: Path) -> None:
    save(tmp_path / "c")
    file = tmp_path / "c" / MANIFEST
    content = file.read_bytes()
    parse_manifest(file, content)

    accepted = []
    for number, flipped in enumerate(_flipped(content)):
        with suppress(CheckpointError):
            accepted.append((number, parse_manifest(file, flipped)))
    assert accepted == []


def test_a_manifest_without_a_hash_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c")
    file = tmp_path / "c" / MANIFEST
    raw = json.loads(file.read_text())
    del raw["xxh3"]
    for number, words in ((FORMAT, "does not end with its hash"), (1, "has format 1")):
        file.write_text(json.dumps(raw | {"format": number}))
        with pytest.raises(CheckpointError, match=words):
            read_manifest(file.parent)


def test_a_name_and_a_content_that_disagree_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "step_000005")
    for name in ("step_000006", "step_5", "step_000005_interrupted"):
        (tmp_path / "step_000005").rename(tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name} holds step_000005, as .*; give it"):
            read_manifest(tmp_path / name)
        (tmp_path / name).rename(tmp_path / "step_000005")
    (tmp_path / "step_000005").rename(tmp_path / "best so far")
    assert read_manifest(tmp_path / "best so far").step == 5
