"""Puts together what a PPO run needs: data first, since it is cheap to refuse, then the roles, then
the engine.

It knows which configuration key goes to which part; it runs nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch

from mrlhf.batch import Prompts, Rollout
from mrlhf.config.roots import PPOConfig
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import ConfigError, DataError
from mrlhf.inference.base import EngineLimits, InferenceEngine
from mrlhf.inference.native.engine import NativeEngine
from mrlhf.inference.vllm.engine import VllmEngine, check_support
from mrlhf.inference.vllm.pieces import vllm_pieces
from mrlhf.models.families import load_spec
from mrlhf.models.parameters import engine_pieces, role_pieces
from mrlhf.models.spec import ModelSpec
from mrlhf.parallel.collectives import all_gather_objects
from mrlhf.parallel.layout import EngineLayout, ParallelLayout
from mrlhf.parallel.microbatch import MiniBatch
from mrlhf.preflight import check_vocabulary
from mrlhf.reshard.execute import Resharder
from mrlhf.reshard.plan import plan
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.frozen import Reference, RewardModel
from mrlhf.rollout.collector import Collector
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer
from mrlhf.run.startup import Run
from mrlhf.trainers.experience import make_correction
from mrlhf.weights.shard import Piece


@dataclass(frozen=True)
class _Backend:
    """What differs between inference engines before they are built.

    Attributes:
        engine: its constructor.
        check: refuses a model, engine tp and device that it cannot serve.
        layout: its replicas, from the actor's layout and `rollout.tp`.
        pieces: the named slices that a rank of them holds.
    """

    engine: Callable[..., InferenceEngine]
    check: Callable[[ModelSpec, int, torch.device], None]
    layout: Callable[[ParallelLayout, int], EngineLayout]
    pieces: Callable[[ModelSpec, EngineLayout, int], list[Piece]]


_BACKENDS = {
    "native": _Backend(
        NativeEngine, lambda spec, tp, device: None, EngineLayout.inside, engine_pieces
    ),
    "vllm": _Backend(VllmEngine, check_support, EngineLayout.consecutive, vllm_pieces),
}


@dataclass(frozen=True)
class Parts:
    """The parts of a PPO run on this rank.

    Attributes:
        tokenizer: of all models.
        held_out: the validation prompts, if there are any.
        sampler: the order of training prompts.
        steps: training steps of the run.
        critic: where the advantage estimator needs one.
        reference: where a KL is asked for.
        shaper: of rewards.
        collector: fills the batch of a step.
        samples_per_mini_batch: samples (prompts x n) of one optimizer step, by role.
    """

    tokenizer: Tokenizer
    held_out: Prompts | None
    sampler: StatefulSampler
    steps: int
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    generator: Generator
    scorer: Scorer
    shaper: RewardShaper
    collector: Collector
    samples_per_mini_batch: dict[str, int]

    def actor_plan(self, rollout: Rollout) -> list[MiniBatch]:
        """How the actor cuts the rollout; the same for old log-probs and for every epoch of the
        update.
        """
        return self.actor.plan(
            [len(tokens) for tokens in rollout.sequences()], self.samples_per_mini_batch["actor"]
        )

    def critic_plan(self, rollout: Rollout) -> list[MiniBatch]:
        """How the critic cuts the rollout."""
        assert self.critic is not None
        return self.critic.plan(
            [len(tokens) for tokens in rollout.sequences()], self.samples_per_mini_batch["critic"]
        )


def assemble(config: PPOConfig, run: Run) -> Parts:
    """Read the data and build every part; every rank calls it.

    Raises:
        ConfigError, DataError, WeightError, RewardError: an input is missing or does not fit.
    """
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
    actor_spec = load_spec(config.actor.path, "lm")
    _BACKENDS[config.rollout.engine].check(actor_spec, config.rollout.tp, run.device.torch_device)
    _check_stop(config.rollout.stop, tokenizer)
    prompts = _dataset(config, config.data.train_files, tokenizer)
    held_out = _dataset(config, config.data.val_files, tokenizer) if config.data.val_files else None
    sampler = StatefulSampler(
        len(prompts), config.data.gen_batch_size, seed=config.seed, shuffle=config.data.shuffle
    )
    steps = _steps(config, len(prompts))
    reward_model = _reward_model(config, run)
    actor, critic, reference = _roles(config, run, tokenizer)
    scorer = Scorer(config.reward, tokenizer, reward_model, actor.groups.world)
    # The optimizer re-homes parameters, so the engine is connected after it.
    actor.prepare(config.actor.optim, max(1, steps - max(0, config.trainer.critic_warmup - 1)))
    if critic is not None:
        critic.prepare(config.critic.optim, steps)
    generator = _generator(config, run, actor, tokenizer)
    shaper = RewardShaper(config.algorithm, config.data.max_response_length)
    collector = Collector(
        generator=generator,
        scorer=scorer,
        shaper=shaper,
        prompts=map(prompts.batch, sampler),
        train_batch_size=config.data.train_batch_size,
        filters=config.algorithm.filter_groups,
        greedy_baseline=config.algorithm.adv_estimator == "remax",
    )
    return Parts(
        tokenizer=tokenizer,
        held_out=None if held_out is None else held_out.batch(range(len(held_out))),
        sampler=sampler,
        steps=steps,
        actor=actor,
        critic=critic,
        reference=reference,
        generator=generator,
        scorer=scorer,
        shaper=shaper,
        collector=collector,
        samples_per_mini_batch={
            "actor": config.actor.ppo_mini_batch_size * config.rollout.n,
            "critic": config.critic.ppo_mini_batch_size * config.rollout.n,
        },
    )


def _steps(config: PPOConfig, rows: int) -> int:
    """Training steps; an epoch has as many as it has batches, refills of dynamic sampling not
    counted.

    Raises:
        DataError: there would be none.
    """
    batch = max(config.data.train_batch_size, config.data.gen_batch_size)
    steps = config.trainer.steps(rows, batch)
    if steps < 1:
        raise DataError(
            f"data.train_files hold {rows} prompts, which is less than one batch of {batch}, so there would be no "
            "training step; give more prompts, lower data.train_batch_size, or set trainer.total_steps"
        )
    return steps


def _check_stop(stop: list[str], tokenizer: Tokenizer) -> None:
    """Refuse stop strings that no response's text can contain: special tokens have none."""
    for string in stop:
        if string not in tokenizer.decode(tokenizer.encode(string)):
            raise ConfigError(
                f"rollout.stop holds {string!r}, which the tokenizer's decoded text never shows (a special token?); "
                f"responses end at the tokenizer's eos token by themselves, so leave it out"
            )


