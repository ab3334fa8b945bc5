"""Vision recipes by name, and what the training loop asks of the vision modality.

`vision.<method>_tiny` exists for every method in the registry (`python recipes/train.py --list`); the functions below that
are not generated are the papers' own set-ups. A new recipe is one decorated function.

tiny needs the glyph data (`python tools/fetch_data.py vision glyphs`), or `--set data.source=glyphs-builtin`, which draws the
few fonts that come with matplotlib. ImageNet is read from a folder of class folders (data/imagenet/train, …/val), from
WebDataset shards (`--set data.source='wds:imagenet-train-{000000..001023}.tar'`) or from the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from modalities.vision.data import VisionDataConfig
from recipes.config import Evaluate, Model, Optim, Recipe, Train
from recipes.estimate import Cost
from recipes.initial import load_weights

UNIT = "images"  # what throughput is counted in
FIGURES = ("top1", "top5")  # what `loss` measures besides the loss, for held-out data
RECIPES: dict[str, Callable[[], Recipe]] = {}

IMAGENET_IMAGES = 1_281_167


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Make a recipe known under its function's name."""
    RECIPES[function.__name__] = function
    return function


def tiny(method: str) -> Recipe:
    """0.5M parameters, 48 pixels: the 26 capitals of 791 fonts, in scenes.

    deepspeed --num_gpus 1 recipes/train.py vision.<method>_tiny

    Hardware: two CPU cores.
    """
    return Recipe(
        name=f"vision.{method}_tiny",
        modality="vision",
        model=Model(f"vision_{method}_tiny_patch8"),
        data=VisionDataConfig(source="glyphs", image_size=48, num_classes=26, augment="light"),
        optim=Optim("adamw", lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05, prior_lr_scale=10.0, warmup=50, floor=0.01),
        train=Train(steps=1500, batch=64, save_every=500),
        evaluate=Evaluate(every=500, samples=1040),
    )


def imagenet(*, epochs: int, batch: int, **data: Any) -> tuple[VisionDataConfig, Train]:
    """Data and loop of an ImageNet-1k run of so many epochs."""
    config = VisionDataConfig(
        source="folder:data/imagenet",
        image_size=224,
        num_classes=1000,
        augment="imagenet",
        crop_scale=(0.08, 1.0),
        hflip=0.5,
        num_workers=8,
        **data,
    )
    steps = epochs * IMAGENET_IMAGES // batch
    return config, Train(
        steps=steps, batch=batch, precision="bf16", zero_stage=1, clip=1.0, save_every=5000, log_every=50
    )


@recipe
def goat_imagenet_vits16() -> Recipe:
    """GOAT-ImageNet ViT-S/16 (arXiv 2601.15380): SwiGLU, 16 pairs in two dimensions, key bias; 224 pixels, 150 epochs.

    deepspeed --num_gpus 8 recipes/train.py vision.goat_imagenet_vits16

    AdamW (0.9, 0.999), 1e-3 cosine, decay 0.05, 20 epochs of warm-up, batch 1024, RandAugment 2/9, mixup 0.8, CutMix 1.0,
    smoothing 0.1, erasing 0.25, drop-path 0.1; no clipping. RandAugment is timm's, which applies each of its two operations
    with probability 0.5. Hardware: 8 × 24 GB GPUs.
    """
    data, train = imagenet(
        epochs=150, batch=1024,
        rand_augment="rand-m9-n2", mixup=0.8, cutmix=1.0, label_smoothing=0.1, random_erasing=0.25,
    )  # fmt: skip
    train.clip = 0.0
    return Recipe(
        name="vision.goat_imagenet_vits16",
        modality="vision",
        model=Model("vision_goat_small_patch16", options={"drop_path_rate": 0.1}),
        data=data,
        optim=Optim(
            "adamw", lr=1e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup=20 * IMAGENET_IMAGES // 1024, floor=0.0
        ),
        train=train,
        evaluate=Evaluate(every=1252, samples=50_000),  # once an epoch, near enough
    )


@recipe
def lookhere_like_vitb16() -> Recipe:
    """A ViT-B/16 for resolution extrapolation in the manner of LookHere (arXiv 2405.13985): 224 pixels, 150 epochs, EMA.

    deepspeed --num_gpus 8 recipes/train.py vision.lookhere_like_vitb16

    To stand beside that paper's table (trained at 224, measured to 1024): 2-D ALiBi 79.5 → 63.6, 2-D RoPE 80.4 → 51.4.
    `--set model.name=vision_alibi_base_patch16` and so on trains the others. Batch 2048, AdamW, RandAugment, mixup, CutMix,
    layer scale and drop-path are the usual ones of such runs and not that paper's exact values. Hardware: 8 × 80 GB GPUs.
    """
    data, train = imagenet(
        epochs=150, batch=2048,
        rand_augment="rand-m15-n2-mstd0.5", mixup=0.8, cutmix=1.0, label_smoothing=0.1,
    )  # fmt: skip
    train.ema = 0.9999
    return Recipe(
        name="vision.lookhere_like_vitb16",
        modality="vision",
        model=Model("vision_ggd2d_base_patch16", options={"drop_path_rate": 0.1, "init_values": 1e-4}),
        data=data,
        optim=Optim(
            "adamw", lr=2e-3, betas=(0.9, 0.999), weight_decay=0.05, warmup=5 * IMAGENET_IMAGES // 2048, floor=0.0
        ),
        train=train,
        evaluate=Evaluate(every=626, samples=50_000),
    )


