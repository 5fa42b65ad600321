"""A pretend accelerator: torch's `meta` device, which computes shapes only, under a mode that counts transfers.

What a GPU would reject, or would make the host wait for, shows without one: an operation over tensors of two devices, a
read, an upload that blocks. A read gives zeros, so that programs continue after it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl_notebook

aten = torch.ops.aten
DEVICE = "meta"
PACKAGE = str(Path(rl_notebook.__file__).parent) + os.sep


def caller() -> str:
    "The innermost function of the package that is running."
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return "elsewhere" if frame is None else frame.f_code.co_name


def is_on_device(value: Any) -> bool:
    "Whether a tensor, or a device, is the pretend one."
    device = value.device if isinstance(value, torch.Tensor) else value
    return device is not None and torch.device(device).type == DEVICE


def zeros(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    "What a read gives: zeros, and yes to every question."
    return torch.full(shape, dtype is torch.bool, dtype=dtype)


class _TensorMaking(TorchFunctionMode):
    "`torch.tensor(..., device=)` is a blocking upload, which no operation shows on this device."

    def __init__(self, counts: Pretend):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and is_on_device((kwargs or {}).get("device")):
            self.counts.uploads[caller()] += 1
        return func(*args, **(kwargs or {}))


class Pretend(TorchDispatchMode):
    "Counts by the function that they happen in."

    def __init__(self):
        super().__init__()
        self.reads: Counter[str] = Counter()  # the host waits for the device
        self.uploads: Counter[str] = Counter()  # likewise
        self.sent: Counter[str] = Counter()  # uploads that do not block
        self.strays: Counter[str] = Counter()  # operations over tensors of both devices
        self._tensor_making = _TensorMaking(self)

    @property
    def waits(self) -> int:
        "How often the host waited."
        return self.reads.total() + self.uploads.total()

    def forget(self) -> None:
        "Begin to count again."
        for counter in (self.reads, self.uploads, self.sent, self.strays):
            counter.clear()

    def __enter__(self) -> Self:
        self._tensor_making.__enter__()
        return super().__enter__()

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)
        self._tensor_making.__exit__(*reason)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if (
            func is aten._to_copy.default
            and "device" in kwargs
            and is_on_device(tensors[0]) != is_on_device(kwargs["device"])
        ):
            if is_on_device(tensors[0]):
                self.reads[caller()] += 1
                return zeros(tensors[0].shape, kwargs.get("dtype") or tensors[0].dtype)
            (self.sent if kwargs.get("non_blocking") else self.uploads)[caller()] += 1
            return func(*args, **kwargs)
        if func is aten.copy_.default and is_on_device(args[0]) != is_on_device(args[1]):
            (self.uploads if is_on_device(args[0]) else self.reads)[caller()] += 1
            return args[0] if is_on_device(args[0]) else args[0].zero_()
        if func is aten._local_scalar_dense.default and is_on_device(tensors[0]):
            self.reads[caller()] += 1
            return zeros((), tensors[0].dtype).item()
        if func not in (aten._to_copy.default, aten.copy_.default):
            with torch._C.DisableTorchFunction(), self:
                # what inference mode has not taken apart
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        if any(map(is_on_device, tensors)) and not all(
            is_on_device(t) or t.ndim == 0 for t in tensors
        ):
            self.strays[f"{caller()}: {func}"] += 1
        return func(*args, **kwargs)
