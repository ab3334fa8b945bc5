from dataclasses import asdict, dataclass

import torch.nn.functional as F
from torch import nn

from modalities.contract import Cost
from zoo import Positions, create_model, create_prior, register_model
from zoo.layers import Attention, Block, SwiGLU
from zoo.model import ZooModel


@dataclass(frozen=True)
class ToyConfig:
    symbols: int = 8
    dim: int = 32
    train_context: int = 16


class ToyModel(ZooModel):
    config_class = ToyConfig
    modality = "toy"

    def __init__(self, config):
        super().__init__()
        self.config = config
        dim = config.dim
        attention = Attention(dim, num_heads=2, prior=create_prior("alibi", num_heads=2))
        self.embedding = nn.Embedding(config.symbols, dim)
        self.block = Block(dim, attention, SwiGLU(dim, 2 * dim))
        self.head = nn.Linear(dim, config.symbols, bias=False)

    def forward(self, tokens):
        """(B, T) → (B, T, symbols) logits of what follows each token."""
        return self.head(self.block(self.embedding(tokens), Positions.line(tokens.shape[1])))


register_model(
    "toy_tiny",
    lambda **entries: ToyModel(ToyConfig(**entries)),
    modality="toy",
    config=asdict(ToyConfig()),
)


def build(name, options, data):
    return create_model(name, **{"symbols": data.symbols, "train_context": 2 * data.half} | options)


def weight(batch):
    return float(batch["weights"].sum()), int(batch["weights"].count_nonzero())


def loss(model, batch):
    losses = F.cross_entropy(
        model(batch["tokens"][:, :-1]).transpose(1, 2), batch["tokens"][:, 1:], reduction="none"
    )
    return (losses * batch["weights"]).sum() / batch["weights"].sum(), {}


def cost(model, data, width):
    tokens = 2 * data.half
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(
        tokens,
        flops=6.0 * parameters * tokens,
        activation_bytes=20.0 * width * tokens * model.config.dim,
    )
