"""Training on models that `zoo.adapt` gave a prior, by transformers' Trainer; the command is `priorzoo adapt`."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    get_cosine_schedule_with_warmup,
)

from modalities.decoder.llama import as_llama
from modalities.decoder.model import IGNORED
from modalities.decoder.outside import open_causal_lm
from modalities.decoder.tokenizers import open_tokenizer
from modalities.text.data import PackedDataset, TextDataConfig, load_corpus
from modalities.text.hf import fast_tokenizer
from modalities.text.model import CausalLM
from modalities.text.tokenizers import load_tokenizer
from zoo.adapters.layer import prior_parameters
from zoo.catalog import create_model, list_models
from zoo.positions import Positions, document_starts

__all__ = ["AdaptationRows", "adaptation_rows", "open_adaptable", "train_on"]

HELDOUT_ROWS = 64
TOKENS = 8192  # most in one forward pass


def open_adaptable(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    """A causal language model, its tokenizer, and the spec by which `load_tokenizer` knows that.

    name: a folder or hub name, or a RoPE model of the zoo, which becomes a Llama. ValueError where there is none.
    """
    if name in list_models("text_*"):
        known = list_models("text_rope_*", pretrained=True)
        raise ValueError(f"{name} is untrained; RoPE models with weights: {', '.join(known)}")
    if name in list_models("text_*", pretrained=True):
        model = create_model(name)
        assert isinstance(model, CausalLM)
        return as_llama(model), fast_tokenizer(model.config.tokenizer), model.config.tokenizer
    return open_causal_lm(name), open_tokenizer(name), f"hf:{name}"


class AdaptationRows(Dataset):
    """Rows of packed documents as Trainer takes them: input_ids, labels and position_ids, (context,) int64 each.

    Positions restart with each document; a document's first token, and padding, are no targets.
    """

    def __init__(self, rows: PackedDataset, length: int) -> None:
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"row {index} is outside 0..{self.length - 1}")
        row = self.rows[index]
        tokens, segments = row["tokens"], row["segments"]
        labels = tokens.masked_fill(document_starts(segments) | (segments < 0), IGNORED)
        positions = Positions.documents(segments[None]).index()[0]
        return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def adaptation_rows(
    tokenizer: str, source: str, context: int, *, count: int | None = None, seed: int = 0, facts_fraction: float = 0.0
) -> AdaptationRows:
    """`count` shuffled rows to train on, some of which state facts; without a count the first of the held-out split, plain."""
    split = "heldout" if count is None else "train"
    config = TextDataConfig(source, tokenizer, context - 1, facts_fraction=facts_fraction)
    corpus, read = load_corpus(config, split), load_tokenizer(tokenizer)
    if count is not None:
        return AdaptationRows(PackedDataset(corpus, config.context, read, seed=seed, mix=config.row_mix), count)
    rows = PackedDataset(corpus, config.context, read, epochs=1)
    return AdaptationRows(rows, min(rows.epoch_windows, HELDOUT_ROWS))


def train_on(
    model: PreTrainedModel,
    rows: AdaptationRows,
    heldout: AdaptationRows,
    folder: Path,
    *,
    batch: int,
    lr: float,
    prior_lr_scale: float,
    seed: int = 0,
    resume: bool = False,
) -> tuple[float, float]:
    """Train for one pass over `rows` in steps of `batch`; the held-out loss before and after, in nats a token.

    AdamW, betas 0.9 and 0.95, weight decay 0.1 but for priors, norms and biases, clipped at 1; the rate rises over a tenth of
    the steps, then falls by a cosine to 0. Priors learn at `prior_lr_scale` times `lr`. Checkpoints go to folder/checkpoints.
    """
    torch.manual_seed(seed)
    size = max(1, min(batch, TOKENS // rows.rows.context))
    steps = math.ceil(rows.epoch_windows / batch)
    settings = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        gradient_accumulation_steps=math.ceil(batch / size),
        max_steps=steps,
        logging_steps=max(1, steps // 20),
        save_steps=max(1, steps // 4),
        save_total_limit=2,
        report_to="none",
        dataloader_pin_memory=False,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
    )
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=heldout)
    decayed = set(trainer.get_decay_parameter_names(model))
    priors = prior_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name in priors, name in decayed), []).append(parameter)
    trainer.optimizer = torch.optim.AdamW(
        [
            {"params": group, "lr": lr * (prior_lr_scale if prior else 1.0), "weight_decay": 0.1 if decays else 0.0}
            for (prior, decays), group in groups.items()
        ],
        betas=(0.9, 0.95),
    )
    trainer.lr_scheduler = get_cosine_schedule_with_warmup(trainer.optimizer, max(1, steps // 10), steps)
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume or None)
    return before, trainer.evaluate()["eval_loss"]
