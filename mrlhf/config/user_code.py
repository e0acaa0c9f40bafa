"""A user's own function, named "path/to/file.py:function": reads the name, imports the file, finds
the function.

This file uses the standard library alone. So the processes of users' code can import it without the
package, which would import torch. It does not know the purpose of the function.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

OWN_FUNCTION = "path/to/file.py:function"
_PREFIX = "user_file"  # of the name of each user's module


class UserCodeError(Exception):
    """The function cannot be used; the message says why, on one line."""


def is_reference(name: str) -> bool:
    """Whether `name` has the form "path/to/file.py:function"."""
    path, _, function = name.rpartition(":")
    return path.endswith(".py") and function.isidentifier()


def check_name(name: object, known: Sequence[str], own: str = OWN_FUNCTION) -> str:
    """`name` if it is one of `known` or has the form "path/to/file.py:function".

    Raises:
        ValueError: it is neither; the message names the nearest known one, and `own` as the form.
    """
    if isinstance(name, str) and (name in known or is_reference(name)):
        return name
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    others = f"{', '.join(known)} or " if known else ""
    raise ValueError(f"should be {others}{own}{hint}")


def read_reference(reference: str) -> tuple[Path, str]:
    """The file and the name in "path/to/file.py:function"; UserCodeError if there is no file."""
    path, _, name = reference.rpartition(":")
    if not path or not name:
        raise UserCodeError("write it as path/to/file.py:function")
    file = Path(path)
    if not file.is_file():
        others = [str(other) for other in file.parent.glob("*.py")]
        near = difflib.get_close_matches(path, others, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else "the path is relative to the working directory"
        )
        raise UserCodeError(f"there is no file {path}; {hint}")
    return file, name


def load_function(
    file: Path, name: str, parameters: Sequence[str], *, by_name: bool
) -> Callable[..., Any]:
    """Load the function `name` of `file` (absolute), which must accept `parameters`.

    They are passed by keyword if `by_name`, else by position. The UserCodeError is as that of
    `load_member`, or says that it takes other arguments or does not return its result.
    """
    function = load_member(file, name)
    try:
        check_kind(function)
        check_parameters(function, () if by_name else parameters, parameters if by_name else ())
    except UserCodeError as error:
        raise UserCodeError(f"{name} in {file} {error}") from None
    return function


def load_member(file: Path, name: str, wanted: str = "function") -> Callable[..., Any]:
    """Load what is called `name` in `file` (absolute), which is imported once a process.

    Raises:
        UserCodeError: the file cannot be imported, which its error caused, or has no such member.
    """
    members = vars(_import_file(file))
    member = members.get(name)
    if not callable(member):
        known = [
            key for key, value in members.items() if callable(value) and not key.startswith("_")
        ]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
        if name in members:
            kind = type(member).__name__
            raise UserCodeError(f"{name} in {file} is of type {kind}, and no {wanted}; {hint}")
        raise UserCodeError(f"{file} has no {wanted} {name!r}; {hint}")
    return member


def summarise_error(error: BaseException, file: Path) -> str:
    """Type, message and line in `file` of `error`, on one line."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(file)
    ]
    place = f" (line {lines[-1]})" if lines else ""
    try:
        message = str(error)
    except Exception as failure:  # the user's own __str__
        message = f"its text cannot be read, which raised {type(failure).__name__}"
    return " ".join(f"{type(error).__name__}: {message}".split()) + place


def check_kind(function: Callable[..., Any]) -> None:
    """Refuse a coroutine or generator function, whose call returns something still to be run.

    Raises:
        UserCodeError: the message lacks the function's name, with which it begins.
    """
    for code in (function, type(function).__call__):  # an object is called through its class
        kind = None
        if inspect.iscoroutinefunction(code):
            kind = "an async function"
        elif inspect.isgeneratorfunction(code):
            kind = "a generator function (it has yield)"
        elif inspect.isasyncgenfunction(code):
            kind = "an async generator function (it has yield)"

        if kind is not None:
            raise UserCodeError(
                f"is {kind}, which a call does not run; write a plain function that returns its "
                "result"
            )


def check_parameters(
    function: Callable[..., Any], by_position: Sequence[str], by_name: Sequence[str] = ()
) -> None:
    """Refuse a function that does not accept these arguments.

    Raises:
        UserCodeError: the message lacks the function's name, with which it begins.
    """
    needed = ", ".join([*by_position, *by_name]) or "a call without arguments"
    try:
        signature = inspect.signature(function)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserCodeError(
            f"does not say which parameters it has ({reason}); call it in a function of your own "
            f"that accepts {needed}"
        ) from None

    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError as error:
        raise UserCodeError(f"must accept {needed}: {error}") from None


class FindByName(MetaPathFinder):
    """Lets a process that the user's code has spawned import the file as its parent names it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Where the user's file of this name is; None for any other name."""
        if not name.startswith(_PREFIX):
            return None
        file = re.sub(r"_([0-9a-f]+)_", lambda code: chr(int(code[1], 16)), name[len(_PREFIX) :])
        return importlib.util.spec_from_file_location(name, file)


def _module_name(file: Path) -> str:
    """The name by which any process imports the file, or one that no other file has."""
    if file.stem.isidentifier():
        with suppress(ValueError):
            found = importlib.util.find_spec(file.stem)
            if found is not None and found.origin == str(file):
                return file.stem
    return _PREFIX + re.sub(r"[\W_]", lambda sign: f"_{ord(sign[0]):x}_", str(file))


def _import_file(file: Path) -> ModuleType:
    # The file may import its neighbours; last in the list, they hide no package.
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    name = _module_name(file)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or not isinstance(spec.loader, SourceFileLoader):
        raise UserCodeError(f"{file} is not a Python file")

    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        # Python would take bytecode of another text if size and second of both are the same.
        exec(spec.loader.source_to_code(file.read_bytes(), str(file)), vars(module))
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserCodeError(f"{file} cannot be imported: {summarise_error(error, file)}") from error
    return module
