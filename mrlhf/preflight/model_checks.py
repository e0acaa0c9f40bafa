"""Checks that each model can be built and that its layout fits it.

`mrlhf.models.families` and `mrlhf.models.weight_files` read a model's `config.json` and the headers
of its weight files; what they refuse is refused here too. This file computes with their numbers,
and builds no model.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mrlhf.checkpoint.frozen import check_base
from mrlhf.config.roots import (
    AnyConfig,
    PPOConfig,
    RewardModelConfig,
    is_reward_model,
    section_of,
)
from mrlhf.config.sections import ActorSection, RoleSection, RouterSection
from mrlhf.device import device_kind, dtype_on
from mrlhf.errors import ConfigError, WeightError
from mrlhf.inference.checks import missing_feature
from mrlhf.inference.sizes import (
    CacheShape,
    block_tokens,
    cache_dtype,
    engine_ep_problem,
    engine_tp_problem,
)
from mrlhf.models.adapter_choice import spec_of_role
from mrlhf.models.adapter_files import check_adapter
from mrlhf.models.families import family_of, load_spec, with_labels
from mrlhf.models.lora import without_adapters
from mrlhf.models.parallel_sizes import cp_problem, ep_problem, pp_problem, tp_problem
from mrlhf.models.published import published_model
from mrlhf.models.spec import ModelSpec
from mrlhf.models.weight_files import check_weight_files
from mrlhf.parallel.layout import AxisSizes
from mrlhf.printable import size_text
from mrlhf.weights.stored import holds_weights

logger = logging.getLogger(__name__)

MEBIBYTE = 2**20
_LENGTHS_OF_JUDGE = "judge_model.max_prompt_tokens or judge.max_tokens"


@dataclass(frozen=True)
class CacheNeeds:
    """The part of one rank's KV cache, of size `shape`, that a sequence of full length takes."""

    shape: CacheShape
    tokens: int  # length of the longest sequence, in whole blocks
    sequences: int  # that may run; each has its states from the beginning

    @property
    def bytes(self) -> int:
        """Bytes of the sequence's keys and values, and states, on the rank."""
        return self.shape.token_bytes * self.tokens + self.shape.state_bytes

    @property
    def least(self) -> int:
        """Bytes of the smallest cache, with the states of all sequences."""
        return self.bytes + (self.sequences - 1) * self.shape.state_bytes

    def __str__(self) -> str:
        shape = self.shape
        layers = " + ".join(
            f"{count} layers x {kv_heads} KV heads x {head_dim}"
            for (kv_heads, head_dim), count in Counter(shape.heads).items()
        )
        layers = f"({layers})" if " + " in layers else layers
        pairs = f"{shape.stores} x {layers} x {shape.itemsize} bytes"
        if shape.record_bytes:
            pairs = f"({pairs} + {shape.record_bytes} bytes for the numbers of its experts)"
        states = ""
        if shape.state_bytes:
            states = f" + {shape.state_bytes} bytes of states x {self.sequences} sequences"
        return f"{pairs} x {self.tokens} tokens{states} = {size_text(self.least)}"


def check_models(config: AnyConfig, need_weights: bool = False) -> dict[str, ModelSpec | None]:
    """Check each role's model, and the layout of each role and of the engine against it.

    With `need_weights` a directory that holds only a `config.json` is refused if the role loads
    weights; otherwise its weights are not checked.

    Returns:
        The spec of each role's model; None if its `config.json` is not on this machine, nor among
        those that are shipped, or if its adapter is not, so that not all was checked. The engine is
        named `rollout`.

    Raises:
        ConfigError: one line for each mistake.
    """
    problems: list[str] = []
    remarks: list[str] = []
    specs: dict[str, ModelSpec | None] = {}
    unchecked = [] if need_weights else without_weights(config)
    refused: set[str] = set()  # paths; roles often share one, and its mistake is reported once
    for name, role in config.roles().items():
        if role.path in refused:
            continue
        try:
            spec = _spec(config, name)
            if config.loads_weights and name not in unchecked:
                remarks += _check_weights(config, name, spec)
        except (ConfigError, WeightError) as error:
            refused.add(role.path)
            problems.append(f"{name}: {error}")
        else:
            specs[name] = spec
    if "actor" in specs:
        specs["rollout"] = specs["actor"]

    problems += _layout_problems(config, specs)
    problems += _position_problems(config, specs)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    for name, role in config.roles().items():
        if not _has_adapter(role):
            specs[name] = None
    for remark in dict.fromkeys(remarks):  # roles often share a model
        logger.warning("%s", remark)
    return specs


def _has_adapter(role: RoleSection) -> bool:
    """Whether the adapter that a role starts from is on this machine, if there is one."""
    adapter = role.directories().get("lora.path")
    return adapter is None or os.path.lexists(adapter)


