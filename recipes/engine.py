"""Ranks and the engine: start them, initialise DeepSpeed, step, save, resume, export.

The loop in train.py uses `start` and `create_engine` and never DeepSpeed itself; where it is not installed, `PlainEngine`
takes its place. This file works around, on a CPU: a shared-memory operator and an Adam that would be compiled on
first use, no gradient norm at stage 0 in fp32, a `latest` file written in place, and checkpoints that load only at the
number of ranks that wrote them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.checkpoints import COMPLETE, data_only, quarantine, seal
from recipes.config import ConfigError, Plan, has_deepspeed
from recipes.optim import create_optimizer, lr_factor
from zoo.files import file_digests, sync, sync_tree, write_json, write_text
from zoo.inputs import read_tensors
from zoo.layers import Attention
from zoo.model import ZooModel
from zoo.sequence import SequenceGroup

STATES = "mp_rank_00_model_states.pt"  # DeepSpeed's name


@dataclass(frozen=True)
class Ranks:
    """This process among all: rank 0 ≤ rank < world, the device it computes on, and how many consecutive ranks share samples,
    a part of each line for each. `group` and `groups` count those as one."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
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


def wants_cuda() -> bool:
    """Whether ranks compute on CUDA: where there is a device, unless DS_ACCELERATOR=cpu asks for the CPU."""
    return torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"


def start(*, verbose: bool = False) -> Ranks:
    """Join the process group that `deepspeed` or `torchrun` describes, or be the only rank under plain `python`."""
    cuda = wants_cuda()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" not in os.environ:  # plain python: what a launcher would have set
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        os.environ.update({key: str(value) for key, value in alone.items()})
    rank, world, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not cuda and "OMP_NUM_THREADS" not in os.environ:
        # Divide the cores among ranks; oversubscription slows all of them.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    if not verbose:
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        warnings.filterwarnings("ignore", category=UserWarning, module=r"deepspeed|torch\.distributed")
    if has_deepspeed():
        _start_deepspeed(cuda=cuda, verbose=verbose)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return Ranks(rank, world, local_rank, device)


def _start_deepspeed(*, cuda: bool, verbose: bool) -> None:
    hides_mlflow = "mlflow" not in sys.modules
    if hides_mlflow:  # DeepSpeed's autotuner would import it, which takes seconds
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
    finally:
        if hides_mlflow:
            del sys.modules["mlflow"]
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # or the first CPU run compiles it, for a minute and more
    if not cuda:  # nor does it compile Muon's update, which takes longer than it saves
        from deepspeed.runtime import compiler

        with patch.object(compiler, "compile", lambda: compiler.dummy_decorator):
            import deepspeed.runtime.zero.muon.muon_optimizer
    if not verbose:
        deepspeed.utils.logger.setLevel("ERROR")
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("nccl" if cuda else "gloo", verbose=verbose)


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process with `code`: exit handlers run and streams are flushed, Python's finalisation is skipped.

    For scripts that called `start`. A thread of gloo may still drop tensors of a finished collective, for which it takes the
    interpreter's lock; once Python finalises, such a thread aborts the process
    (https://github.com/pytorch/pytorch/issues/190489), and a finished run would count as failed, now and then.
    """
    atexit._run_exitfuncs()  # data loader workers, logging: prints what one of them raises
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader of a pipe is gone, or the stream is closed
            code = code or 120  # Python's own exit status for a failed flush
    os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ------------------------------------------------------------------------------------- ranks that share lines


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


# ------------------------------------------------------------------------------------- average of the weights


class WeightAverage:
    """a ← d·a + (1 − d)·w after every step, d = min(decay, (1 + t)/(10 + t)) at step t: short runs forget their start too.

    Every rank keeps the whole average, in float32, so it serves ZeRO stages 0 to 2, whose ranks hold all weights. torch's
    AveragedModel would keep it in the model's dtype, where bf16 loses a step of 1 − d = 1e−4.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        weights = [p.detach().float() for p in model.parameters()]
        torch._foreach_lerp_(list(self.average.values()), weights, 1 - decay)

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """The model with the averaged weights, for a `with` block."""
        trained = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._copy(model, self.average)
        try:
            yield
        finally:
            self._copy(model, trained)

    @staticmethod
    @torch.no_grad()
    def _copy(model: nn.Module, values: dict[str, Tensor]) -> None:
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])

    def save(self, folder: Path) -> None:
        save_file({k: v.contiguous() for k, v in self.average.items()}, folder / self.FILE, metadata={"format": "pt"})

    def load(self, folder: Path, *, steps: int) -> None:
        """The average as `save` left it after `steps` steps."""
        if not (folder / self.FILE).is_file():
            raise ConfigError(f"{folder} was written without train.ema: resume with --set train.ema=0, or start anew")
        stored = read_tensors(folder / self.FILE)
        for name, value in self.average.items():
            value.copy_(stored[name])
        self.steps = steps


