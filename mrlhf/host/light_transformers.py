"""Makes `import transformers` cheap for processes that read tokenizers and configurations alone.

Each rank of a run is such a process, and spent a fifth of its start on what it does not use. The
package imports this file first of all, so it imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import marshal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from mrlhf.host.user_cache import cache_directory, write_whole

_GENERATION = "transformers.generation"
_MIXIN = "GenerationMixin"
_ADDS_MIXIN = "add_generation_mixin_to_remote_model"


@contextlib.contextmanager
def _keep_structure(module: ModuleType) -> Iterator[None]:
    """Keep what transformers finds by reading each of its 2,700 files for the names in it."""
    yield
    # Its own table in memory is of no use: who asks first adds names to what it returns.
    define = inspect.unwrap(module.define_import_structure)

    @functools.wraps(define)
    def kept(module_path: str | Path, prefix: str | None = None) -> Any:
        # The package itself asks, and again the package of its models, by its file.
        models = Path(module_path)
        models = models.parent if models.name == "__init__.py" else models
        # The files of a clone may change at any time.
        if models.name != "models" or "site-packages" not in models.parts:
            return define(module_path, prefix)
        file = None
        with contextlib.suppress(OSError):
            changed = [path.stat().st_mtime_ns for path in (models, models.parent / "__init__.py")]
            identity = f"{models}|{prefix}|{changed}|".encode() + importlib.util.MAGIC_NUMBER
            name = hashlib.blake2b(identity, digest_size=16).hexdigest()
            file = cache_directory() / f"transformers_{name}.names"
            with contextlib.suppress(EOFError, ValueError, TypeError):  # cut off
                return marshal.loads(file.read_bytes())
        structure = define(module_path, prefix)
        if file is not None and not sys.dont_write_bytecode:
            with contextlib.suppress(OSError):
                write_whole(file, marshal.dumps(structure))
        return structure

    module.__dict__["define_import_structure"] = kept


@contextlib.contextmanager
def _leave_docstrings(module: ModuleType) -> Iterator[None]:
    """Leave classes the docstrings that they have: to write others, all models are imported."""
    yield
    module.__dict__["auto_class_docstring"] = lambda cls, **_: cls


@contextlib.contextmanager
def _without_generation(module: ModuleType) -> Iterator[None]:
    """Import generation, and torch's compiler with it, only if a model of foreign code needs it.

    Until then something stands in for a base class that such models get.
    """
    name = f"{_GENERATION}.utils"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    setattr(sys.modules[name], _MIXIN, type(_MIXIN, (), {}))
    try:
        yield
    finally:
        del sys.modules[name]
        vars(sys.modules[_GENERATION]).pop(_MIXIN, None)

    members = vars(module)
    add = members[_ADDS_MIXIN]

    def with_mixin(model: type) -> Any:
        members[_MIXIN] = getattr(importlib.import_module(name), _MIXIN)
        return add(model)

    members[_ADDS_MIXIN] = with_mixin


_AROUND: dict[str, Callable[[ModuleType], AbstractContextManager[None]]] = {
    "transformers.utils.import_utils": _keep_structure,
    "transformers.utils.auto_docstring": _leave_docstrings,
    "transformers.models.auto.auto_factory": _without_generation,
}


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with _AROUND[module.__name__](module):
            super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds modules as usual, and gives some of transformers' a loader that does less."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AROUND:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def lighten_transformers() -> None:
    """Do this for what of transformers is imported from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