def _generate() -> None:
    """`<method>_tiny` for every tiny model in the registry."""
    from zoo import list_models

    for model in list_models("vision_*_tiny_patch8", modality="vision"):
        method = model.removeprefix("vision_").removesuffix("_tiny_patch8")
        RECIPES.setdefault(f"{method}_tiny", partial(tiny, method))


_generate()


# ------------------------------------------------------------------------------------------ what the loop asks for


def build_model(recipe: Recipe, *, start: bool = True) -> Any:
    """The recipe's model: the registry's entry at the data's image size, classes and normalisation, with `init_from`'s weights.

    start=False leaves those out, for a model that gets a checkpoint's weights or none.
    """
    from zoo import create_model

    data = recipe.data
    options = {"img_size": data.image_size, "num_classes": data.num_classes, "mean": data.mean, "std": data.std}
    model = create_model(recipe.model.name, **{**options, **recipe.model.options})
    if start and recipe.model.init_from:
        load_weights(model, recipe.model.init_from)
    return model


def cost(recipe: Recipe, model: Any) -> Cost:
    """One image of T tokens. FLOPs: 6 a matrix parameter and token (the classifier's once), 12·C a (query, key) pair and layer.

    (Attention's two products are 4·C forward and 8·C backward a pair; all T² pairs are visible.) Activations in numbers a
    token and layer: 10·C + 4·hidden (norms, q, k, v, output, residuals, MLP), or 2·C where blocks are recomputed.
    """
    config = model.config
    grid = config.train_grid
    tokens = grid[0] * grid[1] + model.num_prefix_tokens
    kept = ("prefix_tokens", "position_embedding", "head")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim >= 2 and not name.startswith(kept))
    flops = (
        6.0 * (matrices * tokens + config.dim * config.num_classes) + 12.0 * config.dim * tokens**2 * config.num_layers
    )
    per_layer = 2 * config.dim if config.activation_checkpointing else 10 * config.dim + 4 * config.hidden_dim
    width = 2 if recipe.train.precision == "bf16" else 4
    return Cost(1, flops, tokens * width * config.num_layers * per_layer)


def load_model(folder: Any) -> Any:
    """A model from its save_pretrained folder."""
    from modalities.vision.model import VisionTransformer

    return VisionTransformer.from_pretrained(folder)


def train_loader(recipe: Recipe, *, rank: int, world: int) -> Any:
    """Endless batches of this rank, with state_dict() and load_state_dict()."""
    from modalities.vision.data import build_loader

    return build_loader(recipe.data, split="train", rank=rank, world=world, micro_batch=recipe.train.micro_batch)


class HeldOut:
    """The batches of this rank among the first `evaluate.samples` held-out images, read anew in each pass.

    Every rank has equally many batches.
    """

    def __init__(self, recipe: Recipe, *, rank: int, world: int) -> None:
        from modalities.vision.data import build_loader

        samples = recipe.evaluate.samples
        micro = min(recipe.train.micro_batch or 1, -(-samples // world))
        self.count = -(-samples // (micro * world))
        self.loader = build_loader(recipe.data, split="heldout", rank=rank, world=world, micro_batch=micro)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return islice(self.loader, self.count)


def held_out_batches(recipe: Recipe, *, rank: int, world: int) -> HeldOut:
    """What is measured on the way."""
    return HeldOut(recipe, rank=rank, world=world)


def weight(batch: dict[str, Any]) -> tuple[float, int]:
    """Every image counts 1; places of the last held-out batch that are filled up have target −1 and count nothing."""
    targets = batch["targets"]
    count = len(targets) if targets.is_floating_point() else int((targets >= 0).sum())
    return float(count), count


def loss(model: Any, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Mean cross-entropy to labels or soft targets, in nats; and top-1 and top-5 accuracy where there are labels."""
    import torch
    import torch.nn.functional as F

    logits, targets = model(batch["images"]).float(), batch["targets"]
    if targets.is_floating_point():
        return F.cross_entropy(logits, targets), {}
    counted = targets >= 0
    logits, targets = logits[counted], targets[counted]
    with torch.no_grad():
        ranked = logits.topk(min(5, logits.shape[-1])).indices == targets[:, None]
        figures = {"top1": ranked[:, 0].float().mean(), "top5": ranked.any(dim=1).float().mean()}
    return F.cross_entropy(logits, targets), figures
