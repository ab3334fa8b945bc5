"""Vision recipes by name.

`vision.<method>_tiny`, `_photos`, `_scenes`, `_scenes_shapes` and `_links` exist for every method
in the registry (`priorzoo train --list`); the other functions are the papers' set-ups.

tiny reads the letters of 23 fonts that ship; the weights `*.glyphs` are of 791 fonts
(`--set data.source=glyphs`, data that version 0.5.0 draws). ImageNet is read from a folder of class
folders (data/imagenet/train, …/val), from WebDataset shards
(`--set data.source='wds:imagenet-train-{000000..001023}.tar'`) or from the hub.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from modalities.vision.config import VisionDataConfig
from recipes import Evaluate, Model, Optim, Recipe, Recipes, Train
from zoo.errors import Options
from zoo.files import data_folder

RECIPES = Recipes("vision")

IMAGENET_IMAGES = 1_281_167
IMAGENET_EPOCHS = 150
TINY_OPTIM = Optim(
    lr=2e-3,
    weight_decay=0.05,
    prior_lr_scale=10.0,
    warmup=50,
    floor=0.01,
)


def tiny(method: str) -> Recipe:
    """0.5M parameters, 48 pixels: the 26 capitals, in scenes. Hardware: two CPU cores."""
    return Recipe(
        name=f"vision.{method}_tiny",
        modality="vision",
        model=Model(f"vision_{method}_tiny_patch8"),
        data=VisionDataConfig(
            "glyphs-builtin",
            image_size=48,
            num_classes=26,
            augment="light",
        ),
        optim=replace(TINY_OPTIM),
        train=Train(
            steps=1500,
            batch=64,
            save_every=500,
        ),
        evaluate=Evaluate(every=500, samples=416),
    )


# Shapes of training batches where they are not all 96 × 96. These have 150 patches in the mean,
# 96 × 96 has 144.
SCENE_SHAPES = {
    "scenes": (),
    "scenes_shapes": ("64x64", "96x96", "128x128", "64x144", "144x64"),
    "links": (),
}


def scene(task: str, method: str) -> Recipe:
    """0.7M parameters, windows of 96 pixels on crowds of letters that keep their pixels.

    priorzoo evaluate RUN_DIR find,map --sizes 96,144,192,288,384

    scenes: the class token says which letter is ringed, every patch which letter it is on. Without
    the map's loss 10,000 pictures taught nothing. scenes_shapes: each batch has one of several
    sizes and aspects. links: the class token says which letter a line joins to the ringed one; in
    up to a quarter of the windows one of the two is missing, and the answer is 0. Needs
    `python -m tools.offline scenes links`. Hardware: one CPU core.
    """
    source = task.partition("_")[0]
    return Recipe(
        name=f"vision.{method}_{task}",
        modality="vision",
        model=Model(f"vision_{method}_scene_patch8"),
        data=VisionDataConfig(
            source,
            image_size=96,
            num_classes=27,
            target="marked+map",
            unmarked=0.25 if task == "links" else 0.0,
            shapes=SCENE_SHAPES[task],
            augment="window",
        ),
        optim=replace(TINY_OPTIM, warmup=100),
        train=Train(
            steps=2000,
            batch=64,
            save_every=500,
        ),
        evaluate=Evaluate(every=500, samples=520),
    )


def photographs(method: str) -> Recipe:
    """0.5M parameters, 96 pixels: photographs of fruit, 14 kinds, 348 pixels and more.

    priorzoo evaluate RUN_DIR resolution --sizes 96,144,192,288

    Any set of class folders in their place: --set data.source=folder:PATH --set data.num_classes=N.
    The pictures are those of `python -m tools.offline photos`. Hardware: one CPU core.
    """
    return Recipe(
        name=f"vision.{method}_photos",
        modality="vision",
        model=Model(f"vision_{method}_tiny_patch8"),
        data=VisionDataConfig(
            "photos",
            image_size=96,
            num_classes=14,
            crop_scale=(0.35, 1.0),
            hflip=0.5,
            color_jitter=0.2,
            label_smoothing=0.1,
        ),
        optim=replace(TINY_OPTIM),
        train=Train(
            steps=800,
            batch=32,
            save_every=200,
        ),
        evaluate=Evaluate(every=200, samples=661),
    )


def imagenet(name: str, model: Model, *, batch: int, warmup: int, lr: float) -> Recipe:
    """An ImageNet-1k run of 150 epochs by AdamW, `warmup` in epochs, with a common crop and
    flip."""
    return Recipe(
        name=f"vision.{name}",
        modality="vision",
        model=model,
        data=VisionDataConfig(
            f"folder:{data_folder() / 'imagenet'}",
            image_size=224,
            num_classes=1000,
            augment="imagenet",
            crop_scale=(0.08, 1.0),
            hflip=0.5,
            label_smoothing=0.1,
            num_workers=8,
        ),
        optim=Optim(
            lr=lr,
            betas=(0.9, 0.999),
            weight_decay=0.05,
            warmup=warmup * IMAGENET_IMAGES // batch,
            floor=0.0,
        ),
        train=Train(
            steps=IMAGENET_EPOCHS * IMAGENET_IMAGES // batch,
            batch=batch,
            precision="bf16",
            zero_stage=1,
            save_every=5000,
            log_every=50,
        ),
        evaluate=Evaluate(every=IMAGENET_IMAGES // batch + 1, samples=50_000),
    )


# GOAT's name for a method, and its options: priors start at 0 in the paper, M is its script's.
# "ape" is absolute embeddings.
GOAT_IMAGENET: dict[str, tuple[str, Options]] = {
    "goat": ("goat", {"position_options": {"init": "uniform", "sink_rank": 2}}),
    "ape": ("learned", {}),
    "rope2d": ("rope2d_axial", {}),
}


def goat_imagenet(method: str) -> Recipe:
    """GOAT's ImageNet set-up (arXiv 2601.15380): ViT-S/16, SwiGLU, key bias; 224 pixels.

    deepspeed --num_gpus 8 --module priorzoo.train vision.goat_imagenet_<method>_vits16

    Methods: goat (16 pairs in two dimensions), ape (learned) or rope2d. 150 epochs of AdamW (0.9,
    0.999), 1e-3 cosine, decay 0.05, 20 epochs of warm-up, batch 1024, RandAugment 2/9, mixup 0.8,
    CutMix 1.0, smoothing 0.1, erasing 0.25, drop-path 0.1; float16 with a dynamic loss scale; no
    clipping. RandAugment is timm's, which applies each of its two operations with probability 0.5.
    Hardware: 8 × 24 GB GPUs. As released: biases in attention, weights of deviation 0.02, M = 2.

    Differences: there GOAT's attention starts by Xavier's rule and the patches' layer by fan-out.
    Its preset with SwiGLU has a norm after the patches and layer scale
    (--set model.options.init_values=1e-5); the paper names neither. Of 16 frequencies from 1 to
    1e-4 radians rows have the faster half there; here rows and columns have the same eight
    (`Spectral2d`).
    """
    position, position_options = GOAT_IMAGENET[method]
    model = Model(
        f"vision_{position}_small_patch16",
        options={
            "drop_path_rate": 0.1,
            "attention_bias": True,
            "weight_init": "normal",
            **position_options,
        },
    )
    base = imagenet(f"goat_imagenet_{method}_vits16", model, batch=1024, warmup=20, lr=1e-3)
    return replace(
        base,
        data=replace(
            base.data,
            rand_augment="rand-m9-n2",
            mixup=0.8,
            cutmix=1.0,
            random_erasing=0.25,
        ),
        train=replace(
            base.train,
            clip=0.0,
            precision="fp16",
        ),
    )


@RECIPES.add
def ggd2d_imagenet_vitb16() -> Recipe:
    """A ViT-B/16 with GGD distances in 2-D, for larger images: 224 pixels, 150 epochs, EMA.

    deepspeed --num_gpus 8 --module priorzoo.train vision.ggd2d_imagenet_vitb16

    `--set model.name=vision_alibi_base_patch16` and so on trains other methods. For comparison,
    ViT-B/16 of the LookHere paper (arXiv 2405.13985; trained at 224, measured to 1024): 2-D ALiBi
    79.5 → 63.6, 2-D RoPE 80.4 → 51.4. Batch 2048, AdamW, RandAugment, mixup, CutMix, layer scale
    and drop-path are common values, not that paper's. Hardware: 8 × 80 GB GPUs.
    """
    model = Model(
        "vision_ggd2d_base_patch16",
        options={
            "drop_path_rate": 0.1,
            "init_values": 1e-4,
        },
    )
    base = imagenet("ggd2d_imagenet_vitb16", model, batch=2048, warmup=5, lr=2e-3)
    return replace(
        base,
        data=replace(
            base.data,
            rand_augment="rand-m15-n2-mstd0.5",
            mixup=0.8,
            cutmix=1.0,
        ),
        train=replace(base.train, ema=0.9999),
    )


for _method in GOAT_IMAGENET:
    RECIPES[f"goat_imagenet_{_method}_vits16"] = partial(goat_imagenet, _method)
RECIPES.add_family("tiny", tiny, model_size="tiny_patch8")
RECIPES.add_family("photos", photographs, model_size="tiny_patch8")
for _task in SCENE_SHAPES:
    RECIPES.add_family(_task, partial(scene, _task), model_size="scene_patch8")
