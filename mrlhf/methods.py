"""The function that the name of a method stands for: from our own table, or from a user's file.

It does not know what the functions compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from mrlhf.errors import ConfigError
from mrlhf.user_code import UserCodeError, load_function, read_reference

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def find_method(key: str, name: str, table: Mapping[Any, MethodT]) -> MethodT:
    """The function of `table` called `name`, else the user's function "path/to/file.py:function".

    A user's file is imported by the first call and not again, in this process, whose models it may
    use. Its function is called as f(inputs, options).

    Args:
        key: the configuration key that holds `name`, for the message.
        name: a name in `table`, or a reference to a function.
        table: our own functions by name.

    Raises:
        ConfigError: the file or the function is missing, the file cannot be imported, or the
            function takes other arguments.
    """
    if name in table:
        return table[name]
    try:
        file, function = read_reference(name)
        loaded = load_function(file.resolve(), function, ("inputs", "options"), by_name=False)
    except UserCodeError as error:
        raise ConfigError(f"bad value '{name}' for '{key}': {error}") from error
    return cast(MethodT, loaded)
