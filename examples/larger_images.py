"""A timm ViT on larger images than it was trained on, with and without a prior.

    python examples/larger_images.py            # three minutes on one core
    python examples/larger_images.py --steps 2  # whether it runs

A picture shows one of three shapes, 24 pixels large, somewhere on grey. Training has pictures of
48 pixels. In larger ones the shape keeps its pixels and the background grows.
"""

import argparse

import zoo  # before timm
import timm
import torch
from torch import Tensor, nn

SHAPES = ("disc", "square", "cross")
SIDE = 24
TRAINED = 48


def draw(shape: str) -> Tensor:
    """(SIDE, SIDE) 1 inside the shape and 0 outside."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    if shape == "disc":
        return ((y**2 + x**2) < 0.9).float()
    if shape == "square":
        return (torch.maximum(y.abs(), x.abs()) < 0.85).float()
    return (torch.minimum(y.abs(), x.abs()) < 0.35).float()


def make_batch(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(count, 3, size, size) pictures and their classes."""
    images = torch.zeros(count, 3, size, size)
    colours = torch.randn(count, 3, 1, 1, generator=generator)
    classes = torch.randint(len(SHAPES), (count,), generator=generator)
    corners = torch.randint(size - SIDE + 1, (count, 2), generator=generator)
    for image, kind, colour, (top, left) in zip(
        images, classes, colours, corners.tolist(), strict=True
    ):
        image[:, top : top + SIDE, left : left + SIDE] = colour * draw(SHAPES[kind])
    return images, classes


def train(position: str | None, steps: int) -> nn.Module:
    """A ViT with timm's learned positions, or with a prior in their place."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=TRAINED,
        patch_size=8,
        embed_dim=64,
        depth=3,
        num_heads=4,
        num_classes=len(SHAPES),
        global_pool="max",
        class_token=False,
        dynamic_img_size=True,
    )
    if position is not None:
        zoo.adapt(model, position, options={"init": "alibi"}, keep_rope=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images, classes = make_batch(32, TRAINED, generator)
        loss = nn.functional.cross_entropy(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print("pictures named right, by their size in pixels")
    for position in (None, "ggd2d"):
        model = train(position, steps)
        for size in (TRAINED, 2 * TRAINED, 4 * TRAINED):
            images, classes = make_batch(64, size, torch.Generator().manual_seed(1))
            with torch.inference_mode():
                accuracy = (model(images).argmax(-1) == classes).double().mean()
            print(f"{position or 'learned':8} {size:4} pixels: {accuracy:.2f}")


if __name__ == "__main__":
    main()
