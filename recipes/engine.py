"""Ranks and the engine: start, step, save, resume and export with DeepSpeed; optimisers and rates.

train.py never uses DeepSpeed itself.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.checkpoints import data_only, quarantine, seal
from recipes.commands import ConfigError
from recipes.plan import Plan
from recipes.recipe import Json, Optim
from zoo.files import read_tensors, replacing_path, sync, sync_tree, write_text
from zoo.layers import Attention
from zoo.model import ZooModel

if TYPE_CHECKING:
    from zoo.sequence import SequenceGroup

T = TypeVar("T")


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

    from zoo.sequence import SequenceGroup

    group, _ = torch.distributed.new_subgroups(size)

    def exchange(x: Tensor, cut: int, joined: int) -> Tensor:
        return _SeqAllToAll.apply(group, x, cut, joined, 0)

    return SequenceGroup(torch.distributed.get_rank(group), size, exchange)


class Engine:
    """A model under DeepSpeed. Call it like the model; `backward` and `step` once per micro-batch,
    in this order."""

    def __init__(self, model: ZooModel, plan: Plan, ranks: Ranks, *, universal: bool = False):
        import deepspeed

        self.plan = plan
        self.ranks = ranks
        self.settings = plan.recipe.train
        optim = plan.recipe.optim
        steps = self.settings.steps
        model = model.to(ranks.device)
        if ranks.shared > 1:
            model.sequence = sequence_group(ranks.shared)
        optimizer = create_optimizer(model, optim)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: lr_factor(step, optim, steps),
        )
        config = dict(plan.deepspeed)
        if universal:
            config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": True}
        self._weight_decays = [group["weight_decay"] for group in optimizer.param_groups]
        has_attention = any(isinstance(module, Attention) for module in model.modules())
        if self.settings.zero_stage == 3 and has_attention:
            # A prior returns terms and no tensor, so DeepSpeed cannot tell when backward needs its
            # parameters again. An attention layer returns a tensor: it gathers its own parameters
            # and its prior's together.
            deepspeed.utils.set_z3_leaf_modules(model, [Attention])
        self._deepspeed, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            lr_scheduler=self._schedule,
            config=config,
            dist_init_required=False,
        )
        if self.settings.compile:
            self._deepspeed.compile()
        self.average: WeightAverage | None = None
        if self.settings.ema:
            self.average = WeightAverage(self.model, self.settings.ema)

    @property
    def model(self) -> ZooModel:
        """The model itself, for its methods. Under ZeRO-3 its parameters are gathered only inside a
        forward."""
        return self._deepspeed.module

    @property
    def lr(self) -> float:
        return self._deepspeed.optimizer.param_groups[0]["lr"]

    def __call__(self, *inputs: object, **options: object) -> object:
        return self._deepspeed(*inputs, **options)

    def __getattr__(self, name: str) -> object:
        """The model's attribute: a loss function may read `model.config`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.model, name)

    def train(self, mode: bool = True) -> None:
        self._deepspeed.train(mode)

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients; they are averaged over micro-batches and ranks after
        the last one."""
        self._deepspeed.backward(loss)

    def step(self) -> Tensor:
        """End a micro-batch. The step's last one clips, updates, and returns the norm before
        clipping, on the device.

        The other ones return 0, and so does a step that DeepSpeed leaves out since float16
        overflowed. A norm that is not finite is NaN.
        """
        last = self._deepspeed.is_gradient_accumulation_boundary()
        norm = None
        if last and self.settings.zero_stage == 0:
            # Here DeepSpeed keeps no norm, and every rank holds the whole averaged gradient.
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        self._deepspeed.step()
        if not last:
            return self._number(0.0)
        if self.average is not None:
            self.average.update(self.model)
        if self.settings.precision == "fp16" and self._deepspeed.optimizer.overflow:
            return self._number(0.0)
        if norm is None:
            norm = self._deepspeed.get_global_grad_norm()
        # DeepSpeed's sign of a norm that is not finite is −1.
        norm = self._number(-1.0 if norm is None else norm)
        return norm.masked_fill(norm < 0, math.nan)

    @property
    def knows_gradients(self) -> bool:
        """Whether the norm that `step` returns is of the gradients; from ZeRO stage 1 on it is of
        Muon's updates."""
        return self.plan.recipe.optim.name != "muon" or not self.settings.zero_stage

    def monitor(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers of a step to the monitors that a DeepSpeed file enables: TensorBoard, W&B,
        CSV, Comet."""
        if self._deepspeed.monitor.enabled:
            events = [(name, value, step) for name, value in values.items()]
            self._deepspeed.monitor.write_events(events)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights where `train.ema` keeps them, else as it is."""
        if self.average is None:
            yield
            return
        with self.average.in_place(self.model):
            yield

    # ---- between ranks

    def sum(self, *values: float | Tensor) -> Tensor:
        """Each value summed over the ranks, (n,) float64 on the device, which nothing waits for."""
        total = torch.stack([self._number(value) for value in values])
        if self.ranks.world > 1:
            torch.distributed.all_reduce(total)
        return total

    def _number(self, value: float | Tensor) -> Tensor:
        """() float64 on the device. A number is filled in there: copying one from the host would
        wait for the device."""
        device = self.ranks.device
        if isinstance(value, Tensor):
            return value.detach().to(device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=device)

    def gather(self, value: T) -> list[T]:
        """Each rank's value, in rank order; one value where all are equal."""
        values = [value] * self.ranks.world
        if self.ranks.world > 1:
            torch.distributed.all_gather_object(values, value)
        all_equal = all(other == values[0] for other in values)
        return values[:1] if all_equal else values

    def held_bytes(self) -> int:
        """Bytes of the weights and of the optimiser's own copies of them."""
        tensors = list(self.model.parameters())
        for group in self._deepspeed.optimizer.param_groups:
            tensors += group["params"]
        storages = [tensor.untyped_storage() for tensor in tensors]
        # Tensors may share a storage, which counts once.
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(sizes.values())

    # ---- checkpoints

    def save(self, folder: Path, state: Json) -> None:
        """Write a checkpoint as `folder`, with the loop's `state` (step, data position) and a
        safetensors `model/`.

        All of it goes to `folder.partial` first. It gets its name when it is complete, has the
        digests of its files, and is on the disk; then `latest` next to it is replaced. OSError
        where it cannot be written; nothing of it stays then.
        """
        partial = folder.with_name(folder.name + ".partial")
        ranks = self.ranks
        try:
            if ranks.lead:
                shutil.rmtree(partial, ignore_errors=True)
            ranks.barrier()
            self._write_checkpoint(partial, state)
            ranks.barrier()
            # Each machine flushes what its ranks wrote.
            if ranks.local_rank == 0:
                sync_tree(partial)
            ranks.barrier()
            if ranks.lead:
                self._publish_checkpoint(partial, folder, state["step"])
            ranks.barrier()
        # torch's writers raise RuntimeError, and safetensors' writer an error of its own.
        except (OSError, RuntimeError, SafetensorError) as error:
            if ranks.lead:
                shutil.rmtree(partial, ignore_errors=True)
            reason = str(error).strip().partition("\n")[0]
            free = shutil.disk_usage(folder.parent).free / 1e6
            raise OSError(
                f"the checkpoint of step {state['step']} could not be written to {folder}: "
                f"{reason}. {free:,.1f} MB are free"
            ) from error

    def _write_checkpoint(self, partial: Path, state: Json) -> None:
        self._deepspeed.save_checkpoint(
            str(partial.parent),
            tag=partial.name,
            client_state={"priorzoo": state},
            save_latest=False,
        )
        self.export(partial / "model")
        if self.average is not None and self.ranks.lead:
            self.average.save(partial)

    def _publish_checkpoint(self, partial: Path, folder: Path, step: int) -> None:
        """Give a complete checkpoint its digests, then its name, then point `latest` to it."""
        facts = {
            "step": step,
            "world": self.ranks.world,
            "zero_stage": self.settings.zero_stage,
            "precision": self.settings.precision,
        }
        seal(partial, facts)
        # The same step exists after a resume from an older checkpoint.
        if folder.exists():
            quarantine(folder)
        os.replace(partial, folder)
        sync(folder.parent)
        # The name of the folder of checkpoints is stored in the run's folder.
        sync(folder.parent.parent)
        write_text(folder.parent / "latest", folder.name)

    def load(self, checkpoint: Path, folder: Path) -> Json:
        """Restore what `save` wrote as `checkpoint`; returns the loop's state.

        folder: the checkpoint, or its universal form.
        """
        with data_only(folder), tempfile.TemporaryDirectory() as scratch:
            # DeepSpeed reads a path as a pattern, with brackets for example; this one has none.
            link = Path(scratch, "checkpoints")
            link.symlink_to(folder.parent.resolve())
            path, state = self._deepspeed.load_checkpoint(str(link), tag=folder.name)
        if path is None or "priorzoo" not in state:
            raise ConfigError(f"DeepSpeed could not load {folder}; is it complete?")
        loop_state: Json = state["priorzoo"]
        self._restore_groups()
        if self.average is not None:
            self.average.load(checkpoint, steps=loop_state["step"])
        return loop_state

    def _restore_groups(self) -> None:
        """Give the optimiser's groups this run's weight decay and rates after a checkpoint is
        loaded."""
        schedule = self._schedule
        groups = self._deepspeed.optimizer.param_groups
        for n, group in enumerate(groups):
            # A universal checkpoint at ZeRO-3 comes back with the first group's weight decay in
            # every group.
            group["weight_decay"] = self._weight_decays[n]
            # Rates come back as the checkpoint has them, of its own number of steps. This run may
            # have more.
            factor = schedule.lr_lambdas[n]
            group["lr"] = schedule.base_lrs[n] * factor(schedule.last_epoch)

    # ---- weights

    def export(self, folder: Path) -> None:
        """`model.save_pretrained(folder)` by rank 0: averaged weights where they exist, else the
        optimiser's float32 ones."""
        self._with_weights(lambda state: self.model.save_pretrained(folder, state=state))

    def export_final(self, folder: Path) -> None:
        """`export` to a folder that appears whole; an older one, or the one that a link names, is
        replaced."""
        folder = folder.resolve()
        partial = folder.with_name(folder.name + ".partial")
        old = folder.with_name(folder.name + ".old")
        if self.ranks.lead:
            # A process that was stopped may have left them.
            for path in (partial, old):
                shutil.rmtree(path, ignore_errors=True)
        self.export(partial)
        if self.ranks.lead:
            if folder.exists():
                os.replace(folder, old)
            os.replace(partial, folder)
            sync(folder.parent)
            shutil.rmtree(old, ignore_errors=True)
        self.ranks.barrier()

    def exported_model(self) -> ZooModel | None:
        """A separate model with what `export` would write, on rank 0's device; None elsewhere.
        Every rank must call."""
        weights: dict[str, Tensor] = {}

        def copy(state: dict[str, Tensor]) -> None:
            for name, value in self.model.storable_state(state=state).items():
                weights[name] = value.clone()

        self._with_weights(copy)
        if not weights:
            return None
        model = type(self.model)(self.model.config)
        model.load_state_dict(weights)
        return model.to(self.ranks.device).eval()

    def _with_weights(self, use: Callable[[dict[str, Tensor]], object]) -> None:
        """Call `use` on rank 0 with the tensors that replace the model's own, while ZeRO-3's
        parameters are gathered."""
        if self.average is None:
            weights = self._masters()
        else:
            weights = self.average.average
        gathered = nullcontext()
        if self.settings.zero_stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(self.model.parameters()))
        with gathered:
            if self.ranks.lead:
                # Frozen parameters have no float32 copy; converting them to float32 is exact.
                frozen = {}
                for name, parameter in self.model.named_parameters():
                    if not parameter.requires_grad:
                        frozen[name] = parameter.detach().float()
                use(frozen | weights)

    def _masters(self) -> dict[str, Tensor]:
        """The optimiser's float32 copies by parameter name, on rank 0's host; empty where it has
        none. Every rank must call."""
        if self.settings.precision == "fp32":
            return {}
        from deepspeed.utils import safe_get_full_fp32_param

        masters = {}
        # One at a time, since the whole may not fit on the GPU.
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                whole = safe_get_full_fp32_param(parameter)
                if self.ranks.lead:
                    masters[name] = whole.detach().cpu()
        return masters


