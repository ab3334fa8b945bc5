"""A prior in a Llama: unchanged at first, then trained, saved, loaded and continued.

    python examples/adapt_llama.py                 # a small Llama with random weights, a minute
    python examples/adapt_llama.py --model FOLDER  # one of yours, with its tokenizer

`zoo.adapt` gives each attention layer a log-prior K on its logits. GGD starts at K = 0.
"""

import argparse
import tempfile

import zoo  # before transformers
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEXT = "Position is a prior on attention's logits. " * 64


def small_llama() -> LlamaForCausalLM:
    """Two layers over bytes, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def open_model(folder: str | None) -> tuple[LlamaForCausalLM, Tensor]:
    """A Llama, and a text of 128 tokens for it."""
    if folder is None:
        return small_llama(), torch.tensor([list(TEXT.encode()[:128])])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    return model, tokens[:, :128]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", metavar="FOLDER", help="of transformers; default: a small one")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    model, tokens = open_model(options.model)
    with torch.no_grad():
        before = model(tokens).logits
        zoo.adapt(model, "ggd")
        after = model(tokens).logits
    print("largest change of a logit by adapt:", float((after - before).abs().max()))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        loss = model(tokens, labels=tokens).loss
        if step == 0:
            print(f"loss before training: {loss.item():.3f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after {options.steps} steps: {loss.item():.3f}")

    with tempfile.TemporaryDirectory() as folder:
        zoo.save_adapted(model.eval(), folder)
        again = zoo.load_adapted(folder).eval()
    with torch.no_grad():
        equal = torch.equal(again(tokens).logits, model(tokens).logits)
    print("saved and loaded, to the bit:", equal)
    prompt = tokens[:, :40]
    longer = again.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
    print("tokens continued with a cache:", longer.shape[1] - prompt.shape[1])


if __name__ == "__main__":
    main()
