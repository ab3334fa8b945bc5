"""What a step takes: activations by shapes, wall time and peak memory of a block of code, numbers
of a device, read later."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Parameters of mallopt, from malloc.h.
M_MMAP_THRESHOLD = -3
M_TRIM_THRESHOLD = -1


def activation_numbers(layers: int, dim: int, hidden: int, recomputed: bool, width: int) -> float:
    """Numbers of `width` bytes that one token keeps for the backward pass.

    A block keeps 8·dim (norms, q, k, v, heads' output) + `hidden` (MLP). A recomputed block keeps
    2·dim, and the backward pass adds one block. In float32 (CPU) the 8 is 16, because heads are
    copied and norms are not fused, and the backward pass adds 1.5 blocks.
    """
    float32 = width == 4
    block = (16 if float32 else 8) * dim + hidden
    layer = 2 * dim if recomputed else block
    backward = 1.5 if float32 else float(recomputed)
    return layers * layer + block * backward


class Meter:
    """`with Meter(device) as meter: …` adds the block's wall time to `seconds` and raises
    `peak_bytes` to its peak above what was allocated before. One meter serves many blocks.

    On CUDA the peak is torch's allocator's, on the CPU the kernel's of the resident set; None on
    systems without /proc.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.seconds = 0.0
        self.peak_bytes: int | None = 0 if self.device.type == "cuda" or _reset_peak() else None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif self.peak_bytes is not None:
            # So that pages that are used again count as new ones do.
            _glibc("malloc_trim", 0)
            _reset_peak()
            self._before = _bytes_of("VmRSS")
        self._started = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - self._started
        if self.peak_bytes is not None:
            if self.device.type == "cuda":
                highest = torch.cuda.max_memory_allocated(self.device)
            else:
                highest = _bytes_of("VmHWM")
            self.peak_bytes = max(self.peak_bytes, highest - self._before)


def device_name(device: torch.device | str) -> str:
    """ "cpu", or the GPU's name."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _reset_peak() -> bool:
    """Let the kernel's peak begin anew; False where it keeps none."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _bytes_of(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def keep_freed_tensors(below: int) -> None:
    """Keep freed tensors of less than `below` bytes for later ones, and give larger ones back to
    the system: glibc only. With 32 MiB a step of `vision.ggd2d_tiny` makes no new pages, which took
    3 to 10% of it. With 1 MiB a step of SmolLM2 on 2,048 tokens takes 1 GiB instead of 2.9, in the
    same time. If no tensor was made before, those of 2 MiB get large pages."""
    # torch reads it once, at its first tensor on the CPU.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _glibc("mallopt", M_MMAP_THRESHOLD, below)
    _glibc("mallopt", M_TRIM_THRESHOLD, 32 * below)


def _glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc where the system has it."""
    if sys.platform != "linux":
        return
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*arguments)


class Readout:
    """Numbers of a device that the host reads later, and the time from `Readout(device)` to them.

    On CUDA the copy is pinned and the times are events, so that `read` waits for these numbers and
    for nothing queued later.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.begun = self._now()

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def send(self, numbers: Tensor) -> None:
        """Start the copy of (n,) numbers to the host."""
        self.numbers = numbers
        if self.on_cuda:
            pinned = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers = pinned.copy_(numbers, non_blocking=True)
        self.ended = self._now()

    def read(self) -> tuple[list[float], float]:
        """(the numbers, seconds)"""
        if not self.on_cuda:
            return self.numbers.tolist(), self.ended - self.begun
        self.ended.synchronize()
        return self.numbers.tolist(), self.begun.elapsed_time(self.ended) / 1e3
