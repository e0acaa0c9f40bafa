"""The file of a machine that `mrlhf plan` reads: a user's own rates, or measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mrlhf.config.yaml_text import parse_yaml
from mrlhf.errors import ConfigError
from mrlhf.planning.gpus import GPUS, Gpu
from mrlhf.planning.kernels import Kernels, Product, ProductTable


def gpu_of(name: str) -> Gpu:
    """The GPU of a name in `GPUS`, or that of a YAML file with the fields of `Gpu`.

    Raises:
        ConfigError: there is no such name or file, or a field is missing, unknown or wrong.
    """
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--gpu {name} is neither a file nor one of {', '.join(GPUS)}")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"), name)
    except UnicodeDecodeError:
        raise ConfigError(f"--gpu {name} is not UTF-8 text; save it as such") from None
    read = _fields(Gpu, values, name)
    if "measured" in read:
        read["measured"] = Kernels(**_fields(Kernels, read["measured"], f"{name}: measured"))
    return Gpu(path.stem, **read)


def _fields(record: type, values: Any, where: str) -> dict[str, Any]:
    """The checked values of a record's fields, of which the file's name gives `name`."""
    own = {field.name: field for field in fields(record) if field.name != "name"}
    needed = [name for name, field in own.items() if field.default is MISSING]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: give {', '.join(needed)}, each with a value")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} missing; give {', '.join(needed)}")
    unknown = values.keys() - own
    if unknown:
        raise ConfigError(f"{where}: no field is called {min(unknown)}; there are {', '.join(own)}")

    hints = get_type_hints(record)
    return {name: _value(hints[name], value, f"{where}: {name}") for name, value in values.items()}


def _value(kind: Any, value: Any, where: str) -> Any:
    if kind is ProductTable:
        return _products(value, where)
    if kind in (int, float):
        if not _is_positive(value) or (kind is int and value % 1):
            whole = "whole " * (kind is int)
            raise ConfigError(f"{where} must be a {whole}number above 0, and is {value!r}")
        return value
    choices = get_args(kind)
    if isinstance(choices[0], str) and value not in choices:
        raise ConfigError(f"{where} must be {' or '.join(choices)}, and is {value!r}")
    return value


def _products(value: Any, where: str) -> ProductTable:
    """A table of lists of three sizes and a speed."""
    rows = value if isinstance(value, list) else []
    good = all(
        isinstance(row, list) and len(row) == 4 and all(map(_is_positive, row)) for row in rows
    )
    table = ProductTable(tuple(Product(*row) for row in rows) if good else ())
    if not table.is_grid:
        raise ConfigError(
            f"{where} must be a list of [rows, inner, columns, tflops], numbers above 0, with one "
            "entry for each combination of the sizes"
        )
    return table


def _is_positive(value: Any) -> bool:
    """Whether it is such a number, and none that overflows what is computed of it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 1e-30 < value < 1e30


def machine_text(gpu: Gpu, about: str) -> str:
    """The text of a file from which `gpu_of` reads the same, figures of three digits.

    `about` says in one line what was measured, and how.
    """
    lines = [f"# {about}"]
    for field in fields(Gpu)[1:]:
        if field.name != "measured":
            lines.append(f"{field.name}: {_number(getattr(gpu, field.name))}")
    if gpu.measured is not None:
        lines.append("measured:")
        for field in fields(Kernels):
            value = getattr(gpu.measured, field.name)
            if not isinstance(value, ProductTable):
                lines.append(f"  {field.name}: {_number(value)}")
                continue
            lines.append(f"  {field.name}:  # rows, inner, columns, 10¹² operations a second")
            for rows, inner, columns, tflops in value.products:
                lines.append(f"  - [{rows}, {inner}, {columns}, {_number(tflops)}]")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
