"""Puts together the parts of a PPO run from its inputs: first the models, then the engine.

It knows which configuration key goes to which part. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mrlhf.batch import Prompts
from mrlhf.config.roots import PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.models.families import load_spec
from mrlhf.models.spec import Head
from mrlhf.preflight import PPOInputs
from mrlhf.preflight.vocabulary import Endings
from mrlhf.rl.names import estimator_traits
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.reference import Reference
from mrlhf.roles.reward_model import RewardModel
from mrlhf.rollout.collector import Collector
from mrlhf.rollout.dynamic_sampling import DynamicSampler
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer
from mrlhf.run.startup import Run
from mrlhf.trainers.generator_setup import build_generator, check_engine
from mrlhf.training.engine import ModelEngine


@dataclass(frozen=True)
class Parts:
    """The parts of a PPO run on this rank.

    Attributes:
        tokenizer: the tokenizer of all models.
        endings: what ends a response.
        generation_config: the text of the actor's `generation_config.json`, if it has one.
        held_out: the validation prompts as "val" and the test prompts as "test", as far as there
            are any.
        prompts: the training prompts.
        sampler: their order.
        steps: training steps of the run.
        critic: None if the advantage estimator needs no values.
        reference: None if no KL is asked for.
        shaper: makes the scores that train from the scores of a batch.
        collector: fills the batch of a step.
        samples_per_mini_batch: samples (prompts x n) of one optimizer step, by role.
    """

    tokenizer: Tokenizer
    endings: Endings
    generation_config: str | None
    held_out: Mapping[str, Prompts]
    prompts: PromptDataset
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

    def trained(self) -> dict[str, ModelEngine]:
        """The models that are trained, by role."""
        trained = {"actor": self.actor.engine}
        if self.critic is not None:
            trained["critic"] = self.critic.engine
        return trained


def assemble(config: PPOConfig, inputs: PPOInputs, run: Run, initial: bool = True) -> Parts:
    """Build every part; every rank calls it.

    Args:
        config: the whole configuration.
        inputs: what has been read; the scorer of the result closes the reward functions.
        run: this process's part in the job.
        initial: whether the trained models get their initial weights. If a checkpoint follows, it
            fills them.

    Raises:
        ConfigError, DataError, WeightError: a model is missing or does not fit.
    """
    check_engine(config, load_spec(config.actor.path, "lm"), run.device.torch_device)
    tokenizer = inputs.tokenizer
    prompts = inputs.prompts
    sampler = StatefulSampler(
        len(prompts), config.data.gen_batch_size, seed=config.seed, shuffle=config.data.shuffle
    )

    reward_model = _reward_model(config, run)
    actor = _actor(config, run, initial)
    critic = _critic(config, run, initial)
    reference = _reference(config, run)
    scorer = Scorer(
        inputs.reward,
        tokenizer,
        reward_model,
        actor.engine.groups.world,
        run.stops,
        run.board.phase,
    )

    # An optimizer moves the parameters, so the inference engine is connected after it.
    actor_updates = max(1, inputs.steps - max(0, config.trainer.critic_warmup - 1))
    actor.engine.attach_optimizer(config.actor.optim, actor_updates)
    if critic is not None:
        critic.engine.attach_optimizer(config.critic.optim, inputs.steps)
    generator = build_generator(config, run, actor.engine, tokenizer)

    shaper = RewardShaper(config.algorithm, config.data.max_response_length)
    collector = _collector(config, generator, scorer, shaper, map(prompts.batch, sampler))
    return Parts(
        tokenizer=tokenizer,
        endings=inputs.endings,
        generation_config=inputs.generation_config,
        held_out=inputs.held_out,
        prompts=prompts,
        sampler=sampler,
        steps=inputs.steps,
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


def _collector(
    config: PPOConfig,
    generator: Generator,
    scorer: Scorer,
    shaper: RewardShaper,
    prompts: Iterator[Prompts],
) -> Collector:
    """What fills the batches of training steps, by dynamic sampling if that is on."""
    algorithm = config.algorithm
    dynamic_sampler = None
    if algorithm.filter_groups.enable:
        dynamic_sampler = DynamicSampler(
            generator=generator,
            scorer=scorer,
            shaper=shaper,
            prompts=prompts,
            train_batch_size=config.data.train_batch_size,
            filters=algorithm.filter_groups,
        )

    return Collector(
        generator=generator,
        scorer=scorer,
        shaper=shaper,
        prompts=prompts,
        dynamic_sampler=dynamic_sampler,
        greedy_baseline=estimator_traits(algorithm.adv_estimator).needs_greedy_answer,
    )


def _actor(config: PPOConfig, run: Run, initial: bool) -> Actor:
    engine = _engine(run, "actor", config.actor, "lm")
    if initial:
        engine.load(config.actor.path, config.seed)
    settings = PolicyLossSettings.of(config.actor, config.algorithm.rollout_correction)
    return Actor(engine, settings, config.rollout.temperature, run.board.phase)


def _critic(config: PPOConfig, run: Run, initial: bool) -> Critic | None:
    if not config.needs_critic:
        return None
    engine = _engine(run, "critic", config.critic, "scalar")
    if initial:
        engine.load(config.critic.path, config.seed)
    return Critic(engine, config.critic, run.board.phase)


def _reference(config: PPOConfig, run: Run) -> Reference | None:
    if not config.needs_reference:
        return None
    engine = _engine(run, "reference", config.reference, "lm")
    engine.load(config.reference.path, config.seed)
    return Reference(engine, config.rollout.temperature)


def _reward_model(config: PPOConfig, run: Run) -> RewardModel | None:
    if config.reward_model is None:
        return None
    engine = _engine(run, "reward_model", config.reward_model, "scalar")
    engine.load(config.reward_model.path, config.seed, needs_head=True)
    return RewardModel(engine)


def _engine(run: Run, name: str, section: RoleSection, head: Head) -> ModelEngine:
    """The model of role `name` without weights."""
    spec = load_spec(section.path, head)
    return ModelEngine(section, spec, run.groups(name, section), run.device, run.stops)
