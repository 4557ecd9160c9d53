"""A device that computes nothing and notices when the host waits for it.

Tensors on it are torch's fake tensors: shapes and dtypes without values, on a device of their own (torch's
PrivateUse1 with a Python backend), autograd and optimiser kernels included. Process groups are torch's fake ones, which
send nothing. So a training step of any layout runs here in one process as it would on a GPU, and reading a value is no
question of speed but of the impossible: there is none.

What counts as waiting, :class:`HostWaitError`: a value read (``item``, ``tolist``, ``bool`` ...), a shape that depends
on values (boolean indexing, ``nonzero``, ``unique``, repetition by a tensor), a copy from or to the device that is not
``non_blocking``, ``torch.tensor(..., device=...)``, a wait for a stream or an event. What kernels of CUDA do by
themselves is not seen here.

All of it is for a process of its own: torch cannot forget a backend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "watched"
HERE = __file__

_ATEN = torch.ops.aten
_BOOLEAN = (torch.bool, torch.uint8)


class HostWaitError(Exception):
    """The host has to wait for the device, or the device for the host."""


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        _waited("Stream.synchronize")

    def query(self) -> bool:
        return False


class _Event(_Stream):
    def record(self, stream: Any = None) -> _Event:
        return self

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        _waited("Event.synchronize")


class _Device:
    """``torch.watched``: what FSDP2 and the pipelines ask ``torch.cuda`` for."""

    Stream, Event = _Stream, _Event

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        pass

    @staticmethod
    def set_device(device: Any) -> None:
        pass

    @staticmethod
    def current_stream(device: Any = None) -> _Stream:
        return _Stream()

    @staticmethod
    @contextmanager
    def stream(stream: Any) -> Iterator[None]:
        yield

    @staticmethod
    def synchronize(device: Any = None) -> None:
        _waited("synchronize")


def device() -> torch.device:
    """The device, which from now on is this process's accelerator."""
    if not hasattr(torch, NAME):
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Device())
    return torch.device(NAME, 0)


def join(world: int, rank: int = 0) -> None:
    """Be one rank of a process group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

    if "watch" not in dist.Backend.backend_list:
        dist.Backend.register_backend("watch", _create_fake_pg, extended_api=True, devices=["cpu", NAME])
    dist.init_process_group(f"cpu:watch,{NAME}:watch", rank=rank, world_size=world, store=FakeStore())


class Watch(TorchDispatchMode):
    """While it is on, tensors on :func:`device` are fake, and all others what they are.

    With ``strict`` the host must not wait; before, copies may block, and values can be read in no case.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strict = False
        self.device = device()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._constants = _Constants(self)

    def __enter__(self) -> Any:
        torch.autograd.set_multithreading_enabled(False)  # else a backward has threads, and no call site
        torch.utils.checkpoint.set_checkpoint_early_stop(False).__enter__()  # by an exception, which would not pass
        self._constants.__enter__()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._constants.__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if any(not issubclass(kind, FakeTensor) and kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor becomes plain tensors first
        here = [value for value in tree_iter((args, kwargs)) if isinstance(value, FakeTensor)]
        wanted = kwargs.get("device")
        if func in _PINS:
            return args[0].clone() if func is _ATEN._pin_memory.default else False
        if not here and (wanted is None or torch.device(wanted).type != NAME):
            return func(*args, **kwargs)
        self._check(func, args, kwargs)
        if func is _ATEN._local_scalar_dense.default and not self.strict:
            return torch.ones((), dtype=args[0].dtype).item()
        if here and wanted is not None and torch.device(wanted).type == "cpu":
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)  # for the host: real
        if func is _ATEN._to_copy.default and not here:
            with self._fake:
                return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=wanted)
        try:
            with self._fake:
                return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _wait(str(func)) from error

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default):
            if any(index is not None and index.dtype in _BOOLEAN for index in args[1]):
                raise _wait(f"{func} with a boolean index")
            if any(index is not None and not isinstance(index, FakeTensor) for index in args[1]) and self.strict:
                raise _wait(f"{func} with an index that is not on the device")
        if not self.strict:
            return
        if func is _ATEN._to_copy.default:
            source = isinstance(args[0], FakeTensor)
            target = kwargs.get("device")
            crosses = target is not None and (torch.device(target).type == NAME) != source
            if crosses and not kwargs.get("non_blocking"):
                raise _wait(f"{func} {'from' if source else 'to'} the device, not non_blocking")
        if func is _ATEN.copy_.default:
            source, target = isinstance(args[1], FakeTensor), isinstance(args[0], FakeTensor)
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            if source != target and blocks:
                raise _wait(f"{func} {'from' if source else 'to'} the device, not non_blocking")


class _Constants(TorchFunctionMode):
    """``torch.tensor`` fills memory of the host and copies it, which no dispatch sees."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        if func not in (torch.tensor, torch.as_tensor) or target is None or torch.device(target).type != NAME:
            return func(*args, **kwargs)
        if self._watch.strict:
            raise _wait(f"torch.{func.__name__} with the device")
        return func(*args, **{**kwargs, "device": "cpu"}).to(target)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PINS = (_ATEN._pin_memory.default, _ATEN.is_pinned.default)


def _waited(what: str) -> None:
    raise _wait(what)


def _wait(what: str) -> HostWaitError:
    error = HostWaitError(f"{what}, at {site()}")
    print(f"HostWaitError: {error}", file=sys.stderr)  # raised in a backward it ends the process
    return error


def site() -> str:
    """Where the package stands, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/quern/" in path and path != HERE:
            found.append(f"{path[path.rindex('/quern/') + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found[:4]) or "no line of the package: a backward"
