"""What a training step of a text model takes with one position method and another: tokens/s, MFU and peak memory."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from modalities.cost import Meter, device_name
from modalities.decoder import causal_lm_loss
from modalities.text import CausalLM, TextDataConfig
from modalities.text.model import SIZES
from recipes.config import Model, Optim, Recipe, Train, resolve
from tools.benches import harness
from tools.benches.harness import Cell, Column, Row, Settings, option
from zoo import create_model, list_models

DEFAULTS = {"cuda": ("125m", "2048,16384", 32768), "cpu": ("tiny", "128", 512)}  # model, contexts, tokens a step
SECONDS = 8.0
CLIP = 1.0


@dataclass(frozen=True)
class TrainingSettings(Settings):
    device: Annotated[str, option("auto, cuda or cpu")] = "auto"
    model: Annotated[str, option("default 125m on CUDA, tiny on the CPU")] = ""
    methods: Annotated[str, option("comma-separated; ratios are to the first")] = "rope,alibi,goat,ggd_ssmax"
    lengths: Annotated[
        str, typer.Option("--lengths", "--contexts", help="tokens a row; default 2048,16384 on CUDA")
    ] = ""
    tokens: Annotated[int, option("tokens a step; default 32768 on CUDA")] = 0
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile the model")] = False
    engine: Annotated[str, option("auto, deepspeed or torch")] = "auto"
    datasheet_tflops: Annotated[float | None, option("a second ceiling, from a datasheet")] = None


class EngineStep:
    """A step by recipes.engine: DeepSpeed as `recipes/train.py` runs it."""

    def __init__(self, model: CausalLM, batch: int, ranks: Any) -> None:
        from recipes.engine import Engine

        cuda = ranks.device.type == "cuda"
        train = Train(steps=10**6, batch=batch, micro_batch=batch, zero_stage=int(cuda), clip=CLIP)
        recipe = Recipe("bench", "text", Model("bench"), TextDataConfig(), Optim(), train)
        self.engine = Engine(model, resolve(recipe, world=1, device=ranks.device.type), ranks)
        self.engine.train()

    def __call__(self, batch: dict[str, torch.Tensor]) -> float:
        loss, _ = causal_lm_loss(self.engine, batch)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


class TorchStep:
    """A step without DeepSpeed."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self.model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=Optim().lr, betas=Optim().betas, fused=True)

    def __call__(self, batch: dict[str, torch.Tensor]) -> float:
        loss, _ = causal_lm_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def flops_per_token(model: CausalLM, context: int) -> float:
    """F of `Training`'s docstring, from the model's own linear layers and its output matrix."""
    matrices = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    config = model.config
    return 6.0 * (matrices + config.vocab_size * config.dim) + 6.0 * config.num_layers * config.dim * (context + 1)


