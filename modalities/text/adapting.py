"""Training on models that `zoo.adapt` gave a prior, by transformers' Trainer; the command is
`priorzoo adapt`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from modalities.cost import Meter, activation_numbers
from modalities.decoder.model import IGNORED
from modalities.decoder.outside import OutsideDecoder, load_arm
from modalities.decoder.tokenizers import open_tokenizer, opened, split_arm
from modalities.text.data import PackedDataset, TextDataConfig, load_corpus
from modalities.text.tokenizers import load_tokenizer
from zoo.adapters.layer import prior_parameters
from zoo.files import read_tensors, replacing_path
from zoo.positions import Positions, document_starts, slices

HELDOUT_TOKENS = 1 << 14  # at most, but four rows
TOKENS = 8192  # most in one forward pass
CHECKPOINTED = 2048  # tokens of a pass from which layers are computed again in the backward pass
LOGITS = 512  # positions whose logits are made at a time
AGAIN = {"use_reentrant": False}


def open_adaptable(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A causal language model, its tokenizer, and the spec by which `load_tokenizer` knows that.

    name: a folder or hub name with any settings, FOLDER@yarn=2, or an adapter folder. ValueError
    where there is none.
    """
    tokenizer, (folder, settings) = open_tokenizer(name), split_arm(name)
    return (
        opened(folder, "causal LM", lambda _: load_arm(folder, settings, merge=False)),
        tokenizer,
        f"hf:{folder}",
    )


class AdaptationRows(Dataset):
    """Rows of packed documents as Trainer takes them: input_ids, labels and position_ids,
    (context,) int64 each.

    Positions restart with each document; a document's first token, and padding, are no targets.
    """

    def __init__(self, rows: PackedDataset, length: int) -> None:
        self.rows = rows
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"row {index} is outside 0..{self.length - 1}")
        row = self.rows[index]
        tokens = row["tokens"]
        segments = row["segments"]
        labels = tokens.masked_fill(document_starts(segments) | (segments < 0), IGNORED)
        return {
            "input_ids": tokens,
            "labels": labels,
            "position_ids": Positions.documents(segments[None]).index()[0],
        }


