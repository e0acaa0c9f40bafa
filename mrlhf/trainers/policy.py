"""A policy that is asked and not trained: its files, and the engine that answers for it.

It knows which files a model, a run or an adapter has. It does not know what is asked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrlhf.checkpoint.conversion.model_files import stated_head
from mrlhf.checkpoint.conversion.run_output import choose
from mrlhf.config.load import read_config
from mrlhf.config.roots import GenerationConfig, PPOConfig
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


def policy_config(
    model: str, files: Sequence[str] | None, overrides: Sequence[str] = ()
) -> GenerationConfig:
    """Read a configuration whose policy is `model`: a model, an adapter, or a run that has ended.

    The tokenizer is that of the configuration, or else the one beside the policy. ConfigError has
    one line for each mistake.
    """
    place, adapter = _files_of(model)
    lora = {"rank": 0} if adapter is None else {"path": adapter}
    keys = [f"actor.path={json.dumps(place)}", f"actor.lora={json.dumps(lora)}"]
    keys += ["trainer.output_dir=.", "trainer.resume=never"]  # there is no run
    keys += ["data.train_files=[]", "data.test_files=[]"]
    config, _ = read_config(GenerationConfig, files, [*overrides, *keys])
    data = config.data
    if adapter is not None and data.tokenizer == place and holds_tokenizer(Path(adapter)):
        data = data.model_copy(update={"tokenizer": adapter})
    return config.model_copy(update={"data": data})


def _files_of(model: str) -> tuple[str, str | None]:
    """The directory of a policy's model, and that of its adapter if it has one."""
    directory = Path(local_directory(model))
    choice = choose(directory, None, None) if directory.is_dir() else None
    if choice is not None and choice.step is None:
        raise ConfigError(
            f"{model} is a run that has not ended, or has gone on since; mrlhf convert {model} "
            "--to huggingface --out DIR writes its newest policy: give that DIR"
        )
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
        return base, str(place)

    if stated_head(place) == "scalar":
        raise ConfigError(f"{place} is a reward model, which gives no answers; give a policy")
    return str(place), None


def open_policy(config: PPOConfig, run: Run, inputs: EngineInputs) -> OpenPolicy:
    """Build the policy and its engine; every rank calls it."""
    check_engine(config, load_spec(config.actor.path, "lm"), run.device.torch_device)
    actor = role_engine(config, run, "actor", "lm")
    generator = build_generator(config, run, actor, inputs)
    return OpenPolicy(actor, generator, training_sampling(config, inputs.endings, actor))
