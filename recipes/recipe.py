"""The dataclasses of a recipe: one training set-up, with nothing of a machine in it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic

from typing_extensions import TypeVar

from zoo.errors import LARGEST_SEED, bounded

# Of a step, over all ranks.
MOST_SAMPLES = 2**22
# An object of a JSON file.
Json = dict[str, Any]
# A modality's data section.
Data = TypeVar("Data", default=Any)


@dataclass
class Model:
    """A model of the zoo's registry, by name, with overrides of its architecture."""

    name: str
    # --set model.options.dim=64
    options: Json = field(default_factory=dict)
    # Whose weights are the start: a run or save_pretrained folder, a model with weights
    # (text_ggd_ssmax_tiny.facts), or "newest:RECIPE", the newest finished run of that recipe.
    init_from: str = ""


@dataclass
class Optim:
    """Optimiser and learning-rate schedule.

    The rate warms up linearly. Then it falls along a cosine or a line from `lr` to `floor * lr`,
    or it stays constant.
    """

    # adamw, radam, or muon: Muon for the layers' matrices, AdamW for all other parameters.
    name: str = "adamw"
    lr: float = 2e-3
    # Of Adam; Muon's momentum is DeepSpeed's 0.95.
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = bounded(1e-8, 0, 1)
    # On matrices only; see optim.parameter_groups.
    weight_decay: float = bounded(0.1, 0, math.inf)
    # Learning rate of the priors' parameters and SSMax's s, as a multiple of lr.
    prior_lr_scale: float = 1.0
    # Learning rate of the matrices that Muon trains, as a multiple of lr.
    muon_lr_scale: float = 5.0
    schedule: str = "cosine"
    # Steps.
    warmup: int = bounded(50, 0, 2**40)
    # A fraction of lr, reached at the last step.
    floor: float = bounded(0.1, 0, 1)


@dataclass
class Train:
    """The training loop.

    `batch` is the whole batch in samples:
    micro_batch × accumulation × number of ranks / sequence_parallel.
    """

    steps: int = bounded(800, 1, 2**40)
    batch: int = bounded(32, 1, MOST_SAMPLES)
    # Samples per rank and forward pass; derived where it is None.
    micro_batch: int | None = bounded(None, 1, MOST_SAMPLES)
    # Forward passes per step; derived where it is None.
    accumulation: int | None = bounded(None, 1, MOST_SAMPLES)
    # auto is fp32 on the CPU and bf16 on CUDA; fp16 has a dynamic loss scale.
    precision: str = "auto"
    # Compile the model by torch.compile, through DeepSpeed's engine; the first step takes minutes.
    compile: bool = False
    # Ranks that share each line of tokens, by DeepSpeed-Ulysses.
    sequence_parallel: int = bounded(1, 1, 2**12)
    # In bf16 and fp16 0 becomes 1, which shares the optimiser's float32 copies among the ranks.
    zero_stage: int = 0
    # Gradient norm; 0 switches clipping off.
    clip: float = bounded(1.0, 0, math.inf)
    # Decay of a moving average of the weights, which is then evaluated and exported; 0: none.
    ema: float = bounded(0.0, 0, 1)
    seed: int = bounded(0, -LARGEST_SEED, LARGEST_SEED)
    log_every: int = bounded(10, 1, 2**40)
    # Steps; 0: at the end only.
    save_every: int = bounded(200, 0, 2**40)
    # Checkpoints that stay on disk.
    keep: int = bounded(2, 1, 2**20)


@dataclass
class Evaluate:
    """What is measured during training.

    every, samples: held-out loss over `samples` samples every `every` steps (0: never) and at the
        end.
    during: evaluators of `priorzoo evaluate` by name, each with the number of steps between its
        runs, or with its settings and "every":
        {"passkey": 200}, {"passkey": {"every": 200, "lengths": [128, 512], "samples": 1}}.
    """

    every: int = bounded(100, 0, 2**40)
    samples: int = bounded(128, 1, 2**40)
    during: Json = field(default_factory=dict)


@dataclass
class Recipe(Generic[Data]):
    """One training set-up.

    `data` is the modality's own dataclass (for text: modalities.text.config.TextDataConfig).
    """

    name: str
    modality: str
    model: Model
    data: Data
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
