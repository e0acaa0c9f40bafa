"""Keeps what the checks and the benchmarks of a GPU found, in one JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def record(path: Path, section: str, rows: Sequence[dict[str, Any]]) -> None:
    """Put `rows` into `section` of the file, with the machine; other sections stay."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    available = torch.cuda.is_available()
    kept["machine"] = {
        "gpu": torch.cuda.get_device_name(0) if available else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    kept[section] = list(rows)
    write_json(path, kept)


def write_json(path: Path, content: Any) -> None:
    """Write a file that is whole whenever the process is killed, in a directory that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    new.replace(path)
