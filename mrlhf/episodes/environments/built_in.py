"""The tools that are there without a file of the user's; each is an ordinary tool function."""

from __future__ import annotations

import ast
import operator
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO

_LARGEST = 10**15
_MOST_CHARACTERS = 500
_LONGEST_RUN_S = 10.0
_LONGEST_OUTPUT = 20_000  # bytes
_READ_BYTES = 1 << 16

_OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression of numbers with + - * / // % ** and parentheses.

    Args:
        expression: such as (12 + 30) * 2
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"the expression has more than {_MOST_CHARACTERS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _value(node: ast.expr) -> float:
    """The value of a part of an expression; ValueError if it is no arithmetic, or too large."""
    value: float
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError("an exponent is above 64")
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")

    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError(f"a number is not real, or above {_LARGEST:.0e}")
    return value


def python(code: str) -> str:
    """Run a Python program, and get what it prints.

    Args:
        code: the program; it must print its result
    """
    until = time.monotonic() + _LONGEST_RUN_S
    with tempfile.TemporaryDirectory() as directory:
        program = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
        )
        outputs = [_Output(stream) for stream in (program.stdout, program.stderr) if stream]
        for output in outputs:
            output.join(max(0.0, until - time.monotonic()))
        try:
            status = program.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
            raise TimeoutError(f"the program ran longer than {_LONGEST_RUN_S:g} s") from None

    said, errors = outputs
    printed = said.first.decode(errors="replace")
    if status:
        lines = errors.last.decode(errors="replace").strip().splitlines()
        printed += lines[-1] if lines else f"the program ended with code {status}"
    return printed


class _Output(threading.Thread):
    """Reads what a program prints, and keeps its begin and its end: it may print without end."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.first = b""
        self.last = b""
        self._stream = stream
        self.start()

    def run(self) -> None:
        while part := os.read(self._stream.fileno(), _READ_BYTES):
            self.first += part[: _LONGEST_OUTPUT - len(self.first)]
            self.last = (self.last + part)[-_LONGEST_OUTPUT:]