def _dataset(config: PPOConfig, files: list[str], tokenizer: Tokenizer) -> PromptDataset:
    data = config.data
    return PromptDataset(
        files, tokenizer, max_prompt_length=data.max_prompt_length, overlong=data.overlong_prompts
    )


def _roles(
    config: PPOConfig, run: Run, tokenizer: Tokenizer
) -> tuple[Actor, Critic | None, Reference | None]:
    critic: Critic | None = None
    reference: Reference | None = None
    actor = _actor(config, run, tokenizer)
    if config.needs_critic:
        spec = load_spec(config.critic.path, "scalar")
        check_vocabulary("critic", spec, tokenizer)
        critic = Critic(config.critic, spec, run.groups("critic", config.critic), run.device)
        critic.load(config.critic.path, config.seed)
    if config.needs_reference:
        spec = load_spec(config.reference.path, "lm")
        check_vocabulary("reference", spec, tokenizer)
        groups = run.groups("reference", config.reference)
        reference = Reference(
            config.reference, spec, groups, run.device, config.rollout.temperature
        )
        reference.load(config.reference.path, config.seed)
    return actor, critic, reference


def _actor(config: PPOConfig, run: Run, tokenizer: Tokenizer) -> Actor:
    spec, correction = load_spec(config.actor.path, "lm"), config.algorithm.rollout_correction
    check_vocabulary("actor", spec, tokenizer)
    bypass = make_correction(correction) if correction.bypass_mode else None
    actor = Actor(
        config.actor,
        spec,
        run.groups("actor", config.actor),
        run.device,
        config.rollout.temperature,
        loss="reinforce" if correction.loss_type == "reinforce" else None,
        bypass=bypass,
    )
    actor.load(config.actor.path, config.seed)
    return actor


def _reward_model(config: PPOConfig, run: Run) -> RewardModel | None:
    section = config.reward_model
    if section is None:
        return None
    spec = load_spec(section.path, "scalar")
    model = RewardModel(section, spec, run.groups("reward_model", section), run.device)
    model.load(section.path, config.seed)
    return model


def _generator(config: PPOConfig, run: Run, actor: Actor, tokenizer: Tokenizer) -> Generator:
    """The engine, and the way of the actor's weights into it.

    Where the replicas lie inside the model-parallel groups, a plan for the ranks of this one is a
    whole plan.
    """
    rollout, layout, backend = config.rollout, actor.groups.layout, _BACKENDS[config.rollout.engine]
    engines = backend.layout(layout, rollout.tp)
    groups = run.factory.engine_groups(engines)
    engine = backend.engine(
        actor.spec,
        groups.tp,
        run.device.torch_device,
        actor.dtype,
        _limits(config),
        decode=tokenizer.decode,
    )
    if engines.is_inside(layout):
        ranks, group = (
            next(ranks for ranks in layout.groups("tp", "pp") if run.rank in ranks),
            actor.groups.mp,
        )
    else:
        ranks, group = list(range(run.world_size)), actor.groups.world
    source = {rank: role_pieces(actor.spec, layout, rank) for rank in ranks}
    target = {rank: backend.pieces(actor.spec, engines, rank) for rank in ranks}
    # Among several holders of a slice, one on the same machine goes first.
    machines: dict[str, list[int]] = {}
    for rank, machine in enumerate(all_gather_objects(platform.node(), actor.groups.world)):
        machines.setdefault(machine, []).append(rank)
    way = plan(source, target, actor.dtype.itemsize, list(machines.values()))
    bucket_bytes = rollout.reshard_bucket_mb << 20
    resharder = Resharder(
        way,
        actor.slots,
        engine,
        run.rank,
        bucket_bytes,
        verify=rollout.verify_reshard,
        group=group,
        timeout_s=config.distributed.timeout_s,
    )
    return Generator(engine, groups, resharder, config.seed)


def _limits(config: PPOConfig) -> EngineLimits:
    rollout = config.rollout
    return EngineLimits(
        max_num_seqs=rollout.max_num_seqs,
        max_length=config.data.max_length,
        max_prefill_tokens=rollout.max_prefill_tokens,
        block_size=rollout.block_size,
        cache_bytes=None if rollout.kv_cache_mb is None else rollout.kv_cache_mb << 20,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
    )
