"""Wall time and peak memory of a block of code."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import torch

__all__ = ["Meter", "device_name"]

_STATM = "/proc/self/statm"
_INTERVAL = 0.002  # seconds between two looks at the resident set


class Meter:
    """`with Meter(device) as meter: …` adds the block's wall time to `seconds` and raises `peak_bytes` to its peak above what
    was allocated before. One meter serves many blocks.

    On CUDA the peak is torch's allocator's. On the CPU a thread looks at the resident set, without mapped files, every 2 ms;
    None on systems without /proc.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.seconds = 0.0
        self.peak_bytes: int | None = 0 if self.device.type == "cuda" or os.path.exists(_STATM) else None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif self.peak_bytes is not None:
            _trim()
            self._before = self._highest = _resident_bytes()
            self._done = threading.Event()
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - self._started
        if self.peak_bytes is None:
            return
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device)
        else:
            self._done.set()
            self._watcher.join()
            highest = max(self._highest, _resident_bytes())
        self.peak_bytes = max(self.peak_bytes, highest - self._before)

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL):
            self._highest = max(self._highest, _resident_bytes())


def device_name(device: torch.device | str) -> str:
    """ "cpu", or the GPU's name."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _resident_bytes() -> int:
    with open(_STATM, "rb") as file:
        resident, files = map(int, file.read().split()[1:3])
    return (resident - files) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> None:
    """Give free pages back to the system, so that what is reused counts as much as what is new. glibc only."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
