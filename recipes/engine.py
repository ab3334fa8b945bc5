"""The engine: step, save, resume and export with DeepSpeed.

train.py never uses DeepSpeed itself.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from recipes.checkpoints import data_only, quarantine, seal
from recipes.commands import ConfigError
from recipes.optim import WeightAverage, create_optimizer, lr_factor
from recipes.plan import Plan
from recipes.ranks import Ranks, sequence_group
from recipes.recipe import Json
from zoo.files import sync, sync_tree, write_text
from zoo.layers import Attention
from zoo.model import ZooModel

T = TypeVar("T")


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
