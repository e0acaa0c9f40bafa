"""One rank of a job of any size: its start and one step, with the product's own code.

Only this rank exists. It hears from the others what it says itself; tensors have no values. What a
rank cannot do without the others is left out: reading weights, and exchanging responses, in whose
place there are made-up ones.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engine_loop import generate
from mrlhf.config.roots import AnyConfig, DPOConfig, PPOConfig, SFTConfig
from mrlhf.config.sections import RoleSection
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.device import Device, device_kind, dtype_on
from mrlhf.inference.base import Request
from mrlhf.inputs import PPOInputs
from mrlhf.inputs.vocabulary import Endings
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.spec import Head
from mrlhf.parallel.device_memory import DeviceMemory
from mrlhf.parallel.groups import GroupFactory
from mrlhf.parallel.machine import Machine, OpenTable
from mrlhf.parallel.phases import Phases
from mrlhf.preflight.memory_checks import with_keys
from mrlhf.preflight.model_checks import cache_block
from mrlhf.rewards.combine import RewardFunction
from mrlhf.rl.names import estimator_traits
from mrlhf.run.board import Board
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.setup import assemble
from mrlhf.trainers.ppo.step import PPOTrainer
from mrlhf.training.engine import ModelEngine
from tests.simulation.made_up import (
    MadeUpPrompts,
    MadeUpTokenizer,
    collected,
    samples_of_a_step,
    task_of,
)
from tests.simulation.valueless import Exchange, with_values, without_values

T = TypeVar("T")
_DRAWN = 2  # tokens of the response that the engine draws: after the prompt, and one by itself


@dataclass(frozen=True)
class Simulated:
    """What one rank has done."""

    rank: int
    held: Mapping[str, Mapping[str, int]]  # bytes by owner when each phase held most
    calls: Mapping[Exchange, int]  # of collectives
    nbytes: Mapping[Exchange, int]  # in the larger of what went in and what came out
    groups: int  # process groups of several ranks that the rank is in
    seconds: float  # that the simulation took
    failed_in: str = ""  # the phase in which it failed; "" if it did not
    error: str = ""


def simulate_rank(config: AnyConfig, world_size: int, rank: int, per_machine: int) -> Simulated:
    """Simulate rank `rank` of `world_size`, in a process of its own.

    The layout and the models, whose directories hold a `config.json`, have been checked.
    """
    began = time.monotonic()
    warnings.simplefilter("ignore")  # of torch, about its own fake tensors
    logging.disable(logging.WARNING)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    memory = _Ledger()
    phases = Phases(memory=memory)

    with (
        without_values(lambda: phases.name) as mode,
        mock.patch.object(ModelEngine, "load", _load_nothing),
    ):
        failed: dict[str, str] = {}
        factory = None
        try:
            machines = [f"machine {other // per_machine}" for other in range(world_size)]
            factory = GroupFactory(600.0, machines)
            factory.machine = _Alone(factory._own_group([[rank]]), None, 1)
            device = Device("cpu", torch.device("cpu"))
            board = Board(phases)
            run = Run(device, rank, world_size, factory, Path(), board=board)
            _start_and_step(_as_simulated(config, world_size), run)
        except Exception as error:  # of any kind, since it is what was looked for
            failed = {"failed_in": phases.name, "error": f"{type(error).__name__}: {error}"}

    return Simulated(
        rank,
        DeviceMemory.take_peaks(memory),
        dict(mode.calls),
        dict(mode.nbytes),
        0 if factory is None else sum(rank in own for own in factory._groups if len(own) > 1),
        time.monotonic() - began,
        **failed,
    )


def _load_nothing(engine: ModelEngine, *_: object, **__: object) -> None:
    """Have the weights on the device and let them leave it, as when they are read."""
    with engine.residency.needing("params"):
        pass


class _Ledger(DeviceMemory):
    """Keeps the peaks of the phases until the end of the simulation."""

    def take_peaks(self) -> dict[str, dict[str, int]]:
        """Nothing."""
        return {}


class _Alone(Machine):
    """A machine on which the others of its ranks write nothing."""

    def table(self, shape: Sequence[int], dtype: torch.dtype) -> OpenTable:
        """A table with values, which stay zeros where a model's output is written."""
        entries = with_values(lambda: torch.zeros(tuple(shape), dtype=dtype))
        return OpenTable(self, entries, is_shared=False)

    def compute_on_leader(self, compute: Callable[[], T], shared: Sequence[object] = ()) -> T:
        """The result, computed here."""
        return with_values(compute)


