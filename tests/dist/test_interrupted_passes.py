"""Passes of a sharded model that a stop cuts short, on layouts of four ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.device import Device
from mrlhf.errors import Interrupted
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.stop_points import Phase
from mrlhf.training.engine import ModelEngine, PackResult
from tests import plain_models
from tests.ranks import run_ranks

CPU = Device("cpu", torch.device("cpu"), "gloo")
ROWS = 24


@dataclass(frozen=True)
class Way:
    """One way of running a model.

    Attributes:
        sizes: of its axes.
        sequence_parallel: whether tensor-parallel ranks share tokens.
        overlapped: whether replicas exchange gradients and weights while they compute.
        model: its name.
    """

    sizes: AxisSizes
    sequence_parallel: bool = False
    overlapped: bool = False
    model: str = "qwen2-tied"


WAYS = [
    Way(AxisSizes(tp=2, pp=2)),
    Way(AxisSizes(tp=2, pp=2), sequence_parallel=True),
    Way(AxisSizes(tp=2, pp=2, vpp=2), sequence_parallel=True),
    Way(AxisSizes(tp=2), sequence_parallel=True, overlapped=True),
    Way(AxisSizes(tp=2, cp=2), sequence_parallel=True),
    Way(AxisSizes(pp=2)),
    Way(AxisSizes(pp=2, vpp=2), overlapped=True),
    Way(AxisSizes(pp=2, ep=2), overlapped=True, model="qwen2-moe"),
    Way(AxisSizes()),
]


class AskingStops:
    """The stop points of a rank; in a phase that is named, one rank asks for a stop at unit 3.

    Where nothing is asked for, all phases run whole.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._ranks = (rank, world_size)
        self._ended = threading.Event()
        self._number = 0
        self._asks = False
        self._stops = AgreedStop(store, rank, world_size)
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def interrupt_at(self, asking_rank: int) -> None:
        """Stop the next phases, as `asking_rank` asks for it."""
        self._number += 1
        self._asks = self._ranks[0] == asking_rank
        store = dist.PrefixStore(f"stop {self._number}", self._store)
        self._stops = AgreedStop(store, *self._ranks)

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[AskingStops]:
        with self._stops.phase(name) as self._phase:
            yield self

    def may_begin(self, unit: int) -> bool:
        if self._asks and unit == 3:
            self._stops.ask(f"rank {self._ranks[0]} has asked")
        phase: Phase = self._phase
        return phase.may_begin(unit)

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self._stops.look()


@dataclass(frozen=True)
class Outcome:
    """What one rank saw on one layout.

    Attributes:
        reasons: why the forward pass and the update stopped.
        computed: packs that were evaluated in each of them, and the packs that there are.
        interrupted: log-probabilities and metrics after both, of the whole passes.
        undisturbed: the same of an engine that was never interrupted.
    """

    reasons: list[str]
    computed: list[int]
    packs: int
    interrupted: tuple[list[float], dict[str, float]]
    undisturbed: tuple[list[float], dict[str, float]]


def _in_ranks(rank: int, world_size: int, root: str) -> list[Outcome]:
    factory = GroupFactory(timeout_s=600.0)
    store = dist.distributed_c10d._get_default_store().clone()
    outcomes = []
    for number, way in enumerate(WAYS):
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, way.sizes))
        stops = AskingStops(dist.PrefixStore(f"layout {number}", store), rank, world_size)
        try:
            section = _section(root, way)
            outcomes.append(_outcome(section, groups, stops, asking_rank=number % world_size))
        finally:
            stops.close()
    return outcomes


