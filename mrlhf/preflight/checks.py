"""Conditions between keys and the number of ranks, checked before anything is built.

Each complaint is one line with both numbers and the remedy. This file checks layouts and batches by
arithmetic, and the names of metrics. Conditions between keys alone stand beside the keys, in
`mrlhf/config/`; `model_checks` has those between keys and models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mrlhf.config.data import PromptDataSection
from mrlhf.config.reads import listed
from mrlhf.config.roots import AnyConfig, PPOConfig, SupervisedConfig, section_of
from mrlhf.config.sections import RoleSection
from mrlhf.config.unread import contradictions, unread_keys
from mrlhf.errors import ConfigError
from mrlhf.metrics.table import KINDS
from mrlhf.parallel.layout import AxisSizes
from mrlhf.parallel.stages import Stages
from mrlhf.preflight.batches import longest_unit, role_work
from mrlhf.rewards.term_names import term_names

# The keys of a role that place its ranks.
_AXES_OF_RANKS = ("tp", "cp", "pp", "ep", "etp")
# The prefixes of the metrics by which a step may be chosen.
_TEST = ("test", "test_sampled")
_PPO = tuple(kind for kind in KINDS if kind not in (*_TEST, "sft", "rm", "values", "dpo", "se"))
_SUPERVISED = ("perf", "timing_s", "val")
_OF = {"SFTConfig": "sft", "RewardModelConfig": "rm", "CriticConfig": "values", "DPOConfig": "dpo"}


def check(config: AnyConfig, world_size: int) -> None:
    """Refuse a configuration that cannot run on `world_size` ranks.

    Raises:
        ConfigError: one line for each mistake.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size} is below 1; start at least one process")

    problems = list(_layout_problems(config, world_size))
    fits = not problems
    problems += _role_problems(config)
    if isinstance(config, PPOConfig):
        problems += _batch_problems(config)
        if fits:
            problems += _share_problems(config, world_size)
        problems += _rollout_problems(config, world_size)
        problems += _full_kl_problems(config)
        problems += _term_problems(config)
    elif fits:
        problems += _supervised_problems(config, world_size)
    problems += contradictions(config)
    problems += _profile_problems(config, world_size)
    problems += _metric_problems(config)
    problems += [str(unread) for unread in unread_keys(config)]

    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def check_generation(config: PPOConfig, world_size: int) -> None:
    """Refuse a configuration whose policy cannot be asked on `world_size` ranks; ConfigError."""
    problems = [*_layout_problems(config, world_size), *_role_problems(config)]
    problems += [*_rollout_problems(config, world_size), *_term_problems(config)]
    problems += contradictions(config, only=("reward", "judge", "judge_model", "rollout"))
    if problems:
        raise ConfigError("\n".join(problems))


def _layout_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    """Layouts that do not fit the ranks."""
    for name, role in _sections(config).items():
        problem = AxisSizes.of(role).problem(name, world_size)
        if problem is not None and not _is_inherited(config, name, _AXES_OF_RANKS):
            yield problem


def _sections(config: AnyConfig) -> dict[str, RoleSection]:
    """The sections of the models, each once, by their names."""
    return {section_of(name): role for name, role in config.roles().items()}


def _is_inherited(config: AnyConfig, name: str, keys: Sequence[str]) -> bool:
    """Whether role `name` has taken all of `keys` from another role, which is complained about."""
    for key in (f"{name}.{key}" for key in keys):
        source = config.inherited.get(key)
        if source is None or config.value_of(key) != config.value_of(source):
            return False
    return True