def _as_simulated(config: AnyConfig, world_size: int) -> AnyConfig:
    """The configuration with the smallest batch, and with what the device would choose."""
    kind = device_kind(config.distributed.device)
    keys: dict[str, Any] = {
        f"{name}.dtype": str(dtype_on(section.dtype, kind)).removeprefix("torch.")
        for name, section in vars(config).items()
        if isinstance(section, RoleSection)
    }
    samples = samples_of_a_step(config, world_size)

    if not isinstance(config, PPOConfig):
        return with_keys(config, keys | {"data.batch_size": samples})
    n = min(2, config.rollout.n)
    prompts = samples if samples % n else samples // n
    keys |= {
        "rollout.n": n,
        "data.train_batch_size": prompts,
        "data.gen_batch_size": prompts,
        "rollout.max_num_seqs": 1,
        "rollout.block_size": cache_block(config),
        "rollout.kv_cache_mb": None,
        "rollout.reshard_bucket_mb": 2**16,  # the same messages, in fewer parts
        "rollout.verify_reshard": False,
        "rollout.dump_freq": 0,
        "trainer.log_samples": 0,
    }

    for name in config.trained():
        keys[f"{name}.ppo_mini_batch_size"] = prompts
        keys[f"{name}.ppo_epochs"] = 1
    if config.actor.router_replay == "rollout":
        keys["actor.router_replay"] = "none"  # the made-up responses have no record

    return with_keys(config, keys)


def _start_and_step(config: AnyConfig, run: Run) -> None:
    if isinstance(config, PPOConfig):
        _ppo(config, run)
        return
    head: Head = "lm" if isinstance(config, SFTConfig | DPOConfig) else "scalar"
    spec = spec_of_role(config.model, head)
    groups = run.groups("model", config.model)
    engine = ModelEngine(config.model, spec, groups, run.device, run.phases)
    engine.attach_optimizer(config.optim, 1)
    _make_moments(engine)
    rows = config.data.batch_size
    with run.phases.enter("step"):
        task_of(config, rows).step(engine, range(rows))


def _ppo(config: PPOConfig, run: Run) -> None:
    spec = spec_of_role(config.actor, "lm")
    prompts = MadeUpPrompts(config.data.train_batch_size, config.data.max_prompt_length)
    inputs = PPOInputs(
        tokenizer=cast(Tokenizer, MadeUpTokenizer(spec.vocab_size)),
        endings=Endings((), ()),
        generation_config=None,
        prompts=cast(PromptDataset, prompts),
        held_out=MappingProxyType({}),
        steps=1,
        reward=RewardFunction([("exact_match", 1.0)]),
        environments=None,
    )
    parts = assemble(config, inputs, run)
    for engine in parts.trained().values():
        _make_moments(engine)
    batch = prompts.batch(range(len(prompts)))
    with run.phases.enter("reshard"):
        parts.generator.take_weights(0)
    with run.phases.enter("gen"):
        sampling = replace(parts.sampling, max_tokens=_DRAWN)
        request = Request(
            id=0, prompt=batch.token_ids[-1], uid=0, samples=range(1), sampling=sampling
        )
        generate(parts.generator.engine, [request], lambda unit: True)
        parts.generator.sleep()

    trainer = PPOTrainer(config, run, parts)
    greedy = estimator_traits(config.algorithm.adv_estimator).needs_greedy_answer
    with mock.patch.object(trainer, "collect", return_value=collected(config, batch, greedy)):
        trainer.step(trainer.begin_step(1))


def _make_moments(engine: ModelEngine) -> None:
    """Have moments before the first step, as on a GPU."""
    assert engine.optimizer is not None
    with engine.training():
        engine.optimizer.make_moments(steps_taken=1)