def adaptation_rows(
    tokenizer: str,
    source: str,
    context: int,
    count: int | None = None,
    *,
    seed: int = 0,
    facts_fraction: float = 0.0,
) -> AdaptationRows:
    """`count` shuffled rows to train on, some of which state facts; without a count the first of
    the held-out split, plain."""
    config = TextDataConfig(source, tokenizer, context - 1, facts_fraction=facts_fraction)
    corpus = load_corpus(config, "heldout" if count is None else "train")
    read = load_tokenizer(tokenizer)
    if count is not None:
        return AdaptationRows(
            PackedDataset(corpus, config.context, read, seed=seed, mix=config.row_mix), count
        )
    rows = PackedDataset(corpus, config.context, read, epochs=1)
    return AdaptationRows(rows, min(rows.epoch_windows, max(4, HELDOUT_TOKENS // context), 64))


def rows_at_once(batch: int, context: int) -> int:
    """Rows in one forward pass, a divisor of the batch."""
    return max(n for n in range(1, min(batch, max(1, TOKENS // context)) + 1) if batch % n == 0)


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, rows: AdaptationRows) -> float:
    """Nats a token."""
    decoder = OutsideDecoder(model, "model")
    total = 0.0
    count = 0
    for part in slices(len(rows), max(1, TOKENS // (rows.rows.context + 1))):
        batch = default_collate([rows[n] for n in range(part.start, part.stop)])
        nats, targets = summed_loss(
            decoder, {name: tensor.to(model.device) for name, tensor in batch.items()}
        )
        total = total + float(nats)
        count = count + targets
    return total / count


def summed_loss(decoder: OutsideDecoder, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """(Σ nats, targets) of a batch, whose logits are made a slice of positions at a time, and again
    in the backward pass."""
    tokens = inputs["input_ids"]
    places = inputs.get("position_ids")
    features = (
        decoder._read(tokens).last_hidden_state
        if places is None
        else decoder.packed_features(tokens, places)
    )
    targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)

    def part(features: Tensor, targets: Tensor) -> Tensor:
        logits = decoder.forward_head(features).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    total = features.new_zeros(())
    for at in slices(features.shape[1], LOGITS // features.shape[0]):
        total = total + checkpoint(part, features[:, at], targets[:, at], use_reentrant=False)
    return total, int((targets != IGNORED).sum())


def expected_cost(model: PreTrainedModel, context: int, rows: int) -> tuple[float, float]:
    """(Seconds, bytes of activations) of `rows` rows, forward and backward: time extrapolated from
    two short rows, bytes by shapes, without a T × S bias."""
    decoder = OutsideDecoder(model, "model")
    config = model.config.get_text_config()
    tokens = rows * context
    model.train()
    if tokens >= CHECKPOINTED:
        model.activation_checkpointing_enable(dict(AGAIN))
    points = []
    for length in (
        16,
        *sorted({min(context, 5 * LOGITS // 4), min(context, 2 * LOGITS)}),
    ):  # 16 warms up
        row = torch.ones(1, length, dtype=torch.int64, device=model.device)
        meter = Meter(model.device)
        with meter:
            summed_loss(decoder, {"input_ids": row, "labels": row})[0].backward()
        model.zero_grad()
        points.append((length, meter.seconds / length))
    (least, rate), (most, slower) = points[1], points[-1]
    slope = max(0.0, (slower - rate) / max(1, most - least))
    hidden = 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    shape = (config.num_hidden_layers, config.hidden_size, hidden)
    width = model.dtype.itemsize
    numbers = (
        tokens * activation_numbers(*shape, tokens >= CHECKPOINTED, width)
        + 3 * LOGITS * config.vocab_size
    )
    return tokens * (slower + slope * (context - most)), width * numbers


class _Trainer(Trainer):
    """Checkpoints hold the parameters that are trained; logits are never all there."""

    model: PreTrainedModel
    decoder: OutsideDecoder | None = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        if self.decoder is None:
            self.decoder = OutsideDecoder(self.model, "model")
            model.train()
        total, count = summed_loss(self.decoder, inputs)
        return total / (count if num_items_in_batch is None else num_items_in_batch)

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        named = {
            name: p.detach().cpu().contiguous()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }
        with replacing_path(Path(output_dir or "") / "trained.safetensors") as file:
            save_file(named, file)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self.model.load_state_dict(
            read_tensors(Path(resume_from_checkpoint) / "trained.safetensors"), strict=False
        )


class _Losses(TrainerCallback):
    """Calls `tell(step, steps, loss, steps of this process)` with each loss that is logged."""

    def __init__(self, tell: Callable[[int, int, float, int], None]) -> None:
        self.tell = tell
        self.before = 0

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        self.before = state.global_step

    def on_log(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        if "loss" in (logs := kwargs["logs"]):
            self.tell(
                state.global_step,
                state.max_steps,
                float(logs["loss"]),
                state.global_step - self.before,
            )


def train_on(
    model: PreTrainedModel,
    rows: AdaptationRows,
    folder: Path,
    *,
    batch: int,
    lr: float,
    prior_lr_scale: float,
    seed: int = 0,
    resume: bool = False,
    tell: Callable[[int, int, float, int], None] = lambda *_: None,
) -> None:
    """Train for one pass over `rows` in steps of `batch`.

    AdamW, betas 0.9 and 0.95, weight decay 0.1 but for priors, norms and biases, clipped at 1; the
    rate rises over a tenth of the steps, then falls by a cosine to 0. Priors learn at
    `prior_lr_scale` times `lr`. Checkpoints go to folder/checkpoints.
    tell: called with (step, steps, loss, steps since it began or was resumed) some twenty times.
    """
    torch.manual_seed(seed)
    size = rows_at_once(batch, rows.rows.context)
    steps = math.ceil(len(rows) / batch)
    checkpointed = size * rows.rows.context >= CHECKPOINTED
    settings = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=batch // size,
        activation_checkpointing=checkpointed,
        activation_checkpointing_kwargs=dict(AGAIN) if checkpointed else None,
        max_steps=steps,
        logging_first_step=True,
        logging_steps=max(1, steps // 20),
        save_steps=max(1, steps // 4),
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    trainer = _Trainer(model, settings, train_dataset=rows, callbacks=[_Losses(tell)])
    trainer.remove_callback(PrinterCallback)
    decayed = set(trainer.get_decay_parameter_names(model))
    priors = prior_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name in priors, name in decayed), []).append(parameter)
    trainer.optimizer = torch.optim.AdamW(
        [
            {
                "params": group,
                "lr": lr * (prior_lr_scale if prior else 1.0),
                "weight_decay": 0.1 if decays else 0.0,
            }
            for (prior, decays), group in groups.items()
        ],
        betas=(0.9, 0.95),
    )
    trainer.lr_scheduler = get_cosine_schedule_with_warmup(
        trainer.optimizer, max(1, steps // 10), steps
    )
    trainer.train(resume_from_checkpoint=resume or None)
