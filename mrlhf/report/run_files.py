"""Reads the files that a run has left in its directory, for its report.

It does not know how they are shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrlhf.checkpoint import output_files as files
from mrlhf.checkpoint.manifest import CHECKPOINTS, with_manifest
from mrlhf.config.load import read_leaves
from mrlhf.errors import DataError
from mrlhf.log import read_metrics
from mrlhf.report.samples import plain

_NOT_COMPARED = ("trainer.output_dir", "trainer.overwrite", "trainer.resume")


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's directory."""

    directory: Path
    records: Sequence[Mapping[str, Any]]  # a row of metrics for each step
    config: Mapping[str, Any]  # the configuration by dotted keys; empty if there is none
    summary: Mapping[str, Any]  # empty if the run has not ended
    origin: Mapping[str, Any]  # status.json and run.json, as far as there
    checkpoints: Sequence[str]  # the names of those that are whole
    # The failures that the run has seen in its metrics, in order.
    alarms: Sequence[Mapping[str, Any]]
    processes: Mapping[int, Mapping[str, Any]]  # the description of each rank, by rank
    # For each recorded step the spans of each rank: phase, seconds after the step's first, seconds,
    # busy seconds.
    phases: Mapping[int, Mapping[int, Sequence[Sequence[Any]]]]
    dumps: Mapping[int, Path]  # the files of rollouts, by step
    # Of the first and the last validation that are written down: its step, and its answers.
    validations: Sequence[tuple[int, Sequence[Mapping[str, Any]]]]
    profiles: Sequence[Path]  # traces of steps, and of the memory at the end

    @property
    def name(self) -> str:
        """The last two parts of the directory's path."""
        return "/".join(self.directory.resolve().parts[-2:])

    def metrics(self) -> dict[str, list[float | None]]:
        """Each metric over the steps, rounded to the precision that a curve can show."""
        names = sorted({name for record in self.records for name in record} - {"step"})
        return {name: [plain(record.get(name)) for record in self.records] for name in names}


def read_run(directory: Path) -> RunFiles:
    """Read the files of a run, which may still be training.

    Raises:
        DataError: there are no metrics, or a file is damaged.
    """
    metrics = directory / files.METRICS
    if not metrics.is_file():
        raise DataError(
            f"{directory} holds no {metrics.name}; give the trainer.output_dir of a run that began"
        )
    records = read_metrics(metrics)
    steps = {record["step"] for record in records}

    processes, phases = _timeline(directory / files.TIMELINE)
    return RunFiles(
        directory=directory,
        records=records,
        config=read_leaves(_text(directory / files.CONFIG)),
        summary=files.read_summary(directory) or {},
        origin={**_object(directory / files.STATUS), **_object(directory / files.RUN_RECORD)},
        checkpoints=[path.name for path in with_manifest(directory / CHECKPOINTS)],
        alarms=_records(directory / files.ALARMS),
        processes=processes,
        phases={step: phases[step] for step in sorted(phases) if step in steps},
        dumps=_dumps(directory / "rollouts", steps),
        validations=_validations(directory / files.VALIDATION, steps),
        profiles=sorted((directory / files.PROFILES).glob("[!.]*")),
    )


def differing_keys(runs: Sequence[RunFiles]) -> list[str]:
    """The keys of the configuration in which the runs differ, sorted."""
    names = {name for run in runs for name in run.config} - set(_NOT_COMPARED)

    differing = []
    for name in sorted(names):
        values = {json.dumps(run.config.get(name), default=str) for run in runs}
        if len(values) > 1:
            differing.append(name)
    return differing


def _timeline(
    directory: Path,
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[int, list[list[Any]]]]]:
    """The processes of the last start, and the spans of each step by rank."""
    processes: dict[int, dict[str, Any]] = {}
    lines: dict[int, dict[int, tuple[int, dict[str, Any]]]] = {}
    for file in sorted(directory.glob("rank_*.jsonl")):
        rank = int(file.stem.removeprefix("rank_"))
        for record in _records(file):
            if "process" in record:
                processes[rank] = record["process"]
            else:
                ranks = processes[rank]["ranks"]
                lines.setdefault(record["step"], {})[rank] = (ranks, record)

    phases = {}
    for step, of_ranks in lines.items():
        # A start with fewer ranks than the one before leaves the old lines of the others behind.
        ranks = of_ranks[0][0] if 0 in of_ranks else 0
        records = {rank: record for rank, (_, record) in of_ranks.items() if rank < ranks}
        if records:
            phases[step] = _aligned(records)
    present = processes[0]["ranks"] if 0 in processes else 0
    return {rank: processes[rank] for rank in sorted(processes) if rank < present}, phases


def _aligned(records: Mapping[int, Mapping[str, Any]]) -> dict[int, list[list[Any]]]:
    """The spans of each rank, in seconds after the earliest span of all ranks."""
    first = min(record["begin"] for record in records.values())
    aligned = {}
    for rank in sorted(records):
        record = records[rank]
        later = record["begin"] - first
        aligned[rank] = [
            [phase, round(begin + later, 4), seconds, busy]
            for phase, begin, seconds, busy in record["spans"]
        ]
    return aligned


def _dumps(directory: Path, steps: set[int]) -> dict[int, Path]:
    """The files of rollouts that hold tokens, by step."""
    dumps = {}
    for file in sorted(directory.glob("step_*.parquet")):
        step = int(file.stem.removeprefix("step_"))
        if step in steps:
            dumps[step] = file
    return dumps


def _validations(directory: Path, steps: set[int]) -> list[tuple[int, list[dict[str, Any]]]]:
    """The step and the answers of the first and of the last validation, if these are two."""
    found = {int(file.stem[5:]): file for file in directory.glob("step_*.jsonl")}
    known = sorted(step for step in found if step in steps)
    ends = (known[0], known[-1]) if len(known) > 1 else ()
    return [(step, _records(found[step])) for step in ends]


def _records(file: Path) -> list[dict[str, Any]]:
    """The lines of a file as JSON; empty if there is none."""
    records = []
    for line in _text(file).splitlines():
        with suppress(ValueError):  # a line that was being written as the process ended
            records.append(json.loads(line))
    return records


def _object(file: Path) -> dict[str, Any]:
    """The object in a file of JSON; empty if there is none."""
    with suppress(ValueError):
        values = json.loads(_text(file))
        return values if isinstance(values, dict) else {}
    return {}


def _text(file: Path) -> str:
    """The text of a file; empty if there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
