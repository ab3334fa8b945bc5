"""Ranks: join the processes of a training and leave them; groups of ranks that share lines."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from recipes.commands import ConfigError
from zoo.model import ZooModel
from zoo.sequence import SequenceGroup


@dataclass(frozen=True)
class Ranks:
    """This process among all: 0 ≤ rank < world, with its device.

    cores: this rank's share of the cores that this machine's ranks may use.
    shared: consecutive ranks that share samples, a part of each line for each; `group` and `groups`
    count those as one.
    """

    rank: int
    world: int
    local_rank: int
    device: torch.device
    cores: int = 1
    shared: int = 1

    @property
    def group(self) -> int:
        return self.rank // self.shared

    @property
    def groups(self) -> int:
        return self.world // self.shared

    @property
    def lead(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            torch.distributed.barrier()


def wants_cuda() -> bool:
    """Whether ranks compute on CUDA; DS_ACCELERATOR=cpu asks for the CPU."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def start(*, verbose: bool = False) -> Ranks:
    """Join the process group that `deepspeed` or `torchrun` describes, or be the only rank under
    plain `python`."""
    cuda = wants_cuda()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rank, world, local_rank = _rank_numbers()
    cores = _cores_per_rank(world)
    # Oversubscribed cores slow all ranks.
    if not cuda and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(cores)
    _import_deepspeed(compile_muon=cuda, verbose=verbose)
    import deepspeed

    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=verbose)
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    return Ranks(rank, world, local_rank, device, cores)


def _rank_numbers() -> tuple[int, int, int]:
    """(rank, world, local rank) from the environment; ConfigError where only some are in it."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        # Plain python: what a launcher would have set for one rank.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    words = {name: os.environ.get(name, "(not set)") for name in names}
    rank, world, local_rank = [int(word) if word.isdecimal() else -1 for word in words.values()]
    if rank < 0 or local_rank < 0 or rank >= world:
        settings = ", ".join(f"{name}={word}" for name, word in words.items())
        raise ConfigError(
            f"{settings} in the environment: expected none of them, or 0 ≤ RANK < WORLD_SIZE of a "
            "launcher"
        )
    return rank, world, local_rank


def _cores_per_rank(world: int) -> int:
    """Cores that this rank may use: all that a launcher bound it to, else its share of the
    machine's."""
    machine = os.cpu_count()
    cores = machine or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    bound = cores != machine and os.environ.get("OMP_NUM_THREADS") == str(cores)
    if bound:
        return cores
    # torchrun's and DeepSpeed's names for the number of ranks of this machine.
    local_world = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world
    return max(1, cores // int(local_world))


def _import_deepspeed(*, compile_muon: bool, verbose: bool) -> None:
    """Import DeepSpeed so that it compiles nothing on the CPU, and logs only errors unless
    verbose."""
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        warnings.filterwarnings(
            "ignore", category=UserWarning, module=r"deepspeed|torch\.distributed"
        )
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    # Else the first run on the CPU compiles it, for a minute and more.
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not compile_muon:
        _import_muon_uncompiled()
    if not verbose:
        deepspeed.utils.logger.setLevel("ERROR")


def _import_muon_uncompiled() -> None:
    """Import Muon with an update that is not compiled: compiling takes longer than it saves on the
    CPU. DeepSpeed has no option for it."""
    from deepspeed.runtime import compiler

    decorator_factory = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = decorator_factory


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End a process that called `start`: exit handlers run and streams are flushed, Python's
    finalisation is skipped.

    There a thread of gloo may abort the process (https://github.com/pytorch/pytorch/issues/190489).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader of a pipe is gone, or the stream is closed. 120 is Python's own exit status
            # for a failed flush.
            if code == 0:
                code = 120
    os._exit(code)


def check_sequence(model: ZooModel, size: int) -> None:
    """ConfigError with the reason where `size` ranks cannot share the model's lines."""
    if size == 1:
        return
    reason = model.refuses_sequence(size)
    if reason:
        raise ConfigError(f"train.sequence_parallel={size}: {reason}; expected 1, or another model")


def sequence_group(size: int) -> SequenceGroup:
    """The `size` consecutive ranks that share their lines, this rank among them. Every rank must
    call.

    DeepSpeed's `mpu=` is not used: it takes groups for tensor parallelism, and records that in
    checkpoints.
    """
    from deepspeed.sequence.layer import _SeqAllToAll

    group, _ = torch.distributed.new_subgroups(size)

    def exchange(x: Tensor, cut: int, joined: int) -> Tensor:
        return _SeqAllToAll.apply(group, x, cut, joined, 0)

    return SequenceGroup(torch.distributed.get_rank(group), size, exchange)