# -------------------------------------------------------------------------------------------
# optimiser and average


def parameter_groups(model: ZooModel, optim: Optim) -> list[Json]:
    """Optimiser groups: matrices with weight decay; `model.no_weight_decay()` and parameters of
    fewer dimensions without it.

    `model.prior_parameters()` learn at `optim.prior_lr_scale` times the rate: under Adam a
    parameter moves by about its rate a step, too little for an exponent in a short run. Muon trains
    the matrices of the layers, at `optim.muon_lr_scale` times the rate: its updates have singular
    values near 1 (https://kellerjordan.github.io/posts/muon/).

    | parameters | rate | weight decay |
    |---|---|---|
    | matrices, such as the embedding | lr | weight_decay |
    | norms, biases and other exempt ones | lr | 0 |
    | of priors, and SSMax's s | lr · prior_lr_scale | 0 |
    | the layers' matrices, by Muon | lr · muon_lr_scale | weight_decay / muon_lr_scale |
    """
    exempt = model.no_weight_decay()
    priors = model.prior_parameters() if optim.prior_lr_scale != 1 else set()
    muon = optim.name == "muon"
    matrices: Json = {"params": [], "weight_decay": optim.weight_decay}
    vectors: Json = {"params": [], "weight_decay": 0.0}
    prior_group: Json = {
        "params": [],
        "weight_decay": 0.0,
        "lr": optim.lr * optim.prior_lr_scale,
    }
    muon_group: Json = {
        "params": [],
        "weight_decay": optim.weight_decay / optim.muon_lr_scale,
        "lr": optim.lr * optim.muon_lr_scale,
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.ndim >= 2 and name not in exempt
        in_layer = parameter.ndim == 2 and name.startswith("layers.")
        if muon and is_matrix and in_layer:
            group = muon_group
        elif name in priors:
            group = prior_group
        elif is_matrix:
            group = matrices
        else:
            group = vectors
        group["params"].append(parameter)
        if muon:
            # DeepSpeed asks every parameter.
            parameter.use_muon = group is muon_group  # type: ignore[attr-defined]
    # DeepSpeed sorts Muon's matrices alike.
    muon_group["params"].sort(key=lambda p: p.shape, reverse=True)
    # Their order is part of every checkpoint.
    groups = [matrices, vectors, prior_group, muon_group]
    if muon:
        for group in groups:
            group["use_muon"] = group is muon_group
    return [group for group in groups if group["params"]]


def create_optimizer(model: ZooModel, optim: Optim) -> torch.optim.Optimizer:
    """AdamW, RAdam or Muon, all with decoupled weight decay, on `parameter_groups`."""
    groups = parameter_groups(model, optim)
    adam: Json = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if optim.name == "muon":
        from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

        return MuonWithAuxAdam([group if group["use_muon"] else adam | group for group in groups])
    if optim.name == "adamw":
        return torch.optim.AdamW(groups, **adam, fused=True)
    return torch.optim.RAdam(groups, **adam, decoupled_weight_decay=True)


def lr_factor(step: int, optim: Optim, steps: int) -> float:
    """Learning rate of step `step` (from 0) as a fraction of `optim.lr`."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    if optim.schedule == "constant":
        return 1.0
    # 0 at warm-up's end and 1 at the last step.
    progress = min(1.0, (step - optim.warmup) / max(1, steps - 1 - optim.warmup))
    if optim.schedule == "linear":
        return optim.floor + (1 - optim.floor) * (1 - progress)
    return optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * progress))


class WeightAverage:
    """a ← d·a + (1 − d)·w after every step, d = min(decay, (1 + t)/(10 + t)) at step t: short runs
    forget their start too.

    In float32: torch's AveragedModel has the model's dtype, and bf16 loses a step of 1 − d = 1e−4.
    """

    FILE = "ema.safetensors"

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.average = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        averages = list(self.average.values())
        weights = [p.detach().float() for p in model.parameters()]
        torch._foreach_lerp_(averages, weights, 1 - decay)

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
        tensors = {name: value.contiguous() for name, value in self.average.items()}
        with replacing_path(folder / self.FILE) as path:
            save_file(tensors, path, metadata={"format": "pt"})

    def load(self, folder: Path, *, steps: int) -> None:
        if not (folder / self.FILE).is_file():
            raise ConfigError(
                f"{folder} was written without train.ema: resume with --set train.ema=0, "
                "or start anew"
            )
        stored = read_tensors(folder / self.FILE)
        for name, value in self.average.items():
            value.copy_(stored[name])
        self.steps = steps
