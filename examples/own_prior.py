"""A prior of your own, trained beside ALiBi on a task whose answer stands far back.

    python examples/own_prior.py            # a minute on one core
    python examples/own_prior.py --steps 2  # whether it runs

A row is a random string, twice: a letter predicted right in the second copy was found in the
first. Training has strings of 16 letters; the table shows longer ones.
"""

import argparse

import torch
from torch import Tensor, nn

import zoo

LETTERS = 26
TRAINED = 16


class PowerLaw(zoo.priors.TablePrior):
    """K[h,i,j] = −a_h·ln(1 + |i − j|): weights that fall as a power of the distance."""

    # Parameters with an entry for each head; heads differ by nothing else.
    by_head = ("raw_exponent",)

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.raw_exponent = nn.Parameter(torch.linspace(-6, 0, num_heads))

    def curve(self, distance: Tensor, *, causal: bool) -> Tensor:
        exponent = nn.functional.softplus(self.raw_exponent.to(distance.dtype))
        # (H, 1, …): a row for each head, whatever the shape of distance.
        return -exponent.view(-1, *[1] * distance.ndim) * distance.abs().log1p()


def make_rows(count: int, length: int, generator: torch.Generator) -> Tensor:
    """(count, 2·length) token ids: random strings, each twice."""
    once = torch.randint(LETTERS, (count, length), generator=generator)
    return torch.cat([once, once], dim=1)


def copy_loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, float]:
    """Mean loss, in nats, and accuracy over the second copy, but for its first letter."""
    logits = model(rows[:, :-1])[:, rows.shape[1] // 2 :]
    targets = rows[:, 1:][:, rows.shape[1] // 2 :]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    accuracy = (logits.argmax(-1) == targets).double().mean()
    return loss, float(accuracy)


def train(position: str, steps: int) -> nn.Module:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    sizes = {"vocab_size": LETTERS, "num_layers": 2, "train_context": 2 * TRAINED}
    model = zoo.create_model(f"text_{position}_tiny", **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        loss, _ = copy_loss(model, make_rows(32, TRAINED, generator))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    zoo.register_prior("power_law", PowerLaw)
    print("letters copied right, by the length of the string")
    for position in ("power_law", "alibi", "rope"):
        model = train(position, steps)
        for length in (TRAINED, 2 * TRAINED, 4 * TRAINED):
            rows = make_rows(64, length, torch.Generator().manual_seed(1))
            with torch.inference_mode():
                _, accuracy = copy_loss(model, rows)
            print(f"{position:10} {length:4} letters: {accuracy:.2f}")


if __name__ == "__main__":
    main()
