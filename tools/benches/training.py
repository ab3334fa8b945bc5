"""Training steps of decoders, position methods compared with each other and with a transformers
Llama of the same shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from modalities.contract import find_modality
from modalities.decoder.model import Decoder, DecoderConfig
from tools.benches.timing import Record, Refused, device_of, numbers, parser, words
from zoo import create_model

LLAMA = "transformers Llama"


def llama_like(config: DecoderConfig, context: int) -> nn.Module:
    """transformers' Llama of a decoder's width, depth, heads and vocabulary, with fresh weights."""
    if importlib.util.find_spec("transformers") is None:
        raise Refused("transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape)


def random_loss(model: Decoder, rows: int, length: int) -> Callable[[], torch.Tensor]:
    """The loss of a decoder on one batch of random tokens."""
    vocabulary = min(256, model.config.vocab_size)
    device = model.embedding.weight.device
    tokens = torch.randint(0, vocabulary, (rows, length + 1), device=device)
    batch = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    loss = find_modality(model.modality).loss
    return lambda: loss(model, batch)[0]


def _llama_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def training_step(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], float]:
    """Forward, loss, backward, gradient clipping and a fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return step


def main(argv: Sequence[str]) -> int:
    """Steps of plain torch with random tokens, in bfloat16 on CUDA."""
    options = parser("training", main.__doc__)
    options.add_argument(
        "--models", type=words, help="decoders of one shape; the first gives Llama's"
    )
    options.add_argument(
        "--lengths", type=numbers, help="tokens a row; default 2048,16384 on CUDA, 256 on the CPU"
    )
    options.add_argument(
        "--tokens", type=int, help="of a step; default 32768 on CUDA, 1024 on the CPU"
    )
    args = options.parse_args(argv)
    device = device_of(args)
    cuda = device.type == "cuda"
    if cuda:
        size = "125m"
        dtype = torch.bfloat16
        lengths = [2048, 16384]
        step_tokens = 32768
    else:
        size = "tiny"
        dtype = torch.float32
        lengths = [256]
        step_tokens = 1024
    methods = ("rope", "alibi", "goat", "ggd_ssmax")
    names = args.models or [f"text_{method}_{size}" for method in methods]
    record = Record(args, device, dtype=str(dtype))
    for length in args.lengths or lengths:
        rows = max(1, (args.tokens or step_tokens) // length)
        shape = f"{rows} × {length} tokens"
        steps = {}
        for name in names:
            with record.guard(name, shape):
                torch.manual_seed(0)
                model = create_model(name, train_context=length).to(device, dtype).train()
                steps[name] = training_step(model, random_loss(model, rows, length))
                config = model.config
        if not steps:
            continue
        with record.guard(LLAMA, shape):
            llama = llama_like(config, length).to(device, dtype).train()
            ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
            steps[LLAMA] = training_step(llama, partial(_llama_loss, llama, ids))
        record.compare(shape, "training step", steps, [LLAMA], tokens=rows * length)
    return record.finish()