class Training(harness.Benchmark):
    """Training steps of a text model, one position method beside another: tokens/s, MFU, peak memory.

    A step is forward, loss, backward, gradient clipping and the optimiser, through the recipes' own engine: DeepSpeed, ZeRO
    stage 1 and bfloat16 on CUDA, one process. Where DeepSpeed is not installed it is plain torch, weights in bfloat16 and
    fused AdamW, and the record names it. Tokens are random. All methods take turns; ratios are to the first.

    MFU = tokens/s · F / ceiling, with F = 6·N + 6·layers·C·(L + 1) operations a token. N: parameters that multiply
    activations, the output matrix once, the embedding as a look-up not at all; 2 operations each forward and 4 backward. The
    rest, for each layer: <q, k> and the weighted sum of values over the (L + 1)/2 visible keys of a row. Recomputation counts
    nothing. The ceiling is a large matrix product of the same run; --datasheet-tflops adds a share of a figure of your own.
    """

    Settings = TrainingSettings
    chooses = ("lengths",)

    def __init__(self, settings: TrainingSettings) -> None:
        super().__init__(settings)
        harness.one_of("engine", settings.engine, ("auto", "deepspeed", "torch"))
        self.kind = harness.device_of(settings.device).type
        model, lengths, tokens = DEFAULTS[self.kind]
        self.model = harness.one_of("model", settings.model or model, SIZES)
        size = f"_{self.model}"
        known = {name.removeprefix("text_").removesuffix(size): name for name in sorted(list_models(f"text_*{size}"))}
        self.names = {
            harness.one_of("methods", method, known): known[method] for method in harness.words(settings.methods)
        }
        self.contexts = sorted(harness.numbers("lengths", settings.lengths or lengths))
        self.tokens = settings.tokens or tokens
        if not self.contexts or not self.names:
            raise typer.BadParameter("--lengths and --methods take at least one each")
        installed = importlib.util.find_spec("deepspeed") is not None
        if settings.engine == "deepspeed" and not installed:
            raise typer.BadParameter("--engine deepspeed: deepspeed is not installed; --engine torch does without")
        self.deepspeed = settings.engine != "torch" and installed
        if self.kind == "cpu":
            self.findings.notes.append(f"{self.model} on the CPU in float32, which tells nothing of a GPU")
        if settings.engine == "auto" and not installed:
            self.findings.notes.append(
                "deepspeed is not installed: plain torch, without ZeRO and without float32 copies of weights"
            )

    def about(self) -> Row:
        self.ranks = None
        if self.deepspeed:
            from recipes.engine import start

            self.ranks = start()
        self.device = torch.device(self.kind) if self.ranks is None else self.ranks.device
        dtype = torch.bfloat16 if self.kind == "cuda" else torch.float32
        self.stopwatch = harness.by_clock("wall", self.device)
        self.ceiling = harness.matmul_ceiling(self.device, dtype, self.stopwatch)
        return {
            "model": self.model, "device": device_name(self.device), "dtype": str(dtype).removeprefix("torch."),
            "engine": f"DeepSpeed ZeRO-{int(self.kind == 'cuda')}" if self.deepspeed else "plain torch",
            "plain": next(iter(self.names)), "matmul_tflops": self.ceiling,
        }  # fmt: skip

    def cells(self) -> list[Cell]:
        return [Cell(f"context {context}", "contexts", context) for context in self.contexts]

    def build(self, name: str, context: int, batch: int) -> Row:
        """A model with its step, and the memory that both hold."""
        torch.manual_seed(0)
        cuda = self.device.type == "cuda"
        with Meter(self.device) as meter:
            before = torch.cuda.memory_allocated(self.device) if cuda else 0
            model = create_model(name, train_context=context)
            assert isinstance(model, CausalLM)
            flops, parameters = flops_per_token(model, context), sum(p.numel() for p in model.parameters())
            if self.settings.compiled:
                model.compile()
            step = TorchStep(model, self.device) if self.ranks is None else EngineStep(model, batch, self.ranks)
        held = torch.cuda.memory_allocated(self.device) - before if cuda else meter.peak_bytes
        return {"step": step, "flops": flops, "parameters": parameters, "held": held}

    def measure(self, cell: Cell) -> list[Row]:
        context, batch = cell.value, max(1, self.tokens // cell.value)
        tokens = torch.randint(0, 256, (batch, context + 1), device=self.device)
        data = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
        made, peaks = dict[str, Row](), dict[str, int | None]()
        for method, name in self.names.items():
            self.report(f"{name} at {context}: first steps")
            with self.findings.guard(method, cell.name):
                entry = self.build(name, context, batch)
                losses = [entry["step"](data) for _ in range(2)]  # compiled, and Adam's moments allocated
                with Meter(self.device) as meter:
                    losses.append(entry["step"](data))
                if not all(map(math.isfinite, losses)):
                    raise ValueError(f"the loss is not finite: {losses}")
                made[method], peaks[method] = entry, meter.peak_bytes
        self.report(f"context {context}: {len(made)} methods in turns")
        steps = {method: (lambda entry=entry: entry["step"](data)) for method, entry in made.items()}
        rounds = harness.in_turns(steps, (self.settings.seconds or SECONDS) * len(made), self.stopwatch)
        first, rows = next(iter(made), ""), []
        for method, entry in made.items():
            ms, peak, sheet = rounds.ms(method), peaks[method], self.settings.datasheet_tflops
            tflops = batch * context * entry["flops"] / ms / 1e9
            rows.append({
                "method": method, "context": context, "batch": batch, "ms": ms, "rounds": len(rounds),
                "tokens_per_s": 1e3 * batch * context / ms, "speed_ratio": 1 / rounds.ratio(method, first),
                "parameters": entry["parameters"], "flops_per_token": entry["flops"], "tflops": tflops,
                "mfu": tflops / self.ceiling, "datasheet_mfu": tflops / sheet if sheet else None,
                "peak_bytes": None if peak is None or entry["held"] is None else entry["held"] + peak,
            })  # fmt: skip
        made.clear()
        steps.clear()
        harness.free(self.device)
        return rows

    def failed(self) -> bool:
        return bool(self.findings.failed or self.findings.skipped)

    def title(self, record: Row) -> str:
        return (
            f"training steps of {record['model']} on {record['device']}, {record['dtype']}, {record['engine']}; "
            f"ratios to {record['plain']}; MFU of {record['matmul_tflops']:.2f} TFLOP/s measured"
        )

    def section(self, row: Row) -> str:
        return f"{row['batch']} × {row['context']} tokens"

    def columns(self) -> list[Column]:
        return [
            Column("method", lambda row: row["method"]),
            Column("tokens/s", harness.text_of("tokens_per_s", ",.0f")),
            Column("ratio", harness.text_of("speed_ratio", ".3f")),
            Column("TFLOP/s", harness.text_of("tflops", ".3g")),
            Column("MFU", harness.text_of("mfu", ".1%")),
            Column("of datasheet", harness.text_of("datasheet_mfu", ".1%")),
            Column("peak GiB", harness.text_of("peak_bytes", ".2f", 2**30)),
        ]