def _spec(config: AnyConfig, name: str) -> ModelSpec | None:
    """A role's model, with its adapter if that is here; from the shipped sizes if it is not."""
    role = config.roles()[name]
    head = config.head_of(name)
    is_here = (Path(role.path) / "config.json").is_file()
    place = role.path if is_here else published_model(role.path)
    if place is None:
        return None
    if not _has_adapter(role):
        return load_spec(place, head)

    spec = spec_of_role(role.model_copy(update={"path": str(place)}), head)
    if head == "scalar":
        spec = _labelled(config, name, spec)
    adapter = role.directories().get("lora.path")
    if adapter is not None and is_here:
        check_adapter(adapter, spec)
    return spec


def _labelled(config: AnyConfig, name: str, spec: ModelSpec) -> ModelSpec:
    """A classifier with the labels that it trains; ConfigError if its role cannot use its own."""
    has = f"{config.roles()[name].path} has the labels {', '.join(spec.labels) or 'none'}"
    if isinstance(config, RewardModelConfig):
        columns = tuple(config.rm.target_column)
        if spec.labels not in ((), columns) and max(spec.outputs, len(columns)) > 1:
            raise ConfigError(
                f"{has}, and rm.target_column names {', '.join(columns) or 'none'}; name the same "
                "ones in this order, or begin with a language model"
            )
        return with_labels(spec, columns)

    heads = config.value_of("reward_model.heads") if is_reward_model(name) else ()
    unknown = [head for head in heads if head not in spec.labels]
    if unknown:
        raise ConfigError(f"reward_model.heads names {unknown[0]}, and {has}")
    if spec.outputs > 1 and not is_reward_model(name):
        raise ConfigError(f"{has}, and a critic gives one number; name a language model")
    if spec.outputs > 1 and not heads:
        raise ConfigError(
            f"{has}; give the weights of those that score in reward_model.heads, such as "
            f"{{{spec.labels[0]}: 1}}"
        )
    return spec


def _check_weights(config: AnyConfig, name: str, spec: ModelSpec | None) -> list[str]:
    """Check the weights from which a role starts, if they are here; returns remarks."""
    role = config.roles()[name]
    if spec is None or not (Path(role.path) / "config.json").is_file():
        return []
    base = without_adapters(spec)
    keeps_head = family_of(spec).scalar_head in spec.frozen  # a new one would give 0 for ever
    needs_head = is_reward_model(name) or keeps_head
    remarks = [*check_weight_files(role.path, base, needs_head)]
    adapter = role.directories().get("lora.path")
    if adapter is not None and _has_adapter(role):
        remarks += check_base(adapter, role.path)
    return remarks


def without_weights(config: AnyConfig) -> list[str]:
    """The roles that load weights, but whose directories hold only a `config.json`."""
    if not config.loads_weights:
        return []
    roles = []
    for name, role in config.roles().items():
        directory = Path(role.path)
        if (directory / "config.json").is_file() and not holds_weights(directory):
            roles.append(name)
    return roles


def of_shipped_sizes(config: AnyConfig) -> list[str]:
    """A line for each model that is not here, but whose sizes are shipped."""
    lines = []
    for path in dict.fromkeys(role.path for role in config.roles().values()):
        place = published_model(path)
        if place is not None and not (Path(path) / "config.json").is_file():
            name = f"{place.parent.name}/{place.name}"
            lines.append(f"{path} is not here: its sizes are those of {name} ({place}/config.json)")
    return lines


