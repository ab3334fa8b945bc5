"""Trained models over long texts: what leaving keys out saves in reading, in attention, and in attention's training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from modalities.decoder.model import Decoder
from modalities.text.data import open_heldout
from recipes.targets import Target, find_targets
from tools.benches import harness
from tools.benches.harness import Record, Refused, Row, text_of
from tools.benches.screen import Option
from zoo import prior_attention
from zoo.attention import AttentionCall, skipping
from zoo.attention.dispatch import Observer

READ, ATTENTION, STEP = "read", "attention", "attention, fwd+bwd"


def main(
    models: Annotated[
        str, Option(help="comma-separated names or run folders of text models")
    ] = "text_ggd_ssmax_tiny.facts,text_ggd_tiny.facts,text_alibi_tiny.facts",
    lengths: Annotated[str, Option(help="tokens, ascending")] = "16384,65536",
    steps: Annotated[int, Option(help="most tokens of a training step")] = 16384,
    source: Annotated[str, Option(help="held-out text, repeated where it is short")] = "sotu-excerpt",
    seconds: harness.Seconds = 4.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Trained models on held-out text, on the CPU in float32: time with all keys and without those of negligible weight.

    "read" is a forward pass up to the last token's features, "attention" the attention calls of all layers as that pass makes
    them, and "attention, fwd+bwd" the same with the gradients of q, k, v and of the prior's table and lanes. The two take
    turns; ratios are to all keys.
    """
    record = Record({"device": "cpu", "dtype": "float32", "source": source}, out=out, commit=commit, minutes=minutes)
    targets = find_targets(harness.words(models), {}, "cpu", "float32")

    def measure(target: Target, length: int, what: str) -> list[Row]:
        rows: list[Row] = []
        with record.guard(f"{target.label}, {what}", f"{length}"):
            if what == STEP and length > steps:
                raise Refused(f"training steps are measured up to {steps} tokens")
            call = PASSES[what](target.model, text(target.model, source, length))
            kinds = {"all keys": False, "auto": True}
            rounds = harness.in_turns(
                {kind: partial(within, skips, call) for kind, skips in kinds.items()},
                2 * (seconds or 4.0),
                harness.by_clock(torch.device("cpu")),
            )
            rows = [
                {
                    "length": length, "what": what, "model": target.label, "ms": rounds.ms(kind), "kernel": kind,
                    "ratio": rounds.ratio(kind, "all keys"), "pairs": len(rounds.rows),
                }
                for kind in kinds
            ]  # fmt: skip
        return rows

    with record.status:
        record.measure(
            (f"{target.label} {length} {what}", f"{target.label} {what}", partial(measure, target, length, what))
            for length in sorted(harness.numbers("lengths", lengths))
            for target in targets
            for what in PASSES
        )
    columns = {
        "model": lambda row: f"{row['model']}, {row['kernel']}",
        "pass": text_of("what"),
        "ms": text_of("ms", ",.0f"),
        "ratio to all keys": text_of("ratio", ".2f"),
    }
    title = f"trained models on {source}, the CPU with {record.about['threads']} threads, float32"
    record.show(title, columns, section=lambda row: f"{row['length']:,} tokens")
    harness.end(record)


def within(skips: bool, call: Callable[[], object]) -> None:
    with skipping(skips):
        call()


def text(model: Decoder, source: str, length: int) -> Tensor:
    """(1, length) tokens of held-out documents."""
    documents = open_heldout(source, model.config.tokenizer).items
    return torch.as_tensor(np.resize(np.concatenate([document.tokens for document in documents]), length))[None]


@torch.no_grad()
def recorded(model: Decoder, tokens: Tensor) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    model.forward_features(tokens, kernel=Observer(calls.append))
    return calls


def attend(call: AttentionCall) -> Tensor:
    options = {"query_scale": call.query_scale, "segments": call.segments, "window": call.window}
    return prior_attention(call.q, call.k, call.v, call.terms, causal=call.causal, **options)


def with_leaves(call: AttentionCall) -> AttentionCall:
    """The call, with tensors of its own that want a gradient: q, k, v, row scale, table and lanes."""

    def leaf(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().requires_grad_()

    terms = call.terms
    table = None if terms.table is None else replace(terms.table, table=leaf(terms.table.table))
    terms = replace(terms, table=table, q_lanes=leaf(terms.q_lanes), k_lanes=leaf(terms.k_lanes))
    own = {name: leaf(getattr(call, name)) for name in ("q", "k", "v", "query_scale")}
    return replace(call, terms=terms, **own)


def read(model: Decoder, tokens: Tensor) -> Callable[[], object]:
    return harness.no_grad(lambda: model.forward_features(tokens, last=1))


def attention(model: Decoder, tokens: Tensor) -> Callable[[], object]:
    calls = recorded(model, tokens)
    return harness.no_grad(lambda: [attend(call) for call in calls])


def attention_step(model: Decoder, tokens: Tensor) -> Callable[[], object]:
    calls = recorded(model, tokens)

    def step() -> None:
        for call in calls:
            attend(with_leaves(call)).sum().backward()

    return step


PASSES: dict[str, Callable[[Decoder, Tensor], Callable[[], object]]] = {
    READ: read,
    ATTENTION: attention,
    STEP: attention_step,
}
