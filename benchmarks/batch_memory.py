"""Measures the memory that the batch of a PPO step takes on all ranks of a machine together.

The ranks go through a whole step with everything that holds the batch, and without the models: an
engine that answers at once, and passes over packs that give random numbers. So the figures are
those of the batch alone. A page that several ranks share counts once (PSS of Linux). "At end" is
what the ranks hold after all the work of the step, while it still has its batch and experience.
Ranks that share a model's layers or matrices all hold the packs of their data-parallel share, so
each layout has a row of its own.

    python benchmarks/batch_memory.py --positions 10000000 --layouts 1x1 2x2 --json FILE
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model_sizes import model_config
from torch import Tensor

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.roots import PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.inference.base import EngineStats, Finished, Request, Sample, SamplingParams
from mrlhf.models.families import FAMILIES
from mrlhf.parallel.engine_layout import EngineLayout
from mrlhf.parallel.groups import GroupFactory, RoleGroups
from mrlhf.parallel.layout import AxisSizes, ParallelLayout
from mrlhf.parallel.microbatch import BatchCut
from mrlhf.parallel.packs import Pack
from mrlhf.parallel.phases import Phases, seconds_by_phase
from mrlhf.rl.kl import KlController
from mrlhf.roles.actor import Evaluation
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.policy_objective import PolicyMiniBatch
from mrlhf.rollout.collector import Collected
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scores
from mrlhf.trainers.ppo.experience import ModelOutputs
from mrlhf.trainers.ppo.work import Work
from mrlhf.training.engine import ModelEngine

PROMPT_TOKENS = 100
RESPONSE_TOKENS = 1000
SAMPLES = 8
MINI_BATCHES = 4
MEGA = 1e6
LONGEST_S = 300.0


class InstantEngine:
    """Answers with random tokens."""

    version = 0

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()

    @property
    def in_flight(self) -> int:
        """Everything that was submitted."""
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take the requests over."""
        self._requests = requests

    def step(self) -> None:
        """Do nothing: `collect` draws everything."""

    def collect(self) -> Finished:
        """Draw all samples at once."""
        samples = []
        for request in self._requests:
            for index in request.samples:
                random = torch.Generator().manual_seed(request.uid * SAMPLES + index)
                tokens = torch.randint(1000, 50000, (RESPONSE_TOKENS,), generator=random).int()
                logprobs = -torch.rand(RESPONSE_TOKENS, generator=random)
                samples.append(
                    Sample(
                        request.id,
                        index,
                        array("i", tokens.numpy().tobytes()),
                        array("f", logprobs.numpy().tobytes()),
                        stopped=True,
                        version=0,
                    )
                )

        self._requests = ()
        return Finished(samples, EngineStats(steps=RESPONSE_TOKENS))


class _InstantModel(ModelEngine):
    """Passes over packs without a model."""

    def __init__(self, groups: RoleGroups, channels: int) -> None:
        """It gives `channels` numbers for each token."""
        self.groups = groups
        self.device = torch.device("cpu")
        self.spec = FAMILIES["llama"].read_config(model_config("tiny").to_dict(), "lm")
        self._section = RoleSection(path="none", micro_batch_tokens=16384)
        self._pipeline: Any = SimpleNamespace(forward=self._forward)
        self._channels = channels

    def _forward(self, packs: Sequence[Pack], evaluate: object, routing: object) -> list[Tensor]:
        if self.groups.coordinates.pp < self.groups.layout.pp - 1:
            return []
        return [-torch.rand(self._channels, len(pack.select)) for pack in packs]

    def outputs(self, rollout: Rollout, cut: BatchCut) -> Tensor:
        """The numbers for each token of the rollout."""
        shape = rollout.shape
        return self.per_token(cut.packs, shape, lambda output, number: output, self._channels)


def take_step(
    work: Any,
    generator: Generator,
    prompts: Prompts,
    models: Any,
    at_end: Callable[[], None],
) -> None:
    """All of a step that holds the batch; `at_end` is called while it still holds it."""
    sampling = SamplingParams(n=SAMPLES, temperature=1.0, max_tokens=RESPONSE_TOKENS, seed=1)
    with work.phases.enter("gen"):
        rollout = generator.generate(prompts, sampling, "train", step=1).rollout

    total = torch.rand(len(rollout), generator=torch.Generator().manual_seed(1))
    scores = Scores(total, {"exact_match": total.tolist()})
    collected = Collected(rollout, scores, None, RESPONSE_TOKENS * len(rollout), {})
    with work.phases.enter("cut"):
        cuts = Work.cut(work, rollout)

    with work.phases.enter("ref"):
        ref_logprobs = models.reference.outputs(
            rollout, models.reference.cut(cuts.sequences, "response")
        )[0]
    old, _ = Work.evaluate(work, rollout, cuts)
    with work.phases.enter("values"):
        values = models.critic.outputs(rollout, cuts.critic)[0]
    outputs = ModelOutputs(old, ref_logprobs, values)
    experience, _ = Work.advantages(work, collected, outputs)
    del outputs, old, ref_logprobs, values

    with work.phases.enter("mini-batches"):
        # The actor keeps the numbers of all of them for its epochs, until the update has ended.
        numbers = [
            PolicyMiniBatch.of(
                work.parts.losses.batch(experience, mini_batch.rows),
                mini_batch.local_packs,
                by_token=True,
            )
            for mini_batch in cuts.actor.mini_batches
        ]
        del numbers
    at_end()


