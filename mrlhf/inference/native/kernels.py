"""Compiles `kernels.cpp` for this machine, once, and calls it on tensors.

The library is kept in the user's cache folder under a name that changes with source, compiler and
processor. Where there is no compiler, `load` says so once and the engine runs on torch's own
operators. It knows shapes, and no model.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
_SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_COLUMNS = 128

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "add_rms_norm": (_P, _P, _P, _P, _I, _I, _F, _N),
    "gated": (_P, _P, _I, _I, _N),
    "rotate_store": (_P, _P, _P, _F, _P, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I, _N),
    "attend": (_P, _P, _P, _P, _I, _P, _P, _P, _I, _I, _I, _I, _I, _I, _F, _N),
    "logit_blocks": (_P, _F, _P, _P, _P, _I, _I, _N),
    "pick": (_P, _F, _P, _P, _P, _P, _P, _P, _I, _I, _N),
    "draw": (_P, _F, _P, _P, _P, _I, _I, _N),
}


class Kernels:
    """The compiled functions for one dtype; tensors are contiguous and on the host."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        functions = {name: library[f"{name}_{_SUFFIXES[dtype]}"] for name in _SIGNATURES}
        for name, function in functions.items():
            function.argtypes, function.restype = _SIGNATURES[name], None
        self._add_rms_norm, self._gated = functions["add_rms_norm"], functions["gated"]
        self._rotate_store, self._attend = functions["rotate_store"], functions["attend"]
        self._logit_blocks, self._pick = functions["logit_blocks"], functions["pick"]
        self._draw = functions["draw"]

    def add_rms_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` to `hidden` [tokens, hidden] in place, and return its RMSNorm."""
        out = torch.empty_like(hidden)
        tokens, size = hidden.shape
        threads = _threads(hidden.numel())
        addend = None if delta is None else delta.data_ptr()
        self._add_rms_norm(
            hidden.data_ptr(), addend, weight.data_ptr(), out.data_ptr(), tokens, size, eps, threads
        )
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [tokens, 2 * ffn] as [tokens, ffn]."""
        tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        self._gated(gate_up.data_ptr(), out.data_ptr(), tokens, size, _threads(gate_up.numel()))
        return out

    def rotate_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        tables: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Rotate q and k, put k and v in the cache; q as [tokens, heads, head_dim].

        Args:
            qkv: [tokens, groups, heads_per_group + 2, head_dim].
            norms: weights of the q and the k norm [head_dim] each, if the model has them.
            eps: of those norms.
            tables: cosines and sines, float32 [positions, head_dim / 2].
            positions: int64 [tokens].
            slots: int64 [tokens], block number x block_size + place in the block.
            cache: keys and values, [blocks, block_size, groups, head_dim] each; keys are stored
                transposed in each block, which only `attend` may read.
        """
        tokens, groups, heads, dim = qkv.shape
        q = torch.empty((tokens, groups * (heads - 2), dim), dtype=qkv.dtype, device=qkv.device)
        q_norm, k_norm = (None, None) if norms is None else (norm.data_ptr() for norm in norms)
        self._rotate_store(
            qkv.data_ptr(), q_norm, k_norm, eps, tables[0].data_ptr(), tables[1].data_ptr(), positions.data_ptr(),
            slots.data_ptr(), q.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr(), tokens, groups, heads - 2, dim,
            cache[0].shape[1], _threads(qkv.numel()),
        )  # fmt: skip
        return q

    def attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        block_tables: Tensor,
        query_starts: Tensor,
        lengths: Tensor,
        window: int | None,
    ) -> Tensor:
        """Causal attention of the last tokens of each sequence to all that is cached of it, as `q`.

        Args:
            q: [tokens, heads, head_dim], sequence after sequence.
            cache: keys and values, [blocks, block_size, groups, head_dim] each, those of `q`
                included.
            block_tables: int32 [sequences, blocks a sequence].
            query_starts: int32 [sequences + 1], where each sequence's tokens begin in `q`.
            lengths: int32 [sequences], cached tokens.
            window: tokens that a token sees, itself included; None for all.
        """
        _, heads, dim = q.shape
        _, block_size, groups, _ = cache[0].shape
        out = torch.empty_like(q)
        self._attend(
            q.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr(), block_tables.data_ptr(), block_tables.stride(0),
            query_starts.data_ptr(), lengths.data_ptr(), out.data_ptr(), len(lengths), groups, heads // groups, dim,
            block_size, window or 0, dim**-0.5, _threads(64 * q.numel()),
        )  # fmt: skip
        return out

    def logit_blocks(self, logits: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over logits [batch, vocab_shard], scaled by `scale`.

        Returns:
            The highest of each block of columns and the sum of exp(logit - that), float32 [batch,
            blocks] each, and the first column of the highest of all, int64 [batch].
        """
        rows, columns = logits.shape
        blocks = -(-columns // _COLUMNS)
        highest, sums = torch.empty((2, rows, blocks), dtype=torch.float32)
        likeliest = torch.empty(rows, dtype=torch.int64)
        self._logit_blocks(
            logits.data_ptr(), scale, highest.data_ptr(), sums.data_ptr(), likeliest.data_ptr(), rows,
            columns, _threads(logits.numel()),
        )  # fmt: skip
        return highest, sums, likeliest

    def pick(
        self,
        logits: Tensor,
        scale: float,
        highest: Tensor,
        sums: Tensor,
        tops: Tensor,
        targets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The column of each row at which the running sum of exp(logit - top) passes its target.

        Args:
            logits: [batch, vocab_shard].
            scale: scales them.
            highest: as `logit_blocks` returned it.
            sums: likewise.
            tops: float32 [batch].
            targets: float64 [batch]; a row with a negative one is skipped.

        Returns:
            int64 [batch] columns, -1 where none was found, and their scaled logits, float32
            [batch].
        """
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        chosen = torch.empty(rows, dtype=torch.float32)
        self._pick(
            logits.data_ptr(), scale, highest.data_ptr(), sums.data_ptr(), tops.data_ptr(),
            targets.data_ptr(), tokens.data_ptr(), chosen.data_ptr(), rows, columns, _threads(64 * rows),
        )  # fmt: skip
        return tokens, chosen

    def draw(self, logits: Tensor, scale: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """`logit_blocks` and `pick` at once, for logits [batch, vocab] that are not cut.

        Args:
            logits: [batch, vocab].
            scale: multiplies them.
            uniform: float64 [batch] in [0, 1); a negative one takes the likeliest token.

        Returns:
            int64 [batch] tokens, and float32 [batch] log-probabilities; not-a-number where the
            logits are not finite.
        """
        rows, columns = logits.shape
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        self._draw(
            logits.data_ptr(), scale, uniform.data_ptr(), tokens.data_ptr(), logprobs.data_ptr(), rows, columns,
            _threads(logits.numel()),
        )  # fmt: skip
        return tokens, logprobs


def _threads(elements: int) -> int:
    """Threads that `elements` numbers are worth: a team costs some microseconds."""
    return torch.get_num_threads() if elements >= 2**14 else 1


@cache
def load(dtype: torch.dtype) -> Kernels | None:
    """The kernels for `dtype`; None where this machine cannot compile them."""
    library = _library() if dtype in _SUFFIXES else None
    return None if library is None else Kernels(library, dtype)


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.warning(
            "no C++ compiler (g++) found: the engine runs on torch's operators, which is slower"
        )
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        detail = (
            error.stderr.decode()
            if isinstance(error, subprocess.CalledProcessError)
            else str(error)
        )
        logger.warning(
            "%s could not be compiled: the engine runs on torch's operators, slower. %s",
            SOURCE,
            detail,
        )
        return None


def _compiled(compiler: str) -> Path:
    """The compiled library; the first process on a machine makes it, the others wait."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    identity = (SOURCE.read_bytes(), version, " ".join(_FLAGS).encode(), _processor().encode())
    name = f"kernels-{hashlib.blake2b(b'|'.join(identity), digest_size=8).hexdigest()}"
    directory = _cache_directory()
    library = directory / f"{name}.so"
    with open(directory / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = directory / f"{name}-{os.getpid()}.tmp"
            subprocess.run(
                [compiler, *_FLAGS, "-o", unfinished, SOURCE], capture_output=True, check=True
            )
            unfinished.replace(library)
    return library


def _cache_directory() -> Path:
    """A folder of this user's alone that can be written to; one in the temporary folder where the
    home cannot.
    """
    temporary = Path(tempfile.gettempdir()) / f"mrlhf-{os.getuid()}"
    for directory in (*_home_caches(), temporary):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(directory, os.W_OK) and directory.stat().st_uid == os.getuid():
            return directory
    raise OSError(f"neither the home's cache folder nor {temporary} can be written to")


def _home_caches() -> list[Path]:
    try:
        return [Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mrlhf"]
    except RuntimeError:  # this user has no home
        return []


def _processor() -> str:
    """What tells processors apart that need different code."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
