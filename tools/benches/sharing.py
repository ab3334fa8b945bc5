"""What ranks that share lines of tokens keep for the backward pass, by how many share a line.

.venv/bin/torchrun --nproc-per-node 4 tools/bench.py sharing
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch

from modalities.decoder import causal_lm_loss
from recipes import engine
from recipes.config import ConfigError
from recipes.sequence import check_sequence, sequence_group
from tools.benches import harness
from tools.benches.harness import Record, Row, text_of
from tools.benches.screen import Option
from zoo import create_model


def main(
    models: Annotated[
        str, Option(help="comma-separated models of text")
    ] = "text_ggd_goat_ssmax_tiny,text_cable_tiny,text_rope_tiny",
    lengths: Annotated[str, Option(help="tokens of a line")] = "1024,4096",
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Bytes that autograd keeps of one line's loss on the rank that keeps most, for every number of ranks that divides those
    started and is served."""
    ranks = engine.start()
    record = Record({"device": ranks.device.type, "ranks": ranks.world}, out=out if ranks.lead else None, commit=commit)
    sizes = [size for size in range(1, ranks.world + 1) if ranks.world % size == 0]
    groups = {size: sequence_group(size) if size > 1 else None for size in sizes}

    def measure(name: str, length: int) -> list[Row]:
        rows: list[Row] = []
        model = create_model(name, train_context=length).train().to(ranks.device)
        tokens = torch.randint(0, model.config.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(0))
        batch = {"tokens": tokens.to(ranks.device), "segments": torch.zeros_like(tokens, device=ranks.device)}
        for size in sizes:
            try:
                check_sequence(model, size)
            except ConfigError as refused:
                record.left_out[f"{name} at {length}"] = str(refused)
                continue
            model.sequence = groups[size]
            kept = torch.tensor(kept_bytes(model, batch))
            if ranks.world > 1:
                torch.distributed.all_reduce(kept, op=torch.distributed.ReduceOp.MAX)
            row = {"model": name, "length": length, "share": size, "bytes": int(kept)}
            rows.append(row | {"of_one": row["bytes"] / (rows[0] if rows else row)["bytes"]})
        return rows

    cells = [(name, n) for name in harness.words(models) for n in harness.numbers("lengths", lengths)]
    record.measure([(f"{name} at {n}", name, partial(measure, name, n)) for name, n in cells])
    if ranks.lead:
        columns = {
            "ranks a line": text_of("share"),
            "MiB kept": text_of("bytes", ".1f", 2**20),
            "of one rank's": text_of("of_one", ".3f"),
        }
        record.show(
            "kept for backward, a rank", columns, section=lambda row: f"{row['model']}, {row['length']:,} tokens"
        )


def kept_bytes(model: Any, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors that autograd keeps for the backward pass of a batch's loss, each storage once, parameters not."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # held here too, so that no address is used twice

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()).data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss, _ = causal_lm_loss(model, batch)
    loss.backward()
    model.zero_grad()
    return sum(storage.nbytes() for storage in kept.values())
