"""What a checkpoint makes of a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mrlhf.checkpoint.state_tree import StateCopy, read_state


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state, written to files and read again."""
    with TemporaryDirectory() as folder:
        StateCopy.of(state).write(Path(folder), sync=False)
        return read_state(Path(folder))