def _role_problems(config: AnyConfig) -> Iterator[str]:
    """Layouts and micro-batches that contradict each other, whatever the ranks."""
    too_small = []
    needed = longest_unit(config)
    padded_for = ""
    for name, role in _sections(config).items():
        is_inherited = _is_inherited(config, name, ("sequence_parallel", "tp"))
        if role.sequence_parallel and role.tp == 1 and not is_inherited:
            yield f"{name}.sequence_parallel is on with {name}.tp 1; raise {name}.tp or turn it off"
        if not _is_inherited(config, name, ("pp", "vpp", "pp_layers")):
            yield from _stage_problems(name, AxisSizes.of(role).stages)
        with_padding = longest_unit(config, role.cp)
        own = longest_unit(config, role.cp, name)
        if own > max(with_padding, role.micro_batch_tokens):
            reader = "teacher" if name == "actor" else name
            yield (
                f"{name}.micro_batch_tokens {role.micro_batch_tokens} is less than the longest "
                f"sequence of {reader}.max_prompt_length and data.max_response_length, {own} "
                f"tokens; raise it to at least {own}, or lower a length"
            )
        is_inherited = _is_inherited(config, name, ("micro_batch_tokens", "cp"))
        has_passes = name != "judge_model"
        if role.micro_batch_tokens < with_padding and has_passes and not is_inherited:
            too_small.append(f"{name}.micro_batch_tokens {role.micro_batch_tokens}")
            if with_padding > needed:
                needed = with_padding
                padded_for = f", padded to {needed} for {name}.cp {role.cp}"

    if too_small:
        unit = "pair of sequences" if needed > config.data.max_length else "sequence"
        verb = "is" if len(too_small) == 1 else "are"
        yield (
            f"{listed(too_small)} {verb} less than the longest {unit}, {_length_in_words(config)} "
            f"tokens{padded_for}; raise micro_batch_tokens to at least {needed} or lower the length"
        )


def _stage_problems(name: str, stages: Stages) -> Iterator[str]:
    """Stages of a pipeline that contradict each other, whatever the model."""
    if stages.vpp > 1 and stages.pp == 1:
        yield (
            f"{name}.vpp {stages.vpp} takes turns between ranks of a pipeline, but {name}.pp is 1; "
            f"raise {name}.pp or leave {name}.vpp at 1"
        )
        return

    layers = stages.pp_layers
    if layers is None:
        return
    if len(layers) != stages.count:
        yield (
            f"{name}.pp_layers {list(layers)} has {len(layers)} numbers, but {name}.pp {stages.pp} "
            f"x {name}.vpp {stages.vpp} = {stages.count}; give one for each virtual stage"
        )
    elif 0 in layers[1:-1]:
        yield (
            f"{name}.pp_layers {list(layers)} leaves virtual stage {layers.index(0, 1)} nothing to "
            "do; only the first and the last, which have the embedding and the output layer, may "
            "have 0 layers"
        )


def _length_in_words(config: AnyConfig) -> str:
    """The length of the longest unit in words, with the keys that determine it."""
    data = config.data
    if isinstance(data, PromptDataSection):
        return (
            f"data.max_prompt_length {data.max_prompt_length} + data.max_response_length "
            f"{data.max_response_length} = {data.max_length}"
        )
    if longest_unit(config) > data.max_length:
        return f"2 x data.max_length {data.max_length} = {longest_unit(config)}"
    return f"data.max_length {data.max_length}"


def _batch_problems(config: PPOConfig) -> Iterator[str]:
    """Mini-batches that do not divide the batch."""
    prompts = config.data.train_batch_size
    for name, role in config.trained().items():
        size = role.ppo_mini_batch_size
        if prompts % size and not _is_inherited(config, name, ("ppo_mini_batch_size",)):
            divisor = max(_divisors(prompts, most=size))
            yield (
                f"data.train_batch_size {prompts} is not divisible by {name}.ppo_mini_batch_size "
                f"{size}; set {name}.ppo_mini_batch_size to {divisor}, or the train batch to a "
                f"multiple of {size}"
            )


def _share_problems(config: PPOConfig, world_size: int) -> Iterator[str]:
    """Batches that leave ranks without samples."""
    n = config.rollout.n
    widest = 0  # the largest data-parallel size that was complained about
    for work in role_work(config, world_size):
        name = section_of(work.name)
        is_inherited = _is_inherited(config, name, ("ppo_mini_batch_size",))
        is_told = work.is_trained and is_inherited and work.dp <= widest
        if work.units < work.dp and not is_told:
            widest = max(widest, work.dp)
            yield (
                f"{work.key} {work.rows} x rollout.n {n} = {work.units} samples are fewer than the "
                f"data-parallel size {work.dp} of {name}; set {work.key} to at least "
                f"{-(-work.dp // n)} or raise {name}.tp"
            )


