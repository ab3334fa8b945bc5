"""What a prior costs a transformers model: forward, forward and backward, and a cached token, beside the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch

import zoo
from tools.benches import harness
from tools.benches.harness import Record, Row, text_of
from tools.benches.screen import Option
from zoo.adapters.layer import prior_parameters

PLAIN = "as it was"
WORK = ("forward", "training", "token")


def main(
    positions: Annotated[str, Option(help="comma-separated methods")] = "nope,alibi,ggd,ggd_goat",
    lengths: Annotated[str, Option(help="tokens of a row, or that a cache holds")] = "256,1024,4096",
    dim: Annotated[int, Option(help="C, in heads of 64")] = 256,
    layers: Annotated[int, Option(help="of the model")] = 4,
    seconds: harness.Seconds = 2.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Time of a Llama of fresh weights with priors moved off their start, over that of the same Llama, on the CPU in float32.

    "training" is forward and backward of one row, "token" one more after that many in transformers' own cache.
    """
    record = Record(
        {"device": "cpu", "dtype": "float32", "dim": dim, "layers": layers}, out=out, commit=commit, minutes=minutes
    )
    plain = llama(dim, layers)
    models = {PLAIN: plain} | {name: adapted(plain, name) for name in harness.words(positions)}

    def measure(length: int) -> list[Row]:
        tokens = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
        calls: dict[tuple[str, str], Callable[[], object]] = {}
        for name, model in models.items():
            calls["forward", name] = partial(forward, model, tokens)
            calls["training", name] = partial(training, model, tokens)
            calls["token", name] = next_token(model, tokens)
        record.status.update(f"{length}: timing {len(calls)} in turns")
        rounds = harness.in_turns(calls, (seconds or 2.0) * len(calls), harness.by_clock(torch.device("cpu")))
        return [
            {
                "length": length, "work": work, "position": name, "ms": rounds.ms((work, name)),
                "pairs": len(rounds.rows), "ratio": rounds.ratio((work, name), (work, PLAIN)),
            }
            for work, name in calls
        ]  # fmt: skip

    with record.status:
        record.measure([(f"{n}", "tokens", partial(measure, n)) for n in sorted(harness.numbers("lengths", lengths))])
    columns = {
        "work": lambda row: row["work"],
        "position": lambda row: row["position"],
        "ms": text_of("ms", ".1f"),
        "ratio": text_of("ratio", ".2f"),
    }
    title = f"a Llama with a prior on the CPU, {record.about['threads']} threads, float32, {layers} layers of {dim}"
    record.show(title, columns, section=lambda row: f"{row['length']:,} tokens")
    harness.end(record)


def llama(dim: int, layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=dim,
        intermediate_size=8 * dim // 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, dim // 64),
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def adapted(model: Any, position: str) -> Any:
    made = zoo.adapt(copy.deepcopy(model), position)
    with torch.no_grad():
        for parameter in prior_parameters(made).values():
            parameter.add_(0.1)
    return made


@torch.inference_mode()
def forward(model: Any, tokens: torch.Tensor) -> None:
    model(tokens, use_cache=False)


def training(model: Any, tokens: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(tokens, labels=tokens, use_cache=False).loss.backward()


def next_token(model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    """A call that reads one more token behind those of a cache, which it then drops again."""
    with torch.inference_mode():
        cache = model(tokens, use_cache=True).past_key_values

    @torch.inference_mode()
    def step() -> None:
        model(tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return step
