"""Tensors of the simulated device, and what happens to every operator of the process.

A tensor says that it is on the device and holds its numbers on the host. Operators refuse what a
GPU refuses. It knows which operators make the host wait, and which launch a kernel.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.simulated_device.counts import place
from tests.simulated_device.state import DEVICE

Function = Callable[..., Any]
EMULATED: dict[Any, Function] = {}
"""Operators that the host does not have, or not as a single kernel; `operators.py` fills it."""
COLLECTIVES: list[Function] = []
"""What c10d's operators are handed to; `collectives.py` fills it."""
OURS: list[Function] = []
"""What is told of each call of an operator of mrlhf's, with its arguments on the host."""

# A device address must not be read by the host: with this it lies where no process has memory.
ADDRESS = 1 << 60
_HOST = torch.device("cpu")

_WAITING = {
    "aten::_is_all_true",
    "aten::_is_any_true",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
_INDEXING = {
    "aten::index.Tensor",
    "aten::_unsafe_index.Tensor",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
}
_NO_KERNEL = (
    "aten::_local_scalar_dense",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::detach",
    "aten::empty",
    "aten::is_same_size",
    "aten::lift",
    "aten::new_empty",
    "aten::record_stream",
    "aten::set_",
    "aten::view",
    "prim::",
)


class DeviceMismatchError(RuntimeError):
    """Tensors of two devices met in one operator."""


class SimulatedStorage:
    """The storage of a tensor of the device; the host cannot read its address."""

    def __init__(self, inner: torch.UntypedStorage) -> None:
        self._inner = inner

    @property
    def device(self) -> torch.device:
        """The device in torch's words."""
        return DEVICE.device

    def data_ptr(self) -> int:
        """An address that the host cannot read."""
        return ADDRESS + self._inner.data_ptr()

    def resize_(self, nbytes: int) -> None:
        """Give its memory back, and take other memory."""
        DEVICE.memory.resize(self._inner, nbytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SimulatedTensor(torch.Tensor):
    """A tensor on the simulated device; `inner` has its numbers."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimulatedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE.device,
            requires_grad=False,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    @property
    def data(self) -> SimulatedTensor:  # type: ignore[override]
        """The tensor without its history."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimulatedTensor):
            raise DeviceMismatchError(f"Tensor.data on the device is set to one on {value.device}")
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner = value.inner

    def data_ptr(self) -> int:
        """An address that the host cannot read."""
        return ADDRESS + self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        """The storage of the numbers."""
        return SimulatedStorage(self.inner.untyped_storage())

    def record_stream(self, stream: Any) -> None:
        """Nothing: all work is in one order."""

    def tolist(self) -> Any:
        """The numbers; the host waits for them."""
        DEVICE.wait("tolist")
        return self.inner.tolist()

    def numpy(self, *arguments: Any, **options: Any) -> Any:
        """Refused, as on a GPU."""
        raise TypeError(
            "can't convert cuda device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        DEVICE.wait("pickle")
        return self.inner.__reduce_ex__(protocol)

    def __repr__(self, **options: Any) -> str:
        return f"SimulatedTensor({tuple(self.shape)}, {self.dtype})"


def on_device(tensor: torch.Tensor) -> SimulatedTensor:
    """A tensor of the device with these numbers, whose memory counts from now on."""
    DEVICE.memory.hold(tensor.untyped_storage())
    return SimulatedTensor(tensor)


def inner_of(value: Any) -> Any:
    """What stands for an argument on the host."""
    if isinstance(value, SimulatedTensor):
        return value.inner
    if isinstance(value, torch.device) and value.type == "cuda":
        return _HOST
    return value


def is_host(value: object) -> bool:
    """Whether it is a tensor of the host."""
    return isinstance(value, torch.Tensor) and not isinstance(value, SimulatedTensor)


class DeviceMode(TorchDispatchMode):
    """Sees operators that have no tensor of the device yet, such as `torch.empty`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the numbers, after what a GPU would refuse or count."""
    device = kwargs.get("device") if kwargs else None
    target = None if device is None else torch.device(device).type
    is_collective = func.namespace in ("c10d", "_c10d_functional")
    if target != "cuda" and not is_collective and not _has_ours(args) and not _has_ours(kwargs):
        return _on_host(func, args, kwargs)
    if is_collective:
        return COLLECTIVES[0](func, args, kwargs)

    flat, spec = tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, SimulatedTensor)]
    emulated = EMULATED.get(func)
    if emulated is not None:
        return emulated(func, args, kwargs)
    if func.namespace == "aten" and _is_composite(func):  # in inference mode they come whole
        with DeviceMode():
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

    non_blocking = _count(func, args, kwargs, flat, target)
    inner_args, inner_kwargs = tree_unflatten([inner_of(x) for x in flat], spec)
    inner_kwargs.pop("pin_memory", None)
    if func.namespace == "mrlhf":
        for listener in OURS:
            listener(func, inner_args)
    if DEVICE.capturing is not None and DEVICE.capturing.is_of_this_thread:
        written = _written_arguments(func, args)
        DEVICE.capturing.save([x.inner for x in written if isinstance(x, SimulatedTensor)])
    out = func(*inner_args, **inner_kwargs)
    return _wrapped(
        func, out, flat, ours, target == "cpu", (inner_args, inner_kwargs), non_blocking
    )


def _has_ours(arguments: Any) -> bool:
    """Whether there is a tensor of the device among arguments, lists of tensors included."""
    values = arguments.values() if isinstance(arguments, dict) else arguments
    for value in values:
        if isinstance(value, SimulatedTensor):
            return True
        if isinstance(value, list | tuple) and any(isinstance(x, SimulatedTensor) for x in value):
            return True
    return False


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator of the host alone: it must not touch memory that a copy still uses."""
    if not DEVICE.host.is_quiet:
        written = _written_arguments(func, args)
        for value in tree_flatten((args, kwargs))[0]:
            if isinstance(value, torch.Tensor):
                DEVICE.host.check(value, any(value is target for target in written))
    if kwargs.get("pin_memory"):
        return DEVICE.host.pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def _written_arguments(func: Any, args: Any) -> list[Any]:
    if _is_view(func):
        return []
    pairs = zip(func._schema.arguments, args, strict=False)
    return [
        value for item, value in pairs if item.alias_info is not None and item.alias_info.is_write
    ]


def _count(
    func: Any, args: Any, kwargs: dict[str, Any], flat: list[Any], target: str | None
) -> bool:
    """Refuse or count an operator; returns whether it is a copy to the host that does not block."""
    name = func.name()
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    if name == "aten::_to_copy" and tensors and target is not None:
        to_device = target == "cuda"
        if to_device == isinstance(tensors[0], SimulatedTensor):
            DEVICE.launch("copy")
            return False
        blocking = not kwargs.get("non_blocking")
        return _copy_across(tensors[0] if to_device else None, to_device, blocking, tensors[0])
    if name == "aten::copy_":
        into, source = tensors[:2]
        to_device = isinstance(into, SimulatedTensor)
        if to_device == isinstance(source, SimulatedTensor):
            DEVICE.launch("copy")
            return False
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        pending = _copy_across(source if to_device else into, to_device, blocking, source)
        if pending:
            DEVICE.host.begin_write(into)
        return False

    _refuse(func, name, args, kwargs, flat)
    if name == "aten::_local_scalar_dense":
        DEVICE.wait("item")
    elif name in _WAITING:
        DEVICE.wait(name)
    elif name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None:
        DEVICE.wait("repeat_interleave without output_size")
    if not _is_view(func) and not name.startswith(_NO_KERNEL):
        DEVICE.launch(name.removeprefix("aten::"))
    return False


def _copy_across(
    host: torch.Tensor | None, to_device: bool, blocking: bool, source: torch.Tensor
) -> bool:
    """Count a copy between host and device; returns whether it goes to the host without blocking.

    `host` is the tensor of the host; None for one that torch makes, which is pinned if the copy
    does not block.
    """
    if not source.numel():
        return False
    pinned = not blocking if host is None else DEVICE.host.is_pinned(host)
    direction = "to the device" if to_device else "to the host"
    beside = ", beside other work" if DEVICE.streams.beside else ""
    kind = f"{'pinned' if pinned else 'unpinned'} {direction}{beside}"
    DEVICE.counts.copies[(kind, place())] += 1

    if blocking or (not pinned and not to_device):
        DEVICE.wait(f"copy {direction}")
        return False
    if not pinned:
        DEVICE.refuse_in_capture(f"copy {direction} from memory that is not pinned")
    elif to_device and host is not None:
        DEVICE.host.begin_read(host)

    return not to_device


def _refuse(func: Any, name: str, args: Any, kwargs: dict[str, Any], flat: list[Any]) -> None:
    """Raise where a GPU would."""
    hosts = [x for x in flat if is_host(x)]
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type == "cpu":
        raise RuntimeError(f"{name}: Expected a 'cuda' device type for generator but found 'cpu'")

    if name in _INDEXING and isinstance(args[0], SimulatedTensor):
        indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
        hosts = [x for x in hosts if not any(x is index for index in indices)]
        if any(is_host(x) and x.dim() > 0 for x in indices):
            DEVICE.counts.copies[("unpinned to the device", place())] += 1
            DEVICE.wait(f"index of the host in {name}")
        masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
        if masks and not _is_masked_fill(name, args):
            DEVICE.wait(f"boolean index in {name}")

    if any(x.dim() > 0 for x in hosts):
        shapes = [(str(x.device), tuple(x.shape)) for x in flat if isinstance(x, torch.Tensor)]
        raise DeviceMismatchError(
            f"{name}: Expected all tensors to be on the same device: {shapes} at {place()}"
        )


def _is_masked_fill(name: str, args: Any) -> bool:
    """Whether `x[mask] = number`, which CUDA does by masked_fill."""
    return (
        "put" in name
        and len(args[1]) == 1
        and args[2].numel() == 1
        and not (len(args) > 3 and args[3])
    )


def _wrapped(
    func: Any,
    out: Any,
    flat: list[Any],
    ours: list[SimulatedTensor],
    to_host: bool,
    inner_call: tuple[Any, Any],
    non_blocking: bool,
) -> Any:
    """The results as tensors of the device, and the call in the graph that is captured."""
    known: dict[int, torch.Tensor] = {id(x.inner): x for x in ours}
    known |= {id(x): x for x in flat if is_host(x)}
    is_view = _is_view(func)
    # A view of a normal tensor is one, in inference mode too.
    is_normal_view = is_view and bool(ours) and not ours[0].is_inference()

    outs, out_spec = tree_flatten(out)
    results = []
    made = []
    for value in outs:
        owner = known.get(id(value))
        if not isinstance(value, torch.Tensor):
            results.append(value)
        elif owner is not None:
            if isinstance(owner, SimulatedTensor) and owner.shape != owner.inner.shape:
                raise NotImplementedError(f"{func.name()} changes a shape in place")
            results.append(owner)
        elif to_host:
            if non_blocking:
                DEVICE.host.begin_write(DEVICE.host.pin(value))
            results.append(value)
        else:
            with torch.inference_mode(False) if is_normal_view else contextlib.nullcontext():
                results.append(SimulatedTensor(value) if is_view else on_device(value))
            if not is_view:
                made.append(value)

    if DEVICE.capturing is not None:
        DEVICE.capturing.add(DEVICE.capturing.later(func, inner_call), outs, made)
    return tree_unflatten(results, out_spec)


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )


@functools.cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(func.has_kernel_for_dispatch_key(key))