def _outcome(
    section: ActorSection, groups: RoleGroups, stops: AskingStops, asking_rank: int
) -> Outcome:
    reasons = []
    computed = []
    engine = _engine(section, groups, stops)
    packs = _packs(engine)

    def evaluate(output: Tensor, number: int) -> Tensor:
        computed[-1] += 1
        return output.sum()[None]

    def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        computed[-1] += 1
        return _loss_of(engine, output), PackResult(Tally())

    def forward() -> None:
        engine.forward(packs, evaluate)

    def update() -> None:
        engine.train_mini_batch(packs, loss, [])

    for run in (forward, update):
        computed.append(0)
        stops.interrupt_at(asking_rank)
        try:
            run()
            dist.barrier()  # a rank may have left the pass before another one asks for the stop
            with stops.phase("after"):
                pass
            reasons.append("")
        except Interrupted as interrupted:
            reasons.append(str(interrupted))

    undisturbed = _engine(section, groups, None)
    whole = [_whole_passes(engine), _whole_passes(undisturbed)]
    return Outcome(reasons, computed, len(packs), *whole)


def _whole_passes(engine: ModelEngine) -> tuple[list[float], dict[str, float]]:
    packs = _packs(engine)
    sums = engine.forward(packs, lambda output, number: output.sum()[None])

    def loss(output: Tensor, number: int) -> tuple[Tensor, PackResult]:
        tally = Tally()
        tally.add("mean", output.mean(), 1)
        return _loss_of(engine, output) / ROWS, PackResult(tally)

    results = [engine.train_mini_batch(packs, loss, ["mean"]) for _ in range(3)]
    at_once = engine.metrics_of(results)
    first = engine.metrics_of(results[:1])
    assert engine.metrics_of(results[1:], first).state_dict() == at_once.state_dict()
    return [float(total) for total in sums], at_once.means()


def _loss_of(engine: ModelEngine, output: Tensor) -> Tensor:
    """As every loss does, it gives each weight a gradient, that of the output layer too."""
    return output.square().mean() + engine.output_weight.square().mean()


def _section(root: str, way: Way) -> ActorSection:
    overlaps = dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather"), way.overlapped)
    return ActorSection(
        path=f"{root}/{way.model}",
        micro_batch_tokens=6,
        sequence_parallel=way.sequence_parallel,
        optim=ActorOptimSection(lr=1e-3, **overlaps),
    )


def _engine(section: ActorSection, groups: RoleGroups, stops: AskingStops | None) -> ModelEngine:
    engine = ModelEngine(section, load_spec(section.path, "lm"), groups, CPU, stops)
    engine.load(section.path, seed=0)
    engine.attach_optimizer(section.optim, total_updates=2)
    return engine


def _packs(engine: ModelEngine) -> list:
    sequences = [[5 + row % 3, 7, 9, 2, row % 4][: 3 + row % 3] for row in range(ROWS)]
    return engine.cut(Sequences.of(sequences, [1] * ROWS), "response").packs


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[Outcome]]:
    root = tmp_path_factory.mktemp("models")
    plain_models.save_models(root)
    return run_ranks(4, _in_ranks, str(root))


def test_all_ranks_are_interrupted(ranks: list[list[Outcome]]) -> None:
    for number, way in enumerate(WAYS):
        wanted = f"rank {number % 4} has asked"
        for outcomes in ranks:
            assert outcomes[number].reasons == [wanted, wanted], way


def test_a_pipeline_ends_early_and_computes_the_packs_before_the_stop(
    ranks: list[list[Outcome]],
) -> None:
    for number in (0, 1, 2):  # one pipeline: all its ranks are within a few packs of each other
        counts = [outcomes[number].computed for outcomes in ranks]
        assert counts[0] == counts[1] == [0, 0]  # the loss is on the last stage
        assert counts[2] == counts[3]
        packs = ranks[0][number].packs
        assert all(3 <= computed < packs for computed in counts[2])


def test_an_interrupted_pass_leaves_no_trace(ranks: list[list[Outcome]]) -> None:
    for number, way in enumerate(WAYS):
        for outcomes in ranks:
            sums, metrics = outcomes[number].interrupted
            wanted_sums, wanted_metrics = outcomes[number].undisturbed
            assert sums == wanted_sums, way
            assert metrics == wanted_metrics, way
            assert metrics["grad_norm"] > 0