def _work(factory: GroupFactory, models: Any, phases: Phases) -> Any:
    """What the phases need of a trainer."""
    config = PPOConfig.model_validate(
        {
            "actor": {"path": "none"},
            "data": {"train_files": "none", "max_response_length": RESPONSE_TOKENS},
            "reward": {"terms": [{"name": "exact_match"}]},
            "algorithm": {"use_kl_in_reward": True},
            "trainer": {"output_dir": "none"},
        }
    )

    def evaluate(rollout: Rollout, cut: Any, *others: Any) -> Evaluation:
        table = models.actor.outputs(rollout, cut)
        return Evaluation(table[0], table[1], None)

    rows = models.rows // MINI_BATCHES
    parts = SimpleNamespace(
        actor=SimpleNamespace(engine=models.actor, evaluate=evaluate),
        critic=SimpleNamespace(engine=models.critic),
        reference=SimpleNamespace(engine=models.reference),
        samples_per_mini_batch={"actor": rows, "critic": rows},
        losses=PolicyLossSettings.of(config.actor, config.algorithm.rollout_correction),
        shaper=RewardShaper(config.algorithm, RESPONSE_TOKENS),
        kl_controller=KlController("fixed", 0.01, 0.0, 0.0),
    )
    return SimpleNamespace(
        config=config,
        parts=parts,
        machine=factory.machine,
        phases=phases,
    )


class _Signals:
    """What the ranks and the process that measures them tell each other."""

    def __init__(self, context: Any) -> None:
        self.results = context.Queue()
        self.baseline_is_measured = context.Event()
        self.end_is_measured = context.Event()


def _rank(
    rank: int, arguments: argparse.Namespace, sizes: str, store: str, signals: _Signals
) -> None:
    """One rank, from its start to the report of its seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=arguments.ranks)
    factory = GroupFactory(timeout_s=600.0)
    tp, pp = (int(size) for size in sizes.split("x"))
    layout = ParallelLayout.for_world("actor", arguments.ranks, AxisSizes(tp=tp, pp=pp))
    groups = factory.role_groups(layout)

    rows = arguments.positions // RESPONSE_TOKENS
    models = SimpleNamespace(
        rows=rows,
        actor=_InstantModel(groups, 2),
        critic=_InstantModel(groups, 1),
        reference=_InstantModel(groups, 1),
    )
    phases = Phases()
    work = _work(factory, models, phases)
    engine_groups = factory.engine_groups(EngineLayout.inside(layout, 1))
    generator = Generator(InstantEngine(), engine_groups, None, 1)  # type: ignore[arg-type]

    count = rows // SAMPLES
    texts = [""] * count
    tokens = [list(range(1000, 1000 + PROMPT_TOKENS)) for _ in range(count)]
    prompts = Prompts(tokens, list(range(count)), texts, texts, texts, [{}] * count)

    def at_end() -> None:
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        signals.results.put({"rss": peak, "seconds": seconds_by_phase(phases.spans)})
        signals.end_is_measured.wait()

    dist.barrier()
    signals.results.put("ready")
    signals.baseline_is_measured.wait()
    take_step(work, generator, prompts, models, at_end)
    dist.barrier()
    dist.destroy_process_group()


def _proportional_bytes(process: int) -> int:
    """The memory of a process, with its share of the pages that it shares."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _bytes_of_all(processes: Sequence[Any]) -> int:
    """The memory of all processes together."""
    return sum(_proportional_bytes(process.pid) for process in processes)


@contextmanager
def _watched(processes: Sequence[Any]) -> Iterator[list[int]]:
    """The memory of all processes together, measured again and again until the end of the body."""
    measured: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            try:
                measured.append(_bytes_of_all(processes))
            except (FileNotFoundError, ProcessLookupError):
                return  # a process has ended; the main thread says so and stops

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield measured
    finally:
        ended.set()
        thread.join()


def _one_of_each(processes: Sequence[Any], results: Any) -> list[Any]:
    """A result of each rank, in any order."""
    found: list[Any] = []
    end = time.monotonic() + LONGEST_S
    while len(found) < len(processes):
        try:
            found.append(results.get(timeout=1.0))
        except queue.Empty:
            if any(process.exitcode is not None for process in processes):
                raise SystemExit("a rank has failed; its error stands above") from None
            if time.monotonic() > end:
                raise SystemExit(f"the ranks took longer than {LONGEST_S:.0f} s") from None
    return found


def measure(arguments: argparse.Namespace, layout: str) -> dict[str, Any]:
    """One row: what a step takes with all models laid out as `layout`, tp x pp."""
    context = mp.get_context("fork")  # the modules are imported once
    signals = _Signals(context)
    with tempfile.TemporaryDirectory() as directory:
        store = f"{directory}/store"
        ranks = [
            context.Process(
                target=_rank, args=(rank, arguments, layout, store, signals), daemon=True
            )
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        _one_of_each(ranks, signals.results)

        before = _bytes_of_all(ranks)
        with _watched(ranks) as measured:
            signals.baseline_is_measured.set()
            found = _one_of_each(ranks, signals.results)
        at_end = _bytes_of_all(ranks)
        signals.end_is_measured.set()
        for process in ranks:
            process.join()

    return {
        "positions": arguments.positions,
        "ranks": arguments.ranks,
        "layout": layout,
        "before_mb": round(before / MEGA),
        "peak_mb": round((max([*measured, at_end]) - before) / MEGA),
        "at_end_mb": round((at_end - before) / MEGA),
        "largest_rss_mb": round(max(one["rss"] for one in found) / MEGA),
        "seconds": {
            name: round(max(one["seconds"][name] for one in found), 2)
            for name in found[0]["seconds"]
        },
    }


def main() -> None:
    """Measure each layout, and print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument(
        "--layouts", nargs="+", default=["1x1", "2x2"], help="tp x pp of all models, one row each"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    rows = []
    for layout in arguments.layouts:
        rows.append(measure(arguments, layout))
        print(json.dumps(rows[-1], indent=1), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
