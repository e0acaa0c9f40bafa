"""How much memory saving and loading take beside the state of a rank, in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from mrlhf.checkpoint.restorer import open_checkpoint
from mrlhf.checkpoint.saver import Contents, RunIdentity, Saver
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.models.families import FAMILIES
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.training.engine import ModelEngine
from tests.dist.role_runs import CPU
from tests.ranks import everyone, run_ranks

MIB = 2**20
SLACK = 12 * MIB  # buffers of the libraries, and what the allocator keeps


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """For each rank: its state, and by how much it grew at its largest, by what it did."""
    return run_ranks(2, _save_and_load, tmp_path_factory.mktemp("memory"))


def test_a_save_needs_no_memory(grown: list[dict[str, int]]) -> None:
    for rank in grown:
        assert rank["state"] > 8 * SLACK, "the model is too small to show anything"
        assert rank["save"] < SLACK


def test_a_load_needs_no_memory(grown: list[dict[str, int]]) -> None:
    for rank in grown:
        assert rank["load"] < 4 * SLACK  # a bucket, its parts, and what the allocator keeps


def test_a_save_in_a_thread_copies_the_state_once(grown: list[dict[str, int]]) -> None:
    for rank in grown:
        assert 0.9 * rank["state"] < rank["first in a thread"] < rank["state"] + SLACK
        assert rank["next in a thread"] < SLACK, "the memory is used again"


def _save_and_load(rank: int, world_size: int, root: Path) -> dict[str, int]:
    engine = _engine(world_size)
    contents = Contents(1, False, {"actor": engine}, {})
    grown = {"state": _state_bytes(engine)}

    for name, asynchronous, times in (("save", False, ["save"]), ("thread", True, _THREAD)):
        saver = Saver(root / name, RunIdentity("test", {}), everyone(), asynchronous)
        for label in times:
            before = _reset_peak()
            saver.save(contents)
            saver.finish(wait=True)
            grown[label] = _status("VmHWM") - before

    before = _reset_peak()
    open_checkpoint(root / "save" / "step_000001", everyone()).load_models({"actor": engine})
    grown["load"] = _status("VmHWM") - before
    return grown


_THREAD = ["first in a thread", "next in a thread"]


def _state_bytes(engine: ModelEngine) -> int:
    """What this rank holds of main weights and moments; nothing refers to them afterwards."""
    assert engine.optimizer is not None
    parameters = {id(slot.parameter): slot.parameter for slot in engine.slots}
    ranges = engine.optimizer.ranges(list(parameters.values()))
    return 3 * sum(held.main.nbytes for held in ranges if held is not None)


def _engine(world_size: int) -> ModelEngine:
    """A model of 18 million parameters, whose ranks share its optimizer's state."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    spec = FAMILIES["llama"].read_config(config.to_dict(), "lm")

    groups = GroupFactory(timeout_s=600.0).role_groups(
        ParallelLayout.for_world("actor", world_size, AxisSizes(tp=1, pp=1))
    )
    engine = ModelEngine(ActorSection(path="unused", dtype="float32"), spec, groups, CPU)
    engine.initialise(seed=1)
    engine.attach_optimizer(ActorOptimSection(), total_updates=1)

    assert engine.optimizer is not None
    engine.optimizer.make_moments(1)
    parameters = {id(slot.parameter): slot.parameter for slot in engine.slots}
    for held in engine.optimizer.ranges(list(parameters.values())):
        if held is not None:
            for moment in held.moments.values():
                moment.fill_(torch.pi)  # pages that were never written take no memory
    return engine


def _reset_peak() -> int:
    """Let the largest size so far be the present one; returns it, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {key}")
