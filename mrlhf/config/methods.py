"""Finds the function of a method by its name: in our own table, or in a user's file.

An error of a user's function is shown in one line and with the user's lines of code alone. This
file does not know what the functions compute.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from mrlhf.config.user_code import UserCodeError, load_function, read_reference, summarise_error
from mrlhf.errors import ConfigError, MethodError, UserTraceback

MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def find_method(key: str, name: str, table: Mapping[Any, MethodT]) -> MethodT:
    """Find the function `name` in `table`, else the user's function "path/to/file.py:function".

    A user's file is imported once. Its function is called as f(inputs, options); an error in it
    becomes a MethodError. A ConfigError, which names `key`, says that it cannot be used.
    """
    if name in table:
        return table[name]
    try:
        file, function = read_reference(name)
        file = file.resolve()
        loaded = load_function(file, function, ("inputs", "options"), by_name=False)
    except UserCodeError as error:
        raise ConfigError(f"bad value '{name}' for '{key}': {error}") from error
    return cast(MethodT, _with_own_errors(loaded, file, f"{key}: {function} of {file}"))


def _with_own_errors(function: Callable[..., Any], file: Path, title: str) -> Callable[..., Any]:
    """`function` with its errors turned into MethodErrors that show lines of `file` alone."""

    @functools.wraps(function)
    def call(inputs: object, options: object) -> Any:
        try:
            return function(inputs, options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            text = f"{title} raised {summarise_error(error, file)}"
            raise MethodError(text) from UserTraceback(_users_traceback(error, file))

    return call


def _users_traceback(error: BaseException, file: Path) -> str:
    """The traceback of `error` and of its causes, without the lines of mrlhf and of torch."""
    report = traceback.TracebackException.from_exception(error)
    chain: list[traceback.TracebackException | None] = [report]
    while chain:
        link = chain.pop()
        if link is not None:
            link.stack[:] = [frame for frame in link.stack if _is_users(frame.filename, file)]
            chain += [link.__cause__, link.__context__]
    return "".join(report.format())


def _is_users(filename: str, file: Path) -> bool:
    import torch  # which most readers of a configuration do not need

    not_theirs = (Path(__file__).resolve().parents[1], Path(torch.__file__).resolve().parent)
    path = Path(filename).resolve()  # torch may be found through a link
    return path == file or not any(path.is_relative_to(folder) for folder in not_theirs)
