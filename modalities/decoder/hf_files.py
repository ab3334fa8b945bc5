"""The files of a saved folder beside weights and config: tokenizer, model card, and the code for `trust_remote_code`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from modalities.decoder.hf import PriorzooConfig

__all__ = ["REMOTE_CODE", "complete_folder", "make_fast"]

REMOTE_CODE = "modeling_priorzoo"  # the file that auto_map names
AUTOMATIC = "automatically generated"  # in the card that `transformers` makes for a repository without one


def make_fast(
    backend: Tokenizer, *, bos: int, pad: int, eos: int | None = None, **options: Any
) -> PreTrainedTokenizerFast:
    """A tokenizer that puts `bos` before a text and pads on the left.

    Args:
        backend: its post-processor is replaced.
        bos, pad, eos: ids in its vocabulary.
        options: of `PreTrainedTokenizerFast`.
    """
    names = {n: backend.id_to_token(n) for n in (bos, pad, eos) if n is not None}
    backend.post_processor = processors.TemplateProcessing(
        single=f"{names[bos]} $A", pair=f"{names[bos]} $A $B", special_tokens=[(names[bos], bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=names[bos],
        eos_token=None if eos is None else names[eos],
        pad_token=names[pad],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )


def complete_folder(folder: Path, config: PriorzooConfig) -> None:
    """Write what the folder lacks: the tokenizer's files, README.md, the file that auto_map names.

    Where the tokenizer's own files are missing, a warning says so.
    """
    kind, spec = type(config), (config.architecture or {})["tokenizer"]
    if not (folder / "tokenizer_config.json").exists():
        try:
            kind.fast_tokenizer(spec).save_pretrained(folder)
        except FileNotFoundError as error:
            logging.getLogger(__name__).warning("%s is saved without a tokenizer: %s", folder, error)
    card = folder / "README.md"
    if not card.exists() or AUTOMATIC in card.read_text():
        card.write_text(model_card(config))
    classes = [target.split(".")[1] for target in config.auto_map.values()]
    (folder / f"{REMOTE_CODE}.py").write_text(
        '"""Loads this model with the installed package priorzoo, for `trust_remote_code=True`."""\n\n'
        f"from {kind.__module__} import {', '.join(sorted(classes))}  # noqa: F401\n"
    )


def model_card(config: PriorzooConfig) -> str:
    """Markdown with YAML front matter, as the hub reads it: what the model is, and how it is loaded."""
    own = config.architecture or {}
    position = own["position"] if isinstance(own["position"], str) else " ".join(own["position"])
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- priorzoo
- {config.model_type}
---

# A causal decoder of priorzoo

| | |
|---|---|
| position method | {position}{", with SSMax" if own["ssmax"] else ""} |
| layers, width, heads | {own["num_layers"]}, {own["dim"]}, {own["num_heads"]} |
| training context | {own["train_context"]} tokens |
| tokenizer | {own["tokenizer"]} |

The package priorzoo must be installed; without an import of it, pass `trust_remote_code=True`.

```python
from transformers import pipeline

generate = pipeline("text-generation", "FOLDER_OR_REPOSITORY", trust_remote_code=True)
```

What it was trained on, how it was measured, and its licence are for its author to say here.
"""
