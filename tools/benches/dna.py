"""What a training step of a DNA decoder takes with one position method and another: tokens/s and peak memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch

from modalities.cost import Meter, device_name
from modalities.dna.model import SIZES, DnaDecoder, next_token_loss
from modalities.dna.tokenizers import load_tokenizer
from tools.benches import harness
from tools.benches.harness import Cell, Column, Row, Settings, option
from zoo import create_model
from zoo.methods import list_positions

PLAIN = "rope"
SECONDS = 20.0
PARTS = {"Attention": "attention", "SwiGLU": "MLP", "RMSNorm": "norms", "Rotary": "rotary"}


@dataclass(frozen=True)
class DnaSettings(Settings):
    model: Annotated[str, option(", ".join(SIZES))] = "25m"
    methods: Annotated[str, option("comma-separated, beside rope")] = "goat"
    batch: Annotated[int, option("rows a step")] = 1
    context: Annotated[int, option("tokens a row; 0: the size's own")] = 0
    dtype: Annotated[str, option(", ".join(harness.DTYPES))] = "float32"
    device: Annotated[str, option("auto, cuda or cpu")] = "cpu"


class Problem:
    """A model and a batch of random windows; a step is loss and gradients, without an optimiser."""

    def __init__(self, name: str, batch: int, context: int, device: str, dtype: str) -> None:
        torch.manual_seed(0)
        model = create_model(name, train_context=context)
        assert isinstance(model, DnaDecoder)
        self.model = model.to(device, harness.DTYPES[dtype])
        tokens = torch.randint(0, 4, (batch, context + 1), device=device)
        tokens[:, 0] = load_tokenizer("bases").bos_id
        self.batch = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
        self.leaves = [p for p in model.parameters() if p.requires_grad]

    def step(self) -> None:
        loss, _ = next_token_loss(self.model, self.batch)
        torch.autograd.grad(loss, self.leaves, allow_unused=True)

    def kept(self) -> dict[str, int]:
        """Bytes that autograd keeps for the backward pass, by kind of module, each storage counted where it appears first."""
        seen: set[int] = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        inside: list[str] = ["head"]
        sums: dict[str, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sums[inside[-1]] = sums.get(inside[-1], 0) + storage.nbytes()
            return tensor

        handles = []
        for module in self.model.modules():
            kind = type(module).__name__
            if kind in PARTS:
                handles.append(module.register_forward_pre_hook(lambda _, __, part=PARTS[kind]: inside.append(part)))
                handles.append(module.register_forward_hook(lambda *_: inside.pop() and None))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss, _ = next_token_loss(self.model, self.batch)
        del loss
        for handle in handles:
            handle.remove()
        return sums


def memory_of_step(*problem: Any) -> Row:
    """Peak bytes of a step and what is kept, for a fresh process."""
    made = Problem(*problem)
    made.step()  # what the first step alone allocates
    with Meter(next(made.model.parameters()).device) as meter:
        made.step()
    return {"peak_bytes": meter.peak_bytes, "kept_bytes": made.kept()}


class Dna(harness.Benchmark):
    """Training steps of a DNA decoder (loss and gradients) with one position method beside rope's.

    Steps of the two models take turns. Memory is what a step adds to the process at its peak, in a process of its own for each
    model. Beside it stands what autograd keeps between forward and backward, by kind of layer, to locate a difference.
    """

    Settings = DnaSettings
    chooses = ("methods",)

    def __init__(self, settings: DnaSettings) -> None:
        super().__init__(settings)
        harness.one_of("model", settings.model, SIZES)
        harness.one_of("dtype", settings.dtype, harness.DTYPES)
        self.device = str(harness.device_of(settings.device))
        self.methods = [
            harness.one_of("methods", m, list_positions()) for m in harness.words(f"{PLAIN},{settings.methods}")
        ]
        self.context = settings.context or SIZES[settings.model]["train_context"]

    def problem_of(self, method: str) -> tuple[Any, ...]:
        """Arguments of `Problem`."""
        s = self.settings
        return f"dna_{method}_{s.model}", s.batch, self.context, self.device, s.dtype

    def about(self) -> Row:
        s = self.settings
        self.plain = Problem(*self.problem_of(PLAIN))
        return {
            "model": s.model, "batch": s.batch, "context": self.context, "dtype": s.dtype, "plain": PLAIN,
            "device": device_name(self.device),
        }  # fmt: skip

    def cells(self) -> list[Cell]:
        return [Cell(method, "methods", method) for method in self.methods]

    def measure(self, cell: Cell) -> list[Row]:
        s, problem = self.settings, self.problem_of(cell.value)
        runs = {"plain": self.plain.step, "ours": Problem(*problem).step}
        rounds = harness.in_turns(runs, s.seconds or SECONDS, harness.by_clock("wall", self.device))
        memory = harness.in_fresh_process(memory_of_step, *problem)
        first = self.findings.results[0]["peak_bytes"] if self.findings.results else memory["peak_bytes"]
        return [{
            "method": cell.value, "tokens_per_s": 1e3 * s.batch * self.context / rounds.ms("ours"),
            "speed_ratio": 1 / rounds.ratio("ours", "plain"), "pairs": len(rounds), **memory,
            "peak_ratio": memory["peak_bytes"] / first if first and memory["peak_bytes"] else None,
        }]  # fmt: skip

    def title(self, record: Row) -> str:
        return (
            f"{record['batch']} × {record['context']} bases, {record['model']}, {record['dtype']} on {record['device']}; "
            f"ratios to {PLAIN}; last columns: MiB kept for the backward pass"
        )

    def columns(self) -> list[Column]:
        kinds = sorted({kind for row in self.findings.results for kind in row["kept_bytes"]})
        return [
            Column("method", lambda row: row["method"]),
            Column("tokens/s", harness.text_of("tokens_per_s", ",.0f")),
            Column("ratio", harness.text_of("speed_ratio", ".3f")),
            Column("peak MiB", harness.text_of("peak_bytes", ",.0f", 2**20)),
            Column("ratio", harness.text_of("peak_ratio", ".3f")),
            *(Column(k, lambda row, k=k: f"{row['kept_bytes'].get(k, 0) / 2**20:,.1f}") for k in kinds),
        ]
