"""Vision transformers of each position method compared with timm's of the same shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tools.benches.timing import Record, Refused, device_of, parser, words
from zoo import create_model, list_models

TIMM = "timm"
METHODS = ["nope", "learned", "rope2d_axial", "alibi", "goat", "ggd2d", "ggd2d_separable"]


def timm_like(config: object, size: int) -> nn.Module:
    """timm's VisionTransformer of a model's width, depth, heads, patch and classes."""
    if importlib.util.find_spec("timm") is None:
        raise Refused("timm is not installed")
    from timm.models import VisionTransformer

    names = {"embed_dim": "dim", "depth": "num_layers", "num_heads": "num_heads", "patch_size": "patch_size"}
    shape = {theirs: getattr(config, name) for theirs, name in names.items()}
    return VisionTransformer(img_size=size, num_classes=config.num_classes, **shape)


def main(argv: Sequence[str]) -> int:
    """Whole models, forward and with all gradients, in bfloat16 on CUDA; ratios to timm's vision transformer."""
    options = parser("images", main.__doc__)
    options.add_argument("--model", default="tiny_patch8", help="size of the models: tiny_patch8, vits16, …")
    options.add_argument("--methods", type=words, default=METHODS)
    options.add_argument("--size", type=int, default=96, help="pixels of a side")
    options.add_argument("--batch", type=int, default=8)
    args = options.parse_args(argv)
    device = device_of(args)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    record, shape = Record(args, device, dtype=str(dtype)), f"{args.batch} × {args.size} pixels"
    images = torch.randn(args.batch, 3, args.size, args.size, device=device, dtype=dtype)
    models: dict[str, nn.Module] = {}
    for method in args.methods:
        if (name := f"vision_{method}_{args.model}") not in list_models("vision_*"):
            raise SystemExit(f"no model {name}; `priorzoo list` prints all")
        torch.manual_seed(0)
        models[method] = create_model(name).to(device, dtype)
    with record.guard(TIMM, shape):
        models[TIMM] = timm_like(next(iter(models.values())).config, args.size).to(device, dtype)
    forward = {name: torch.no_grad()(partial(model, images)) for name, model in models.items()}
    record.compare(shape, "forward", forward, [TIMM], images=args.batch)
    steps = {name: partial(gradients, model, images) for name, model in models.items()}
    record.compare(shape, "forward and backward", steps, [TIMM], images=args.batch)
    return record.finish()


def gradients(model: nn.Module, images: Tensor) -> tuple[Tensor | None, ...]:
    """Of the mean square of the logits, with respect to all parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(model(images).square().mean(), parameters, allow_unused=True)