def cache_needs(config: PPOConfig, spec: ModelSpec) -> CacheNeeds:
    """The part of an engine rank's KV cache that `data.max_length` tokens take."""
    rollout = config.rollout
    device = torch.device(device_kind(config.distributed.device))
    dtype = cache_dtype(rollout.engine, dtype_on(config.actor.dtype, device.type), device)
    block = cache_block(config)
    blocks = -(-config.data.max_length // block)
    if rollout.engine == "vllm" and device.type == "cpu":
        blocks += 1  # vLLM leaves one unused

    experts = spec.experts if rollout.records else None
    shape = CacheShape.on_rank(spec, rollout.tp, dtype.itemsize, block, experts)
    # Captured steps are padded with one more.
    padding = int(rollout.engine == "native" and device.type == "cuda")
    return CacheNeeds(shape, blocks * block, rollout.max_num_seqs + padding)


def cache_block(config: PPOConfig) -> int:
    """Tokens in one block of the engine's KV cache on the device of the run."""
    rollout = config.rollout
    return block_tokens(rollout.engine, device_kind(config.distributed.device), rollout.block_size)


def _layout_problems(config: AnyConfig, specs: Mapping[str, ModelSpec | None]) -> Iterator[str]:
    """Layouts that do not fit their models, a line for each key, and a too small KV cache."""
    actor_fits = True
    for name, role in config.roles().items():
        spec = specs.get(name)
        if spec is None:
            continue
        if name == "reference" and _is_as_trained(role, config):
            continue  # its problems are those of the policy, whose keys it inherits
        if role.transformer_engine == "on":
            yield from _transformer_engine_problems(config, name, spec)
        key = section_of(name)
        problems = (
            tp_problem(f"{key}.tp", role.tp, spec),
            cp_problem(f"{key}.cp", AxisSizes.of(role), spec),
            pp_problem(key, AxisSizes.of(role).stages, spec),
            ep_problem(key, AxisSizes.of(role), spec),
        )
        if name == "actor":
            actor_fits = not any(problems)
        yield from filter(None, problems)
        yield from _router_problems(name, role, spec)

    spec = specs.get("rollout")
    if isinstance(config, PPOConfig) and spec is not None:
        yield from _engine_problems(config, spec, actor_fits)
    judge = specs.get("judge_model")
    if isinstance(config, PPOConfig) and judge is not None:
        for problem in _engine_problems(config.of_judge(), judge, actor_fits=False):
            own = problem.replace("rollout.tp", "judge_model.tp")
            yield own.replace("the data's maximum lengths", _LENGTHS_OF_JUDGE)


def _transformer_engine_problems(config: AnyConfig, name: str, spec: ModelSpec) -> Iterator[str]:
    """Why a role that asks for TransformerEngine's layers cannot have them."""
    # Imported here because megatron-core takes seconds to import.
    from mrlhf.models.transformer_engine import HAVE_TE

    role = config.roles()[name]
    reasons = {
        "torch sees no GPU": device_kind(config.distributed.device) != "cuda",
        "the package transformer_engine cannot be imported": not HAVE_TE,
        f"{name}.cp is {role.cp}, which its attention is not used for": role.cp > 1,
        f"{name}.share_prompts is true": role.share_prompts,
        "its layers lack what the model has": spec.needs_own_layers,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why is not None:
        yield f"{name}.transformer_engine is on, but {why}; change that, or set it to auto"


def _router_problems(name: str, role: RoleSection, spec: ModelSpec) -> Iterator[str]:
    """Router keys of a model that has no routers."""
    if spec.experts is not None or not isinstance(role, RouterSection):
        return
    if isinstance(role, ActorSection) and role.router_replay != "none":
        yield (
            f"{name}.router_replay {role.router_replay} does not fit a model without experts; set "
            "it to none"
        )
    for key in RouterSection.model_fields:
        if vars(role)[key]:
            yield f"{name}.{key} does not fit a model without experts; set it to 0"


def _is_as_trained(reference: RoleSection, config: AnyConfig) -> bool:
    """Whether the reference is the trained policy's model in the same layout."""
    policy = config.actor if isinstance(config, PPOConfig) else config.model
    return reference.path == policy.path and AxisSizes.of(reference) == AxisSizes.of(policy)


def _engine_problems(config: PPOConfig, spec: ModelSpec, actor_fits: bool) -> Iterator[str]:
    """An engine that does not fit the actor's model; if it fits, a KV cache that does not."""
    # The replicas lie on the actor's ranks; if their number must change, it excludes no size.
    sizes = AxisSizes.of(config.actor)
    excludes = actor_fits and not sizes.shares_experts_across
    rollout = config.rollout
    problem = engine_tp_problem(rollout.engine, rollout.tp, spec, sizes.ranks if excludes else None)
    if problem is None and rollout.ep is not None:
        problem = engine_ep_problem(rollout.engine, rollout.ep, rollout.tp, spec)

    device = device_kind(config.distributed.device)
    feature = missing_feature(rollout.engine, spec, device, rollout.tp)
    if feature is not None:
        yield (
            f"rollout.engine is {rollout.engine}, which is not supported for a model with "
            f"{feature}; set rollout.engine=native"
        )
        return
    if problem is not None:
        yield problem
        return

    megabytes = rollout.kv_cache_mb
    needs = cache_needs(config, spec)
    if megabytes is not None and megabytes * MEBIBYTE < needs.least:
        yield (
            f"rollout.kv_cache_mb {megabytes} = {size_text(megabytes * MEBIBYTE)} is less than one "
            f"sequence needs, {needs}; set rollout.kv_cache_mb to at least "
            f"{-(-needs.least // MEBIBYTE)} or lower the data's maximum lengths"
        )


def _position_problems(config: AnyConfig, specs: Mapping[str, ModelSpec | None]) -> Iterator[str]:
    """Data longer than a model's positions; a line for each model directory."""
    reported: set[str] = set()
    for name, role in config.roles().items():
        spec = specs.get(name)
        longest = config.longest_of(name)
        lengths = "the data's maximum lengths"
        if longest > config.data.max_length:
            lengths = f"{'teacher' if name == 'actor' else section_of(name)}.max_prompt_length"
        if isinstance(config, PPOConfig) and name == "judge_model":
            longest = config.of_judge().data.max_length
            lengths = _LENGTHS_OF_JUDGE
        if spec is None or spec.max_positions >= longest or role.path in reported:
            continue
        reported.add(role.path)
        yield (
            f"{name}: the longest sequence, {longest} tokens, is beyond the model's "
            f"max_position_embeddings {spec.max_positions} ({Path(role.path) / 'config.json'}); "
            f"lower {lengths}"
        )
