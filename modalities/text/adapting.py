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
from modalities.text.config import TextDataConfig
from modalities.text.data import PackedDataset, load_corpus
from modalities.text.tokenizers import load_tokenizer
from modalities.tokenizers.outside import call_transformers, open_tokenizer, split_arm
from zoo.adapters.layer import prior_parameters
from zoo.files import read_tensors, replacing_path
from zoo.positions import Positions, document_starts, slices

# Tokens of held-out rows, at most; but four rows at least.
HELDOUT_TOKENS = 1 << 14
# Most tokens in one forward pass.
TOKENS = 8192
# Tokens of a pass from which layers are computed again in the backward pass.
CHECKPOINTED = 2048
CHECKPOINT_OPTIONS = {"use_reentrant": False}
# Positions whose logits are made at a time.
LOGITS = 512


def open_adaptable(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A causal language model, its tokenizer, and the spec by which `load_tokenizer` knows that.

    name: a folder or hub name with any settings, FOLDER@yarn=2, or an adapter folder. ValueError
    where there is none.
    """
    tokenizer = open_tokenizer(name)
    folder, settings = split_arm(name)
    model = call_transformers(
        folder, "causal LM", lambda _: load_arm(folder, settings, merge=False)
    )
    return model, tokenizer, f"hf:{folder}"


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
        no_targets = document_starts(segments) | (segments < 0)
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(no_targets, IGNORED),
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
    encoder = load_tokenizer(tokenizer)
    if count is not None:
        corpus = load_corpus(config, "train")
        rows = PackedDataset(corpus, config.context, encoder, seed=seed, mix=config.row_mix)
        return AdaptationRows(rows, count)
    rows = PackedDataset(load_corpus(config, "heldout"), config.context, encoder, epochs=1)
    most = min(64, max(4, HELDOUT_TOKENS // context))
    return AdaptationRows(rows, min(rows.epoch_windows, most))


def rows_at_once(batch: int, context: int) -> int:
    """Rows in one forward pass, a divisor of the batch."""
    most = min(batch, max(1, TOKENS // context))
    return max(rows for rows in range(1, most + 1) if batch % rows == 0)


@torch.inference_mode()
def heldout_loss(model: PreTrainedModel, rows: AdaptationRows) -> float:
    """Nats a token."""
    decoder = OutsideDecoder(model, "model")
    total = 0.0
    count = 0
    for part in slices(len(rows), max(1, TOKENS // (rows.rows.context + 1))):
        batch = default_collate([rows[n] for n in range(part.start, part.stop)])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        nats, targets = summed_loss(decoder, batch)
        total += float(nats)
        count += targets
    return total / count


def summed_loss(decoder: OutsideDecoder, inputs: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """(Σ nats, targets) of a batch, whose logits are made a slice of positions at a time, and again
    in the backward pass."""
    tokens = inputs["input_ids"]
    positions = inputs.get("position_ids")
    if positions is None:
        features = decoder._read(tokens).last_hidden_state
    else:
        features = decoder.packed_features(tokens, positions)
    targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)

    def loss_of(features: Tensor, targets: Tensor) -> Tensor:
        logits = decoder.forward_head(features).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")

    total = features.new_zeros(())
    for part in slices(features.shape[1], LOGITS // features.shape[0]):
        total = total + checkpoint(
            loss_of, features[:, part], targets[:, part], use_reentrant=False
        )
    return total, int((targets != IGNORED).sum())


def expected_cost(model: PreTrainedModel, context: int, rows: int) -> tuple[float, float]:
    """(Seconds, bytes of activations) of `rows` rows, forward and backward: time extrapolated from
    two short rows, bytes by shapes, without a T × S bias."""
    decoder = OutsideDecoder(model, "model")
    config = model.config.get_text_config()
    tokens = rows * context
    checkpointed = tokens >= CHECKPOINTED
    model.train()
    if checkpointed:
        model.activation_checkpointing_enable(dict(CHECKPOINT_OPTIONS))
    shorter = min(context, 5 * LOGITS // 4)
    longer = min(context, 2 * LOGITS)
    # The first pass warms up.
    _seconds_per_token(model, decoder, 16)
    rate = _seconds_per_token(model, decoder, shorter)
    slope = 0.0
    if longer > shorter:
        longer_rate = _seconds_per_token(model, decoder, longer)
        slope = max(0.0, (longer_rate - rate) / (longer - shorter))
        rate = longer_rate
    seconds = tokens * (rate + slope * (context - longer))
    hidden = 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    width = model.dtype.itemsize
    per_token = activation_numbers(
        config.num_hidden_layers,
        config.hidden_size,
        hidden,
        checkpointed,
        width,
    )
    # Of LOGITS positions at a time: logits, their softmax, their gradient.
    logits = 3 * LOGITS * config.vocab_size
    return seconds, width * (tokens * per_token + logits)


def _seconds_per_token(model: PreTrainedModel, decoder: OutsideDecoder, length: int) -> float:
    """Wall time of forward and backward of a row, per token."""
    row = torch.ones(1, length, dtype=torch.int64, device=model.device)
    meter = Meter(model.device)
    with meter:
        summed_loss(decoder, {"input_ids": row, "labels": row})[0].backward()
    model.zero_grad()
    return meter.seconds / length


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
        # Targets of all micro-batches of the step, where Trainer counts them.
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        return total / count

    def _save(
        self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None
    ) -> None:
        trained = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                trained[name] = parameter.detach().cpu().contiguous()
        with replacing_path(Path(output_dir or "") / "trained.safetensors") as file:
            save_file(trained, file)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        trained = read_tensors(Path(resume_from_checkpoint) / "trained.safetensors")
        self.model.load_state_dict(trained, strict=False)


class _Losses(TrainerCallback):
    """Calls `tell(step, steps, loss, steps of this process)` with each loss that is logged."""

    def __init__(self, tell: Callable[[int, int, float, int], None]) -> None:
        self.tell = tell
        self.first_step = 0

    def on_train_begin(
        self, args: object, state: TrainerState, control: object, **kwargs: Any
    ) -> None:
        self.first_step = state.global_step

    def on_log(self, args: object, state: TrainerState, control: object, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            step = state.global_step
            self.tell(step, state.max_steps, float(logs["loss"]), step - self.first_step)


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
        activation_checkpointing_kwargs=dict(CHECKPOINT_OPTIONS) if checkpointed else None,
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
    trainer = _Trainer(model, settings, train_dataset=rows, callbacks=[_Losses(tell)])
    trainer.remove_callback(PrinterCallback)
    decayed = set(trainer.get_decay_parameter_names(model))
    groups = _parameter_groups(model, decayed, lr, prior_lr_scale)
    trainer.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    trainer.lr_scheduler = get_cosine_schedule_with_warmup(
        trainer.optimizer, max(1, steps // 10), steps
    )
    trainer.train(resume_from_checkpoint=resume or None)


def _parameter_groups(
    model: PreTrainedModel, decayed: set[str], lr: float, prior_lr_scale: float
) -> list[dict[str, Any]]:
    """AdamW's groups of the parameters that are trained: priors or not, decayed or not."""
    priors = prior_parameters(model)
    parameters: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = (name in priors, name in decayed)
            parameters.setdefault(key, []).append(parameter)
    groups = []
    for (is_prior, is_decayed), members in parameters.items():
        group = {
            "params": members,
            "lr": lr * prior_lr_scale if is_prior else lr,
            "weight_decay": 0.1 if is_decayed else 0.0,
        }
        groups.append(group)
    return groups
