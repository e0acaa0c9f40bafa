"""Passes of a sharded model that a stop cuts short, on layouts of four ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch.distributed as dist
from torch import Tensor

from mrlhf.batch import Sequences
from mrlhf.config.sections import ActorOptimSection, ActorSection
from mrlhf.errors import Interrupted
from mrlhf.metrics import Tally
from mrlhf.models.families import load_spec
from mrlhf.parallel.agreed_stop import AgreedStop
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.phases import Phases
from mrlhf.training.engine import ModelEngine
from mrlhf.training.results import PackResult
from tests.dist.role_runs import CPU
from tests.oracle import plain_models
from tests.ranks import run_ranks

ROWS = 24


@dataclass(frozen=True)
class Way:
    """One way of running a model."""

    sizes: AxisSizes  # of its axes
    sequence_parallel: bool = False  # whether tensor-parallel ranks share tokens
    overlapped: bool = False  # whether replicas exchange gradients and weights while they compute
    model: str = "qwen2-tied"  # its name


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


class AskingPhases(Phases):
    """The phases of a rank; once `interrupt_at` is called, one rank asks for a stop at unit 3.

    Where nothing is asked for, all passes run whole.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        super().__init__(AgreedStop(store, rank, world_size))
        self._store = store
        self._ranks = (rank, world_size)
        self._ended = threading.Event()
        self._number = 0
        self._asks = False
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def interrupt_at(self, asking_rank: int) -> None:
        """Stop the next passes, as `asking_rank` asks for it."""
        self._number += 1
        self._asks = self._ranks[0] == asking_rank
        store = dist.PrefixStore(f"stop {self._number}", self._store)
        self.stops = AgreedStop(store, *self._ranks)

    def close(self) -> None:
        self._ended.set()
        self._watcher.join()

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[int], bool]]:
        def ask_and_begin(unit: int) -> bool:
            if self._asks and unit == 3:
                self.stops.ask(f"rank {self._ranks[0]} has asked")
            return may_begin(unit)

        with self.stops.stretch() as may_begin:
            yield ask_and_begin

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.stops.look()


@dataclass(frozen=True)
class Outcome:
    """What one rank saw on one layout."""

    reasons: list[str]  # why the forward pass and the update stopped
    computed: list[int]  # packs that were evaluated in each of them, and the packs that there are
    packs: int
    # Log-probabilities and metrics after both, of the whole passes.
    interrupted: tuple[list[float], dict[str, float]]
    # The same of an engine that was never interrupted.
    undisturbed: tuple[list[float], dict[str, float]]


def _in_ranks(rank: int, world_size: int, root: str) -> list[Outcome]:
    factory = GroupFactory(timeout_s=600.0)
    store = dist.distributed_c10d._get_default_store().clone()
    outcomes = []
    for number, way in enumerate(WAYS):
        groups = factory.role_groups(ParallelLayout.for_world("actor", world_size, way.sizes))
        phases = AskingPhases(dist.PrefixStore(f"layout {number}", store), rank, world_size)
        try:
            section = _section(root, way)
            outcomes.append(_outcome(section, groups, phases, asking_rank=number % world_size))
        finally:
            phases.close()
    return outcomes


def _outcome(
    section: ActorSection, groups: RoleGroups, phases: AskingPhases, asking_rank: int
) -> Outcome:
    reasons = []
    computed = []
    engine = _engine(section, groups, phases)
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
        engine.train_mini_batch(packs, loss, "actor")

    for run in (forward, update):
        computed.append(0)
        phases.interrupt_at(asking_rank)
        try:
            run()
            dist.barrier()  # a rank may have left the pass before another one asks for the stop
            with phases.interruptible():
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
        tally.add("actor/pg_loss", output.mean(), 1)
        return _loss_of(engine, output) / ROWS, PackResult(tally)

    results = [engine.train_mini_batch(packs, loss, "actor") for _ in range(3)]
    at_once = engine.metrics_of(results)
    first = engine.metrics_of(results[:1])
    assert engine.metrics_of(results[1:], first).state_dict() == at_once.state_dict()
    return [float(total) for total in sums], at_once.values()


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


def _engine(section: ActorSection, groups: RoleGroups, phases: AskingPhases | None) -> ModelEngine:
    engine = ModelEngine(section, load_spec(section.path, "lm"), groups, CPU, phases)
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
            assert metrics["actor/grad_norm"] > 0
