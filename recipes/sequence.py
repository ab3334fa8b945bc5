"""The ranks that share lines of tokens, with DeepSpeed's all-to-all exchange."""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.config import ConfigError
from zoo.model import ZooModel
from zoo.sequence import SequenceGroup


def check_sequence(model: ZooModel, size: int) -> None:
    """ConfigError with the reason where `size` ranks cannot share the model's lines."""
    if size > 1 and (reason := model.refuses_sequence(size)):
        raise ConfigError(f"train.sequence_parallel={size}: {reason}; expected 1, or another model")


def sequence_group(size: int) -> SequenceGroup:
    """The `size` consecutive ranks of the process group that share their lines, this rank among them. Every rank must call.

    ZeRO cuts its states up among all ranks and averages gradients over all, as without groups. DeepSpeed's `mpu=`, with groups
    made once for a process, is not used: it takes them for tensor parallelism, and records that in checkpoints.
    """
    from deepspeed.sequence.layer import _SeqAllToAll

    group, _ = torch.distributed.new_subgroups(size)

    def exchange(x: Tensor, cut: int, joined: int) -> Tensor:
        return _SeqAllToAll.apply(group, x, cut, joined, 0)

    return SequenceGroup(torch.distributed.get_rank(group), size, exchange)
