"""Ranks that were not started alike end with one line that names what differs, and the ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

from mrlhf.checkpoint.output_files import TIMELINE
from mrlhf.device import pick_device
from mrlhf.errors import ConfigError
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.job import Launch
from mrlhf.run.board import Timeline
from mrlhf.run.same_start import describe_differences, describe_start, require_same_start
from mrlhf.run.startup import Run
from tests.ranks import run_ranks
from tests.unit.configurations import ppo

ALIKE = "alike"
START = "the ranks were not started alike: "
END = "; give every node the same files, code and command"
KEY = "data.train_files"


def _start(rank: int, world_size: int, root: str) -> list[str]:
    """Start again and again with copies of the data, the tokenizer and the configuration."""
    launch = Launch(rank, world_size, rank)
    node = Path(root) / f"node_{rank // 2}"  # two ranks on each
    data = [(KEY, str(node / "a.jsonl")), (KEY, str(node / "b.jsonl"))]
    tokenizer = [("data.tokenizer", str(node / "tokenizer"))]
    code = {"the code of mrlhf": f"version {rank // 2}"}
    starts = [
        describe_start(ppo(), []),
        describe_start(ppo(), data),
        describe_start(ppo(), tokenizer),
        describe_start(ppo(seed=10 + rank // 3, rollout__n=4), data[:1]),
        describe_start(ppo(), data[:1]) | code,
    ]

    said = []
    for facts in starts:
        try:
            _, told = require_same_start(launch, facts, 120.0, lambda: None, lambda: f"day {rank}")
            assert told == "day 0"
            said.append(ALIKE)
        except ConfigError as error:
            said.append(str(error))
    _begin(launch, Path(root))
    return said


def _begin(launch: Launch, directory: Path) -> None:
    """Begin a run in which the main rank deletes what an earlier one has left."""
    run = Run(
        pick_device("cpu", 0),
        launch.rank,
        launch.world_size,
        GroupFactory(120.0),
        directory,
        timeline=Timeline(directory, launch.rank, 0, {}),
    )

    def delete() -> None:
        time.sleep(0.2)  # the others would be faster, if they did not wait
        assert not (directory / TIMELINE).exists(), "a file that this run needs would be deleted"

    if launch.rank == 0:
        run.changes.append(delete)
    run.begin()
    assert (directory / TIMELINE / f"rank_{launch.rank}.jsonl").is_file()


def test_every_rank_says_what_differs_and_where(tmp_path: Path) -> None:
    for node in (0, 1):
        directory = tmp_path / f"node_{node}"
        (directory / "tokenizer").mkdir(parents=True)
        (directory / "a.jsonl").write_text("the same\n" * 50000)
        (directory / "tokenizer" / "tokenizer.json").write_text(f'{{"version": {node}}}')
        (directory / "tokenizer" / ".lock").write_text(f"of process {node}")
    (tmp_path / "node_0" / "b.jsonl").write_text("one row\n")

    ranks = run_ranks(4, _start, str(tmp_path))
    assert ranks[1:] == ranks[:1] * 3, "all ranks end alike"
    alike, data, tokenizer, seed, code = ranks[0]
    assert alike == ALIKE
    assert data.startswith(f"{START}the content of {KEY}, file 2 is 8 bytes with the hash ")
    assert data.endswith(f" on rank 0 and missing on ranks 2-3{END}")
    assert tokenizer.count("14 bytes with the hash") == 2 and tokenizer.count("data.tokenizer") == 1
    assert seed == f"{START}seed is 10 on rank 0 and 11 on rank 3{END}"
    assert (
        code == f"{START}the code of mrlhf is version 0 on rank 0 and version 1 on ranks 2-3{END}"
    )


def test_many_ranks_and_keys_make_one_short_line() -> None:
    told = {}
    for rank in (*range(8, 16), 99, *range(1000, 4096)):
        told[rank] = json.dumps([f"key_{number} is 1 on rank 0 and 2 on" for number in range(9)])
    line = describe_differences(told)
    assert "key_0 is 1 on rank 0 and 2 on ranks 8-15, 99, 1000-4095; key_1" in line
    assert "key_2" in line and "key_3" not in line and "and 6 more differences" in line
    assert "\n" not in line and len(line) < 300
    assert describe_differences({}) == ""