def _rollout_problems(config: PPOConfig, world_size: int) -> Iterator[str]:
    rollout = config.rollout
    sizes = AxisSizes.of(config.actor)
    ranks = sizes.ranks
    divided = sizes.product("actor")
    if sizes.shares_experts_across:  # a replica may then span model-parallel groups
        ranks = world_size
        divided = f"the world size {world_size}"
    if ranks % rollout.tp:
        divisors = ", ".join(str(divisor) for divisor in _divisors(ranks, most=ranks))
        yield f"rollout.tp {rollout.tp} does not divide {divided}; use one of {divisors}"


def _divisors(number: int, most: int) -> list[int]:
    """The divisors of `number` that are at most `most`, in order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    both = {*small, *(number // divisor for divisor in small)}
    return sorted(divisor for divisor in both if divisor <= most)


def _full_kl_problems(config: PPOConfig) -> Iterator[str]:
    actor = config.actor
    reference = config.reference
    if not config.needs_full_kl:
        return

    sizes = {"reference": AxisSizes.of(reference), "actor": AxisSizes.of(actor)}
    keys = [f"reference.{axis}" for axis in _AXES_OF_RANKS]
    if not sizes["reference"].has_ranks_of(sizes["actor"]):
        yield (
            "KL 'full' compares whole distributions rank by rank, but reference is "
            f"{sizes['reference']} and actor {sizes['actor']}; leave {listed(keys)} out"
        )
    if reference.sequence_parallel and not actor.sequence_parallel:
        yield (
            "KL 'full' runs reference on the packs of actor, and without actor.sequence_parallel "
            "these are not padded for reference.sequence_parallel; turn both on or both off"
        )


def _term_problems(config: PPOConfig) -> Iterator[str]:
    """Terms of the reward whose numbers could not be told apart."""
    try:
        term_names([term.name for term in config.reward.terms])
    except ConfigError as error:
        yield str(error)


def _supervised_problems(config: SupervisedConfig, world_size: int) -> Iterator[str]:
    dp = AxisSizes.of(config.model).dp(world_size)
    if config.data.batch_size < dp:
        yield (
            f"data.batch_size {config.data.batch_size} is less than the data-parallel size {dp} of "
            f"model; set data.batch_size to at least {dp} or raise model.tp"
        )


def _profile_problems(config: AnyConfig, world_size: int) -> Iterator[str]:
    """Traces of ranks that there are not."""
    profile = config.trainer.profile
    if profile.steps and max(profile.ranks, default=0) >= world_size:
        yield (
            f"trainer.profile.ranks names rank {max(profile.ranks)}, but the last of {world_size} "
            f"ranks is {world_size - 1}"
        )


def _metric_problems(config: AnyConfig) -> Iterator[str]:
    """Names that no metric of such a run can have, one line each."""
    if isinstance(config, PPOConfig):
        kinds: tuple[str, ...] = _PPO
    else:
        kinds = (_OF[type(config).__name__], *_SUPERVISED)

    trainer = config.trainer
    for key, name in (("keep_best", trainer.keep_best), ("export_best", trainer.export_best)):
        if name is None:
            continue
        kind, slash, rest = name.partition("/")
        if kind in _TEST and isinstance(config, PPOConfig):
            yield (
                f"trainer.{key} is {name}, but no step is chosen by data.test_files, whose figures "
                f"would then be too good; use {kind.replace('test', 'val')}/{rest}"
            )
        elif kind not in kinds or not slash or not rest:
            yield (
                f"trainer.{key} is {name}, which is no metric of this run; their names begin with "
                f"{', '.join(f'{known}/' for known in kinds)}"
            )
        elif kind in ("val", "val_sampled") and not config.data.validates:
            yield (
                f"trainer.{key} {name} needs data to validate on, but data.val_files is empty; "
                "give files, or leave it out"
            )
        elif kind == "val_sampled" and not config.value_of("trainer.val_sampled"):
            yield f"trainer.{key} is {name}, but trainer.val_sampled is false; turn that on"
