"""Puts together the parts of a PPO run from its inputs: first the models, then the engine.

It knows which configuration key goes to which part. It runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from mrlhf.batch import Prompts
from mrlhf.config.roots import PPOConfig, is_reward_model
from mrlhf.data.sampler import StatefulSampler
from mrlhf.data.tokenizer import Tokenizer
from mrlhf.inference.base import SamplingParams
from mrlhf.inputs import EngineInputs, PPOInputs
from mrlhf.inputs.vocabulary import Endings
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.families import load_spec
from mrlhf.models.spec import Head
from mrlhf.models.weight_files import head_bias
from mrlhf.rewards.interface import RewardInput, Scored
from mrlhf.rewards.judge import Judge
from mrlhf.rl.kl import KlController
from mrlhf.rl.names import estimator_traits
from mrlhf.roles.actor import Actor
from mrlhf.roles.critic import Critic
from mrlhf.roles.policy_loss import PolicyLossSettings
from mrlhf.roles.reference import Reference, Teacher, Teachers
from mrlhf.roles.reward_model import RewardModel
from mrlhf.rollout.collector import Collector, GroupSampler
from mrlhf.rollout.dynamic_sampling import DynamicSampler
from mrlhf.rollout.early_scores import EarlyScores
from mrlhf.rollout.generator import Generator
from mrlhf.rollout.given import GivenResponses
from mrlhf.rollout.judging import RankJudge
from mrlhf.rollout.partial import PartialSampler
from mrlhf.rollout.reward_shaping import RewardShaper
from mrlhf.rollout.scoring import Scorer
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.generator_setup import build_generator, check_engine
from mrlhf.training.earlier_policy import EarlierPolicy
from mrlhf.training.engine import ModelEngine


@dataclass(frozen=True)
class PPOParts:
    """The parts of a PPO run on this rank."""

    inputs: PPOInputs
    sampling: SamplingParams  # how the responses of training are sampled
    sampler: StatefulSampler  # the order of the training prompts
    actor: Actor
    critic: Critic | None  # None if the advantage estimator needs no values
    reference: Reference | None  # None if no KL is asked for
    teachers: Teachers | None  # None without one
    earlier: EarlierPolicy | None  # the teacher's, if it is the actor of an earlier step
    generator: Generator
    scorer: Scorer
    shaper: RewardShaper  # makes the scores that train from the scores of a batch
    collector: Collector
    partial: PartialSampler | None  # the collector's, if samples may be drawn in several steps
    kl_controller: KlController  # moves the coefficient of the KL in the reward
    samples_per_mini_batch: dict[str, int]  # samples (prompts x n) of one optimizer step, by role

    def trained(self) -> dict[str, ModelEngine]:
        """The models that are trained, by role."""
        trained = {"actor": self.actor.engine}
        if self.critic is not None:
            trained["critic"] = self.critic.engine
        return trained


def assemble(config: PPOConfig, inputs: PPOInputs, run: Run, initial: bool = True) -> PPOParts:
    """Build every part; every rank calls it.

    The scorer of the result closes the reward functions of `inputs`. With `initial` the trained
    models get their initial weights; otherwise a checkpoint fills them afterwards.
    """
    check_engine(config, load_spec(config.actor.path, "lm"), run.device.torch_device)
    tokenizer = inputs.tokenizer
    prompts = inputs.prompts
    sampler = StatefulSampler(
        len(prompts), config.data.gen_batch_size, seed=config.seed, shuffle=config.data.shuffle
    )

    reward_model = build_reward_model(config, run, tokenizer, inputs.answered)
    actor = _actor(config, run, initial)
    critic = _critic(config, run, initial)
    reference = _reference(config, run, actor.engine)
    earlier = _earlier(config, run, actor.engine)
    teachers = _teachers(config, run, actor.engine, earlier)
    early = EarlyScores(inputs.reward.evaluate) if config.rollout.overlap else None
    judge = build_judge(config, run, inputs.judge)
    groups = actor.engine.groups
    scorer = Scorer(inputs.reward, tokenizer, reward_model, groups, run.phases, judge, early)

    # An optimizer moves the parameters, so the inference engine is connected after it.
    actor_updates = max(1, inputs.steps - max(0, config.trainer.critic_warmup - 1))
    actor.engine.attach_optimizer(config.actor.optim, actor_updates)
    if critic is not None:
        critic.engine.attach_optimizer(config.critic.optim, inputs.steps)
    generator = build_generator(config, run, actor.engine, inputs)
    if early is not None:
        generator.ended = scorer.begin
    if inputs.given:
        share = config.algorithm.distillation.given_share
        generator.given = GivenResponses(inputs.given, share)

    shaper = RewardShaper(config.algorithm, config.data.max_response_length)
    control = config.algorithm.kl_ctrl
    supply = map(prompts.batch, sampler)
    partial_sampler = None
    if config.rollout.partial.is_on:
        partial_sampler = PartialSampler(
            generator,
            supply,
            config.data.train_batch_size,
            config.rollout.partial,
            config.rollout.max_turns if config.rollout.has_turns else 1,
        )
    collector = _collector(config, generator, scorer, shaper, supply, partial_sampler)
    return PPOParts(
        inputs=inputs,
        sampling=training_sampling(config, inputs.endings, actor.engine),
        sampler=sampler,
        actor=actor,
        critic=critic,
        reference=reference,
        teachers=teachers,
        earlier=earlier,
        generator=generator,
        scorer=scorer,
        shaper=shaper,
        collector=collector,
        partial=partial_sampler,
        kl_controller=KlController(
            control.type, control.kl_coef, control.target_kl, control.horizon
        ),
        samples_per_mini_batch={
            "actor": config.actor.ppo_mini_batch_size * config.rollout.n,
            "critic": config.critic.ppo_mini_batch_size * config.rollout.n,
        },
    )


def training_sampling(config: PPOConfig, endings: Endings, actor: ModelEngine) -> SamplingParams:
    """How the responses of training are drawn."""
    rollout = config.rollout
    centres = config.algorithm.rollout_correction.score_centering
    return SamplingParams(
        n=rollout.n,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=config.data.max_response_length,
        stop_token_ids=endings.token_ids,
        stop=endings.strings,
        seed=config.seed,
        record_experts=rollout.records and actor.spec.experts is not None,
        record_masks=rollout.truncates,
        record_head=min(rollout.topk_log_probs, actor.spec.vocab_size) if centres else 0,
    )


def _collector(
    config: PPOConfig,
    generator: Generator,
    scorer: Scorer,
    shaper: RewardShaper,
    prompts: Iterator[Prompts],
    sampler: GroupSampler | None,
) -> Collector:
    """The collector, with dynamic sampling if that is on."""
    algorithm = config.algorithm
    if algorithm.filter_groups.enable:
        sampler = DynamicSampler(
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
        sampler=sampler,
        greedy_baseline=estimator_traits(algorithm.adv_estimator).needs_greedy_answer,
    )


def _actor(config: PPOConfig, run: Run, initial: bool) -> Actor:
    engine = role_engine(config, run, "actor", "lm", initial)
    algorithm = config.algorithm
    temperature = config.rollout.temperature
    settings = PolicyLossSettings.of(config.actor, algorithm.rollout_correction)
    if config.teacher is not None and config.distils_in == "loss":
        settings = settings.distilling(algorithm.distillation, temperature)
        settings = replace(settings, teacher_of=config.teacher.by_source)
    return Actor(engine, settings, temperature)


def _critic(config: PPOConfig, run: Run, initial: bool) -> Critic | None:
    if not config.needs_critic:
        return None
    return Critic(role_engine(config, run, "critic", "scalar", initial), config.critic)


def _reference(config: PPOConfig, run: Run, policy: ModelEngine) -> Reference | None:
    """The reference; it may be the policy itself, whose adapters are as they begin now."""
    temperature = config.rollout.temperature
    if not config.needs_reference:
        return None
    if not config.reference_is_policy:
        return Reference(role_engine(config, run, "reference", "lm"), temperature)
    if config.reference.adapter == "base":
        return Reference(policy, temperature, policy.adapters.off)
    as_it_began = partial(policy.adapters.exchanged, policy.adapters.copy())
    return Reference(policy, temperature, as_it_began)


def _earlier(config: PPOConfig, run: Run, policy: ModelEngine) -> EarlierPolicy | None:
    """The actor of an earlier step, if that is the teacher; with adapters it is no second model."""
    section = config.teacher
    if section is None or section.weights != "earlier":
        return None
    model = None
    if config.earlier_actor is not None:
        own = (config.earlier_actor, policy.spec, policy.groups)
        model = ModelEngine(*own, run.device, run.phases, "teacher")
    return EarlierPolicy(policy, section.every, section.decay, model)


def _teachers(
    config: PPOConfig, run: Run, policy: ModelEngine, earlier: EarlierPolicy | None
) -> Teachers | None:
    """The teachers; one may be the policy without its adapters, or as it was `earlier`."""
    section = config.teacher
    if section is None:
        return None
    temperature = config.rollout.temperature
    as_teacher: Callable[[], AbstractContextManager[None]] = nullcontext
    engines = {role: role_engine(config, run, role, "lm") for role in section.models}
    if not engines:
        engines = {"teacher": policy if earlier is None else earlier.engine}
        as_teacher = policy.adapters.off if earlier is None else earlier.within

    # In the actor's layout each rank has the columns of the output layer that it needs.
    is_elsewhere = config.distils_in == "loss" and not config.teaches_itself
    student = policy if is_elsewhere else None
    members = {
        role.removeprefix("teacher."): Teacher(engine, temperature, student, as_teacher)
        for role, engine in engines.items()
    }
    return Teachers(members, section.by_source)


def build_reward_model(
    config: PPOConfig,
    run: Run,
    tokenizer: Tokenizer,
    answered: Sequence[tuple[list[int], list[int]]] = (),
) -> RewardModel | None:
    """The reward model, with all members of its ensemble, if there is one.

    Without prompts that are `answered` its scores are not shifted.
    """
    section = config.reward_model
    if section is None:
        return None
    members = [
        (role_engine(config, run, name, "scalar"), head_bias(role.path))
        for name, role in config.roles().items()
        if is_reward_model(name)
    ]
    ends = [] if section.at is None else tokenizer.holding(section.at)
    return RewardModel(
        members, section.combine, section.combine_coef, ends, answered, section.heads
    )


def build_judge(
    config: PPOConfig, run: Run, inputs: EngineInputs | None
) -> Callable[[Sequence[RewardInput], Sequence[int]], list[Scored]] | None:
    """The judge on the ranks, if there is one."""
    if inputs is None:
        return None
    own = config.of_judge()
    engine = role_engine(config, run, "judge_model", "lm")
    generator = replace(build_generator(own, run, engine, inputs), name="judge engine")
    sampling = training_sampling(own, inputs.endings, engine).without_records()
    longest = own.data.max_prompt_length
    return RankJudge(Judge(config.judge), generator, sampling, inputs.tokenizer, longest).score


def role_engine(
    config: PPOConfig, run: Run, name: str, head: Head, loads: bool = True
) -> ModelEngine:
    """The model of role `name`; without weights unless it `loads` them."""
    section = config.roles()[name]
    spec = spec_of_role(section, head)
    engine = ModelEngine(section, spec, run.groups(name, section), run.device, run.phases, name)
    if loads or spec.keeps_weights:  # which no checkpoint holds
        engine.load(section.path, config.seed, needs_head=is_reward_model(name))
    return engine
