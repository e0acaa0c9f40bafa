"""The file of a kind of GPU that `mrlhf plan` does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError
from mrlhf.planning.gpus import GPUS, Gpu


def gpu_of(name: str) -> Gpu:
    """The GPU of a name in `GPUS` or of a YAML file of its fields; ConfigError if there is none."""
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--gpu {name} is neither a file nor one of {', '.join(GPUS)}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"--gpu {name} is not UTF-8 text; save it as such") from None

    own = {field.name: field for field in fields(Gpu) if field.name != "name"}
    needed = [name for name, field in own.items() if field.default is MISSING]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: give {', '.join(needed)}, each with a value")
    missing = [field for field in needed if field not in values]
    if missing:
        raise ConfigError(f"{name}: {', '.join(missing)} missing; give {', '.join(needed)}")
    unknown = sorted(map(str, values.keys() - own))
    if unknown:
        raise ConfigError(f"{name}: no field is called {unknown[0]}; there are {', '.join(own)}")
    hints = get_type_hints(Gpu)
    return Gpu(
        path.stem,
        **{key: _value(hints[key], value, f"{name}: {key}") for key, value in values.items()},
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    if kind not in (int, float):
        choices = get_args(kind)
        if value not in choices:
            raise ConfigError(f"{where} must be {' or '.join(choices)}, and is {value!r}")
        return value
    # Beyond these, what is computed of a rate overflows.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 1e-30 < value < 1e30) or (kind is int and value % 1):
        whole = "whole " * (kind is int)
        raise ConfigError(f"{where} must be a {whole}number above 0, and is {value!r}")
    return value
