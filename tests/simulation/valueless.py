"""Tensors that have a shape and no values, and take no memory: torch's fake tensors.

While `Valueless` is active, tensors of floating-point numbers are made without values, and so is
whatever is computed from them. Token ids, lengths and plans are computed as always, so that code
that looks at numbers of the host takes its usual way. Whoever reads a number that has no value gets
0 or True, and the largest of several are spread evenly over them. Messages between ranks are
counted and not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mrlhf.host import kernels

T = TypeVar("T")
_aten = torch.ops.aten
_MOST_INTEGERS = 2**24  # of a tensor that keeps its values
_FACTORIES = {
    getattr(getattr(_aten, name), overload)
    for names, overload in (
        ("empty", "memory_format"),
        ("zeros ones full rand randn empty_strided", "default"),
        ("empty_like zeros_like ones_like full_like rand_like randn_like", "default"),
        ("new_empty new_zeros new_ones new_full new_empty_strided", "default"),
    )
    for name in names.split()
}
_INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}


class Exchange(NamedTuple):
    """A kind of message: the phase, the collective, and the number of ranks that take part."""

    phase: str
    operation: str
    ranks: int


class Valueless(TorchDispatchMode):
    """Makes tensors without values, and counts what is exchanged."""

    def __init__(self, phase: Callable[[], str]) -> None:
        """`phase` gives the name under which messages are counted."""
        super().__init__()
        self.calls: Counter[Exchange] = Counter()
        self.nbytes: Counter[Exchange] = Counter()
        self._phase = phase
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator of torch."""
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            tensor = args[0]
            return tensor.fake_device if isinstance(tensor, FakeTensor) else func(tensor)
        if func.namespace == "c10d":
            self._count(func, args)
        if _has_fake((args, tuple(kwargs.values()))):
            return self._without_values(func, args, kwargs)
        if func in _FACTORIES and self._loses_values(func, args, kwargs):
            return self._fake.__torch_dispatch__(func, (), args, kwargs)
        if func is torch.ops.c10d.alltoall_base_.default:
            args[0].copy_(args[1])
        return func(*args, **kwargs)

    def _loses_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether a tensor that is made gets no values."""
        made = func(*args, **(kwargs | {"device": "meta", "pin_memory": None}))
        return bool(made.dtype.is_floating_point or made.numel() > _MOST_INTEGERS)

    def _without_values(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run an operator on tensors of which one has no values."""
        first = args[0]
        if func is _aten.copy_.default:
            return first
        if func.namespace == "c10d":
            results = [
                FakeWork().boxed() if "Work" in str(result.type) else first
                for result in func._schema.returns
            ]
            return results[0] if len(results) == 1 else tuple(results)

        if func is _aten._local_scalar_dense.default:
            return _number(first.dtype)
        if func is _aten.equal.default:
            return True

        if func is _aten.nonzero.default:
            return _all_true(first).nonzero()
        if func is _aten.where.default:
            return list(_all_true(first).nonzero(as_tuple=True))

        if func is _aten.topk.default:
            found: Any = self._fake.__torch_dispatch__(func, (), args, kwargs)
            return found[0], _spread(found[0].shape, first.shape[-1])
        if func is _aten.masked_select.default:
            func, args = _aten.index.Tensor, (first, [args[1]])

        if func in _INDEXED:
            args = (first, _by_number(args[1]), *args[2:])
        if func.namespace == "mkldnn" and "reorder" in func._opname:
            func, args = _aten.clone.default, (first,)

        return self._fake.__torch_dispatch__(func, (), args, kwargs)

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        operation = func._opname.strip("_")
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if group is None or operation.startswith("recv") or operation == "barrier":
            return
        kind = Exchange(self._phase(), operation, ProcessGroup.unbox(group).size())
        self.calls[kind] += 1
        self.nbytes[kind] += max(_nbytes(arg) for arg in args)


class _NoKernels:
    """In place of compiled functions, which would take the addresses of values: nothing is done."""

    panel_columns = 16

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def without_values(phase: Callable[[], str]) -> Iterator[Valueless]:
    """Activate `Valueless` for this thread, and what it needs around torch."""
    mode = Valueless(phase)
    with (
        mock.patch.object(kernels, "find", lambda dtype: _NoKernels()),
        mock.patch.object(FakeTensor, "numpy", _as_numpy, create=True),
        # torch would exchange the tensors inside two parameters, which fakes do not allow.
        mock.patch.object(torch.nn.Module, "_apply", _convert),
        mode,
    ):
        yield mode


def with_values(compute: Callable[[], T]) -> T:
    """Call a function whose tensors have values."""
    with _disable_current_modes():
        return compute()


def _has_fake(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_fake(each) for each in value)
    return isinstance(value, FakeTensor)


def _nbytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_nbytes, value))
    return value.numel() * value.dtype.itemsize if isinstance(value, Tensor) else 0


def _number(dtype: torch.dtype) -> float | int | bool:
    """A number in place of one that has no value."""
    if dtype == torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0


def _all_true(tensor: Tensor) -> Tensor:
    return with_values(lambda: torch.ones(tensor.shape, dtype=torch.bool))


def _spread(shape: torch.Size, choices: int) -> Tensor:
    """Different choices in the last dimension, each as often as any other."""
    numbers = with_values(lambda: torch.arange(shape.numel()).view(shape))
    return numbers % choices


def _by_number(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices of `Tensor.__getitem__`, with the numbers of what is true in place of masks."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            found.append(index)
        else:
            mask = _all_true(index) if isinstance(index, FakeTensor) else index
            found += mask.nonzero().unbind(1)
    return found


def _as_numpy(self: FakeTensor, *, force: bool = False) -> Any:
    shape, dtype = tuple(self.shape), self.dtype
    return with_values(lambda: torch.full(shape, _number(dtype), dtype=dtype)).numpy()


def _convert(
    module: torch.nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Do what `Module._apply` does, with new parameters where the old ones differ."""
    for part in module.modules() if recurse else [module]:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            converted = convert(parameter.detach())
            if converted.dtype != parameter.dtype:
                part._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
                vars(part._parameters[name]).update(vars(parameter))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = convert(buffer)
    return module