# ------------------------------------------------------------------------------------------------- the engine


class Engine:
    """A model under DeepSpeed. Call it like the model; `backward` and `step` once per micro-batch, in this order."""

    def __init__(self, model: ZooModel, plan: Plan, ranks: Ranks, *, universal: bool = False):
        self.plan, self.ranks = plan, ranks
        optim, steps = plan.recipe.optim, plan.recipe.train.steps
        model = model.to(ranks.device)
        if ranks.shared > 1:
            model.sequence = sequence_group(ranks.shared)
        optimizer = create_optimizer(model, optim)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, optim, steps))
        self._prepare(model, optimizer, self._schedule, universal=universal)
        self.average = WeightAverage(self.model, plan.recipe.train.ema) if plan.recipe.train.ema else None

    def _prepare(
        self,
        model: ZooModel,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        *,
        universal: bool,
    ) -> None:
        import deepspeed

        plan = self.plan
        config = dict(plan.deepspeed)
        if universal:
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        self._decay = [group["weight_decay"] for group in optimizer.param_groups]
        if plan.recipe.train.zero_stage == 3 and any(isinstance(m, Attention) for m in model.modules()):
            # A prior returns terms and no tensor, so DeepSpeed cannot tell when backward needs its parameters again.
            # An attention layer returns one: it gathers its own and its prior's together.
            deepspeed.utils.set_z3_leaf_modules(model, [Attention])
        self._deepspeed, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=config, dist_init_required=False
        )
        if plan.recipe.train.precision == "bf16" and plan.recipe.train.zero_stage == 0:
            # To allocate Adam's moments DeepSpeed took a step with zero gradients: undo its decay and its count.
            self._deepspeed.optimizer.refresh_fp32_params()
            self._deepspeed.optimizer.optimizer.state.clear()

    @property
    def model(self) -> ZooModel:
        """The model itself, for its methods. Under ZeRO-3 its parameters are gathered only inside a forward."""
        return self._deepspeed.module

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._deepspeed.optimizer.param_groups

    @property
    def lr(self) -> float:
        return self.param_groups[0]["lr"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._deepspeed(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:  # a loss function may read model.config
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def train(self, mode: bool = True) -> None:
        self._deepspeed.train(mode)

    def backward(self, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients; averaged over micro-batches and ranks when the last one is in."""
        self._deepspeed.backward(loss)

    def step(self) -> float | None:
        """End a micro-batch. After the step's last one: clip, update, and return the norm before clipping.

        0 where float16 overflowed: DeepSpeed then lowers the loss scale and leaves the step out.
        """
        last = self._deepspeed.is_gradient_accumulation_boundary()
        norm = self._own_norm() if last else None
        self._deepspeed.step()
        if not last:
            return None
        if self.average is not None:
            self.average.update(self.model)
        if self.plan.recipe.train.precision == "fp16" and self._deepspeed.optimizer.overflow:
            return 0.0
        if norm is None:
            norm = self._deepspeed.get_global_grad_norm()
        # DeepSpeed's sign of a norm that is not finite is −1.
        return float("nan") if norm is None or norm < 0 else float(norm)

    @property
    def knows_gradients(self) -> bool:
        """Whether the norm that `step` returns is of the gradients. From ZeRO stage 1 on DeepSpeed puts Muon's orthogonal
        updates in their place before it takes the norm."""
        return self.plan.recipe.optim.name != "muon" or not self.plan.recipe.train.zero_stage

    def _own_norm(self) -> torch.Tensor | None:
        # At stage 0 in fp32 DeepSpeed keeps none, and every rank holds the whole averaged gradient at this point.
        if self.plan.recipe.train.zero_stage > 0 or self.plan.recipe.train.precision != "fp32":
            return None
        return torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights where `train.ema` keeps them, else as it is: what is evaluated and exported."""
        if self.average is None:
            yield
        else:
            with self.average.in_place(self.model):
                yield

    def sum(self, *values: float | torch.Tensor) -> list[float]:
        """Each value summed over the ranks, in float64."""
        total = torch.stack([torch.as_tensor(v, device=self.ranks.device).detach().double() for v in values])
        if self.ranks.world > 1:
            torch.distributed.all_reduce(total)
        return total.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in rank order; one value where all are equal."""
        values = [value] * self.ranks.world
        if self.ranks.world > 1:
            torch.distributed.all_gather_object(values, value)
        return values[:1] if all(v == values[0] for v in values) else values

    def gather_groups(self, value: Any) -> list[Any]:
        """The value of each group of ranks that share samples, of its first rank; one value where all are equal."""
        return self.gather(value)[:: self.ranks.shared]

    def barrier(self) -> None:
        if self.ranks.world > 1:
            torch.distributed.barrier()

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write a checkpoint as `folder`, with the loop's `state` (step, data position) and a safetensors `model/`.

        All of it goes to `folder.partial` first. It gets its name when it is complete, has the digests of its files, and is on
        the disk; then `latest` beside it is replaced. The folder must be seen by every rank (several machines: a shared file
        system).

        Raises:
            OSError: where it cannot be written, with the room that is left. Nothing of it stays.
        """
        partial = folder.with_name(folder.name + ".partial")
        try:
            self._save(folder, partial, state)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' writers have their own
            if self.ranks.lead:
                shutil.rmtree(partial, ignore_errors=True)
            reason, free = str(error).strip().partition("\n")[0], shutil.disk_usage(folder.parent).free
            raise OSError(
                f"the checkpoint of step {state['step']} could not be written to {folder}: {reason}. {free / 1e6:,.1f} MB are "
                "free"
            ) from error

    def _save(self, folder: Path, partial: Path, state: dict[str, Any]) -> None:
        if self.ranks.lead:
            shutil.rmtree(partial, ignore_errors=True)
        self.barrier()
        self._write(partial, state)
        self.export(partial / "model")
        if self.average is not None and self.ranks.lead:
            self.average.save(partial)
        self.barrier()
        if self.ranks.local_rank == 0:  # each machine flushes what its ranks wrote
            sync_tree(partial)
        # The lead's listing, of which every rank reads its share.
        names = self.gather(sorted(str(path.relative_to(partial)) for path in partial.rglob("*") if path.is_file()))[0]
        digests = {
            name: facts
            for share in self.gather(file_digests(partial, names[self.ranks.rank :: self.ranks.world]))
            for name, facts in share.items()
        }
        if self.ranks.lead:
            train = self.plan.recipe.train
            facts = {"step": state["step"], "world": self.ranks.world, "zero_stage": train.zero_stage}
            write_json(partial / COMPLETE, seal({**facts, "precision": train.precision, "files": digests}))
            if folder.exists():  # the same step again, after a resume from an older one
                quarantine(folder)
            os.replace(partial, folder)
            sync(folder.parent)
            write_text(folder.parent / "latest", folder.name)
        self.barrier()

    def load(self, folder: Path) -> dict[str, Any]:
        """Model, optimiser and schedule from a checkpoint made by `save`; returns the loop's state."""
        with data_only(folder):
            state = self._read(folder)
        # Rates come back as the checkpoint has them, of its own number of steps; here there may be more.
        schedule = self._schedule
        for group, base, factor in zip(self.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * factor(schedule.last_epoch)
        if self.average is not None:
            # A universal checkpoint is a converted copy; the average stays in the one it was made from.
            self.average.load(folder.with_name(folder.name.removesuffix(".universal")), steps=state["step"])
        return state

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        client = {"priorzoo": state}
        self._deepspeed.save_checkpoint(str(folder.parent), tag=folder.name, client_state=client, save_latest=False)

    def _read(self, folder: Path) -> dict[str, Any]:
        path, state = self._deepspeed.load_checkpoint(str(folder.parent), tag=folder.name)
        if path is None or "priorzoo" not in state:
            raise ConfigError(f"DeepSpeed could not load {folder}; is it complete?")
        # A universal checkpoint at ZeRO-3 comes back with the first group's weight decay in every group.
        for group, decay in zip(self.param_groups, self._decay, strict=True):
            group["weight_decay"] = decay
        return state["priorzoo"]

    def exported_model(self) -> ZooModel | None:
        """A separate model with what `export` would write, on rank 0's device; None elsewhere. Every rank must call."""
        found: list[dict[str, torch.Tensor]] = []
        self._export(
            lambda state: found.append({k: v.clone() for k, v in self.model.storable_state(state=state).items()})
        )
        if not found:
            return None
        model = type(self.model)(self.model.config)
        model.load_state_dict(found[0])
        return model.to(self.ranks.device).eval()

    def export_final(self, folder: Path) -> None:
        """`export` to a folder that appears whole; an older one of the same name is replaced."""
        partial = folder.with_name(folder.name + ".partial")
        try:
            self.export(partial)
        except OSError:
            if self.ranks.lead:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if self.ranks.lead:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
            sync(folder.parent)
        self.barrier()

    def export(self, folder: Path) -> None:
        """`model.save_pretrained(folder)` by rank 0: the averaged weights where they are kept, else the optimiser's float32
        ones, with ZeRO-3's parameters gathered."""
        self._export(lambda state: self.model.save_pretrained(folder, state=state))

    def _export(self, write: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Call `write` on rank 0 with the tensors that replace the model's own, while ZeRO-3's parameters are gathered."""
        masters = self._masters() if self.average is None else self.average.average
        gathered = nullcontext()
        if self.plan.recipe.train.zero_stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(self.model.parameters()))
        with gathered:
            if self.ranks.lead:
                # Frozen parameters have no float32 copy; converting them to float32 is exact.
                frozen = {n: p.detach().float() for n, p in self.model.named_parameters() if not p.requires_grad}
                write({**frozen, **masters})

    def _masters(self) -> dict[str, torch.Tensor]:
        """The optimiser's float32 copies by parameter name, on rank 0; every rank must call. Empty where it has none."""
        if self.plan.recipe.train.precision == "fp32":
            return {}
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        optimizer = self._deepspeed.optimizer
        if self.plan.recipe.train.zero_stage == 0:
            groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
            copies = {id(p): copy for ours, theirs in groups for p, copy in zip(ours, theirs, strict=True)}
            return {name: copies[id(p)].detach() for name, p in named}
        from deepspeed.utils import safe_get_full_fp32_param

        found = {}
        for name, p in named:  # one at a time: only rank 0 keeps it, and not on the GPU
            whole = safe_get_full_fp32_param(p)
            if self.ranks.lead:
                found[name] = whole.detach().cpu()
        return found


class PlainEngine(Engine):
    """`Engine` of plain torch, for one rank at stage 0 in fp32 or bf16: the losses and weights of DeepSpeed's.

    In float32 they are equal to the bit, but for Muon (`recipes.optim`). In bfloat16 it keeps float32 weights, as
    in DeepSpeed's optimiser, which rounds otherwise where it clips. Checkpoints have the form of DeepSpeed's at stage 0: either
    engine continues the other's.
    """

    def _prepare(
        self,
        model: ZooModel,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        **_: bool,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._steps, self._micro = 0, 0
        self._groups: list[list[torch.nn.Parameter]] = []  # in bf16: what the model computes with, group by group
        if self.plan.recipe.train.precision == "bf16":
            model.bfloat16()
            for group in optimizer.param_groups:
                self._groups.append(group["params"])
                group["params"] = [p.detach().clone().float().requires_grad_() for p in group["params"]]

    @property
    def model(self) -> ZooModel:
        return self._model

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self._model.train(mode)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / (self.plan.recipe.train.accumulation or 1)).backward()

    def step(self) -> float | None:
        train = self.plan.recipe.train
        self._micro += 1
        if self._micro % (train.accumulation or 1):
            return None
        for copy, parameter in self._copies():
            copy.grad = torch.zeros_like(copy) if parameter.grad is None else parameter.grad.float()
        copies = {id(parameter): copy for copy, parameter in self._copies()}
        trained = [p for p in (copies.get(id(p), p) for p in self._model.parameters()) if p.grad is not None]
        norms = [p.grad.norm() for p in trained if p.grad is not None]
        norm = torch.stack(norms).pow(2).sum().pow(0.5)  # in DeepSpeed's order of operations
        if train.clip:
            torch.nn.utils.clip_grads_with_norm_(trained, train.clip, norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for copy, parameter in self._copies():
                parameter.copy_(copy)
        self._model.zero_grad()
        self._schedule.step()
        self._steps += 1
        if self.average is not None:
            self.average.update(self._model)
        return float(norm)

    def _copies(self) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        """(float32 copy, parameter) of all that is trained in bf16."""
        pairs = zip(self._optimizer.param_groups, self._groups, strict=False)  # no groups in fp32
        return [pair for group, own in pairs for pair in zip(group["params"], own, strict=True)]

    def _masters(self) -> dict[str, torch.Tensor]:
        copies = {id(parameter): copy.detach() for copy, parameter in self._copies()}
        return {name: copies[id(p)] for name, p in self._model.named_parameters() if id(p) in copies}

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        optimizer: dict[str, Any] = self._optimizer.state_dict()
        if self._groups:
            copies = [group["params"] for group in self._optimizer.param_groups]
            scale = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": self._steps}
            optimizer = {**scale, "optimizer_state_dict": optimizer, "fp32_groups": copies}
        counts = {"global_steps": self._steps, "skipped_steps": 0, "dp_world_size": 1, "mp_world_size": 1}
        states = {
            "module": self._model.state_dict(),
            "optimizer": optimizer,
            "lr_scheduler": self._schedule.state_dict(),
        }
        folder.mkdir(parents=True)
        torch.save({**states, **counts, "priorzoo": state}, folder / STATES)

    def _read(self, folder: Path) -> dict[str, Any]:
        stored = torch.load(folder / STATES, map_location=self.ranks.device, weights_only=True)
        self._model.load_state_dict(stored["module"])
        optimizer = stored["optimizer"]
        with torch.no_grad():
            for group, copies in zip(self._optimizer.param_groups, optimizer.get("fp32_groups", ()), strict=False):
                for ours, theirs in zip(group["params"], copies, strict=True):
                    ours.copy_(theirs)
        self._optimizer.load_state_dict(optimizer.get("optimizer_state_dict", optimizer))
        self._schedule.load_state_dict(stored["lr_scheduler"])
        self._steps = stored["global_steps"]
        return stored["priorzoo"]


def create_engine(model: ZooModel, plan: Plan, ranks: Ranks, *, universal: bool = False) -> Engine:
    """DeepSpeed's engine where it is installed, else that of plain torch."""
    if has_deepspeed():
        return Engine(model, plan, ranks, universal=universal)
    return PlainEngine(model, plan, ranks)
