"""Puts together what a PPO run needs: first the data, since it is cheap to refuse, then the models,
then the engine.

It knows which configuration key goes to which part. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrlhf.batch import Prompts
from mrlhf.config.roots import PPOConfig
from mrlhf.config.sections import RoleSection
from mrlhf.data.prompts import PromptDataset
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.tokenizer import Tokenizer, load_tokenizer
from mrlhf.errors import ConfigError, DataError
from mrlhf.models.families import load_spec
from mrlhf.models.spec import Head
from mrlhf.preflight import check_vocabulary
from mrlhf.rewards.rules import answer_rules
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
        held_out: the validation prompts, if there are any.
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
    held_out: Prompts | None
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


def assemble(config: PPOConfig, run: Run, initial: bool = True) -> Parts:
    """Read the data and build every part; every rank calls it.

    Args:
        config: the whole configuration.
        run: this process's part in the job.
        initial: whether the trained models get their initial weights. If a checkpoint follows, it
            fills them.

    Raises:
        ConfigError, DataError, WeightError, RewardError: an input is missing or does not fit.
    """
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.chat_template)
    check_engine(config, load_spec(config.actor.path, "lm"), run.device.torch_device)
    _check_stop(config.rollout.stop, tokenizer)

    prompts = _dataset(config, config.data.train_files, tokenizer, "train")
    held_out = _held_out(config, tokenizer)
    sampler = StatefulSampler(
        len(prompts),
        config.data.gen_batch_size,
        seed=config.seed,
        shuffle=config.data.shuffle,
        batch_key=_batch_key(config),
    )
    steps = _steps(config, len(prompts))

    reward_model = _reward_model(config, run)
    actor = _actor(config, run, tokenizer, initial)
    critic = _critic(config, run, tokenizer, initial)
    reference = _reference(config, run, tokenizer)
    scorer = Scorer(config.reward, tokenizer, reward_model, actor.engine.groups.world, run.stops)

    # An optimizer moves the parameters, so the inference engine is connected after it.
    actor_updates = max(1, steps - max(0, config.trainer.critic_warmup - 1))
    actor.engine.attach_optimizer(config.actor.optim, actor_updates)
    if critic is not None:
        critic.engine.attach_optimizer(config.critic.optim, steps)
    generator = build_generator(config, run, actor.engine, tokenizer)

    shaper = RewardShaper(config.algorithm, config.data.max_response_length)
    collector = _collector(config, generator, scorer, shaper, map(prompts.batch, sampler))
    return Parts(
        tokenizer=tokenizer,
        held_out=held_out,
        prompts=prompts,
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


def _batch_key(config: PPOConfig) -> str:
    """The key that sets how many prompts are drawn at once."""
    filters = config.algorithm.filter_groups.enable
    return "data.gen_batch_size" if filters else "data.train_batch_size"


def _steps(config: PPOConfig, rows: int) -> int:
    """Training steps of the run; batches that dynamic sampling adds to a step do not count.

    Raises:
        DataError: there would be none.
    """
    batch = config.prompts_per_step
    steps = config.trainer.steps(rows, batch)
    if steps < 1:
        raise DataError(
            f"data.train_files hold {rows} prompts, which is less than one batch of {batch}, so "
            "there would be no training step; give more prompts, lower data.train_batch_size, or "
            "set trainer.total_steps"
        )
    return steps


def _check_stop(stop: list[str], tokenizer: Tokenizer) -> None:
    """Refuse stop strings that the text of a response cannot contain, such as special tokens."""
    for string in stop:
        if string not in tokenizer.decode(tokenizer.encode(string)):
            raise ConfigError(
                f"rollout.stop holds {string!r}, which the tokenizer's decoded text never shows "
                "(a special token?); responses end at the tokenizer's eos token by themselves, so "
                "leave it out"
            )


def _dataset(
    config: PPOConfig, files: list[str], tokenizer: Tokenizer, split: str
) -> PromptDataset:
    data = config.data
    return PromptDataset(
        files,
        tokenizer,
        max_prompt_length=data.max_prompt_length,
        overlong=data.overlong_prompts,
        split=split,
        answer_rules=answer_rules(term.name for term in config.reward.terms),
    )


def _held_out(config: PPOConfig, tokenizer: Tokenizer) -> Prompts | None:
    """The validation prompts as one batch, if there are any."""
    if not config.data.val_files:
        return None
    prompts = _dataset(config, config.data.val_files, tokenizer, "val")
    return prompts.batch(range(len(prompts)))


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


def _actor(config: PPOConfig, run: Run, tokenizer: Tokenizer, initial: bool) -> Actor:
    engine = _engine(run, "actor", config.actor, "lm", tokenizer)
    if initial:
        engine.load(config.actor.path, config.seed)
    settings = PolicyLossSettings.of(config.actor, config.algorithm.rollout_correction)
    return Actor(engine, settings, config.rollout.temperature)


def _critic(config: PPOConfig, run: Run, tokenizer: Tokenizer, initial: bool) -> Critic | None:
    if not config.needs_critic:
        return None
    engine = _engine(run, "critic", config.critic, "scalar", tokenizer)
    if initial:
        engine.load(config.critic.path, config.seed)
    return Critic(engine, config.critic)


def _reference(config: PPOConfig, run: Run, tokenizer: Tokenizer) -> Reference | None:
    if not config.needs_reference:
        return None
    engine = _engine(run, "reference", config.reference, "lm", tokenizer)
    engine.load(config.reference.path, config.seed)
    return Reference(engine, config.rollout.temperature)


def _reward_model(config: PPOConfig, run: Run) -> RewardModel | None:
    if config.reward_model is None:
        return None
    engine = _engine(run, "reward_model", config.reward_model, "scalar", None)
    engine.load(config.reward_model.path, config.seed)
    return RewardModel(engine)


def _engine(
    run: Run, name: str, section: RoleSection, head: Head, tokenizer: Tokenizer | None
) -> ModelEngine:
    """The model of role `name` without weights, checked against `tokenizer` if there is one."""
    spec = load_spec(section.path, head)
    if tokenizer is not None:
        check_vocabulary(name, spec, tokenizer)
    return ModelEngine(section, spec, run.groups(name, section), run.device, run.stops)
