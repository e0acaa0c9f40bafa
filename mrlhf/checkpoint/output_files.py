"""The names of the files and folders that a run writes into its output directory: the one list.

It also writes and reads `summary.json`, the few numbers that a run is judged by. It does not know
what the others hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mrlhf.checkpoint.manifest import CHECKPOINTS
from mrlhf.errors import DataError

ALARMS = "alarms.jsonl"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
PROFILES = "profiles"
REFERENCE_LOGPROBS = "reference_logprobs.npz"
REPORT = "report.html"
RUN_RECORD = "run.json"
STATUS = "status.json"
SUMMARY = "summary.json"
TENSORBOARD = "tensorboard"
TIMELINE = "timeline"
VALIDATION = "validation"

MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", ".*.tmp")
FILES = (
    METRICS,
    ALARMS,
    STATUS,
    CONFIG,
    RUN_RECORD,
    SUMMARY,
    "curves.png",
    REFERENCE_LOGPROBS,
)
# Patterns of the files in each folder.
FOLDERS = MappingProxyType(
    {
        CHECKPOINTS: ("step_*", ".step_*", "before_*.step_*", "damaged_*.step_*"),
        TENSORBOARD: ("events.out.tfevents.*",),
        "rollouts": ("step_*.jsonl", "step_*.parquet"),
        TIMELINE: ("rank_*.jsonl",),
        VALIDATION: ("step_*.jsonl",),
        PROFILES: ("step_*.json.gz", ".step_*.json.gz*", "out_of_memory_rank_*.pickle"),
        "hangs": ("*",),
        "judge": ("rank_*.jsonl",),
        "wandb": ("*",),
    }
)
_MODELS = ("actor", "actor_best", "actor_merged", "critic", "model", "model_best", "model_merged")
# Patterns of all that a run and its report leave, by folder; `trainer.overwrite` deletes these.
WRITTEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        ".": (
            *FILES,
            REPORT,
            "metrics.before_*.jsonl",
            "metrics.damaged_*.jsonl",
            "alarms.before_*.jsonl",
            "summary.before_*.json",
            "before_*.failed_step_*",
            *(f"{name}/before_*.step_*" for name in ("rollouts", PROFILES, VALIDATION)),
            *(f"{name}.before_*/{pattern}" for name in _MODELS for pattern in MODEL_FILES),
            "config.*.yaml",
            "failed_step_*",
            f".{REFERENCE_LOGPROBS}.tmp",
            "tensorboard.before_*",
            *(f"{name}.partial" for name in _MODELS),
            *(f".{name}.replaced" for name in _MODELS),
        ),
        **FOLDERS,
        **dict.fromkeys(_MODELS, MODEL_FILES),
    }
)


def write_summary(output_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` into `output_dir`."""
    (output_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def read_summary(output_dir: Path) -> dict[str, Any] | None:
    """The summary of a run; None if it has not ended; DataError if the file is damaged."""
    file = output_dir / SUMMARY
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}; remove it") from error
    if not isinstance(summary, dict):
        raise DataError(f"{file} is no summary: it holds a {type(summary).__name__}; remove it")
    return summary
