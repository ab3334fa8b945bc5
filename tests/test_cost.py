"""Memory: how much there may be, and which errors say that it has run out."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
import torch

from modalities import cost
from modalities.cost import device_memory
from zoo.errors import ran_out_of_memory


def test_memory_is_the_least_of_its_limits(tmp_path, monkeypatch):
    group = tmp_path / "memory.max"
    monkeypatch.setattr(cost, "_GROUP_LIMIT", str(group))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert device_memory("cpu") == machine
    group.write_text("max\n")
    assert device_memory("cpu") == machine
    group.write_text(f"{machine // 2}\n")
    assert device_memory("cpu") == machine // 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: (machine // 4, machine))
    assert device_memory("cpu") == machine // 4


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 45), lambda: np.empty(1 << 50)])
def test_errors_of_allocators_are_known(ask):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        ask()
    assert ran_out_of_memory(error.value)


def test_other_errors_are_not_of_memory():
    assert not ran_out_of_memory(RuntimeError("shapes differ")) and not ran_out_of_memory(ValueError("bad_alloc"))
