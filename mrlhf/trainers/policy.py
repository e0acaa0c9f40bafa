"""A policy that is asked and not trained: its files, and the engine that answers for it.

It knows which files a model, a run or an adapter has. It does not know what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrlhf.checkpoint.conversion.model_files import stated_head
from mrlhf.checkpoint.conversion.run_output import choose
from mrlhf.checkpoint.frozen import check_frozen, fingerprint
from mrlhf.checkpoint.manifest import MANIFEST, read_manifest
from mrlhf.checkpoint.model_slices import load_policy, policy_in
from mrlhf.config.load import read_config
from mrlhf.config.roots import GenerationConfig, PPOConfig
from mrlhf.config.sections import LoraSection
from mrlhf.data.hub import base_of_adapter, local_directory
from mrlhf.data.hub_files import read_object
from mrlhf.data.tokenizer import holds_tokenizer
from mrlhf.errors import ConfigError
from mrlhf.inference.base import SamplingParams
from mrlhf.inputs import EngineInputs
from mrlhf.models.families import load_spec
from mrlhf.rollout.generator import Generator
from mrlhf.run.startup import Run
from mrlhf.trainers.ppo.generator_setup import build_generator, check_engine
from mrlhf.trainers.ppo.setup import role_engine, training_sampling
from mrlhf.training.engine import ModelEngine
from mrlhf.weights.stored import ADAPTER_CONFIG


@dataclass(frozen=True)
class OpenPolicy:
    """A policy on this rank, whose weights `generator.take_weights` brings into its engine."""

    actor: ModelEngine
    generator: Generator
    sampling: SamplingParams  # as the configuration says


@dataclass(frozen=True)
class _Files:
    """The files of a policy."""

    model: str  # the directory with its config.json, and its weights unless there is a checkpoint
    tokenizer: str
    lora: Mapping[str, Any] = field(default_factory=lambda: {"rank": 0})
    freeze: Sequence[str] = ()
    chat_template: str | None = None
    checkpoint: str = "never"  # the training checkpoint that holds its weights


def policy_config(
    model: str, files: Sequence[str] | None, overrides: Sequence[str] = ()
) -> GenerationConfig:
    """Read a configuration whose policy is `model`: a model, an adapter, a run or a checkpoint.

    Of a run that has not ended it is the newest whole checkpoint, which `trainer.resume` names
    then. The tokenizer is that of the configuration, or else the one of the policy.

    Raises:
        CheckpointError: the run has no whole checkpoint, or now another base for its adapters.
        ConfigError: a bad configuration, or no such policy; one line for each mistake.
    """
    found = _files_of(model)
    of_actor = {"path": found.model, "lora": found.lora, "freeze": list(found.freeze)}
    keys = [f"actor.{key}={json.dumps(value)}" for key, value in of_actor.items()]
    keys += ["trainer.output_dir=.", f"trainer.resume={json.dumps(found.checkpoint)}"]
    keys += ["data.train_files=[]", "data.test_files=[]"]
    config, _ = read_config(GenerationConfig, files, [*overrides, *keys])
    data = config.data
    if data.tokenizer == found.model:
        template = data.chat_template or found.chat_template
        changes = {"tokenizer": found.tokenizer, "chat_template": template}
        data = data.model_copy(update=changes)
    return config.model_copy(update={"data": data})


def name_of_policy(config: PPOConfig) -> str:
    """The directory with the policy's weights."""
    resume = config.trainer.resume
    return config.actor.path if resume == "never" else resume


def _files_of(model: str) -> _Files:
    directory = Path(local_directory(model))
    if (directory / MANIFEST).is_file():
        return _of_checkpoint(directory)
    choice = choose(directory, None, None) if directory.is_dir() else None
    if choice is not None and choice.step is None:
        return _of_checkpoint(choice.path)

    place = directory if choice is None else choice.path
    if (place / ADAPTER_CONFIG).is_file():
        stated = read_object(place / ADAPTER_CONFIG, ConfigError)
        base = base_of_adapter(stated)
        if stated.get("task_type") == "SEQ_CLS":
            raise ConfigError(f"{place} is the adapter of a reward model, which gives no answers")
        if not Path(base).is_dir():
            raise ConfigError(
                f"{place}: the base of the adapter, {base}, is no directory here; name it as "
                f"base_model_name_or_path in {place / ADAPTER_CONFIG}"
            )
        tokenizer = str(place) if holds_tokenizer(place) else base
        return _Files(base, tokenizer, {"path": str(place)})

    if stated_head(place) == "scalar":
        raise ConfigError(f"{place} is a reward model, which gives no answers; give a policy")
    return _Files(str(place), str(place))


def _of_checkpoint(place: Path) -> _Files:
    """The policy of a training checkpoint, with what its run says of it."""
    manifest = read_manifest(place)
    role = policy_in(manifest)
    if role is None:
        raise ConfigError(f"{place} is of a reward model, which gives no answers; give a policy")
    section = manifest.config[role]
    data = manifest.config["data"]
    if not Path(section["path"]).is_dir():
        raise ConfigError(
            f"{place}: the model from which its run began, {section['path']}, is no directory "
            f"here; mrlhf convert {place} --to huggingface --out DIR writes the policy: give DIR"
        )
    lora = section["lora"]
    freeze = section.get("freeze", ())  # before version 0.13 there was no such key
    if freeze or LoraSection(**lora).is_on:
        check_frozen(manifest.frozen, {role: fingerprint(section["path"])})
    template = data["chat_template"]
    return _Files(section["path"], data["tokenizer"], lora, freeze, template, str(place))


def build_policy(config: PPOConfig, run: Run) -> ModelEngine:
    """The policy's model, with weights from its files or its checkpoint; every rank calls it."""
    checkpoint = config.trainer.resume
    actor = role_engine(config, run, "actor", "lm", loads=checkpoint == "never")
    if checkpoint != "never":
        load_policy(actor, Path(checkpoint))
    return actor


def open_policy(config: PPOConfig, run: Run, inputs: EngineInputs) -> OpenPolicy:
    """Build the policy and its engine; every rank calls it."""
    check_engine(config, load_spec(config.actor.path, "lm"), run.device.torch_device)
    actor = build_policy(config, run)
    generator = build_generator(config, run, actor, inputs)
    return OpenPolicy(actor, generator, training_sampling(config, inputs.endings, actor))
