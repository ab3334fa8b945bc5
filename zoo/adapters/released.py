"""Released causal LMs of transformers under other settings, and adapters of megabytes for them:
priors and LoRA in a folder.

An adapter folder has `adapter.json` (base, settings, priors, LoRA, how it was trained),
`adapter.safetensors` (what was trained) and a card. The base model stays where it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from zoo.adapters import ADAPTER, adapt, find_folder, hf, hub_name, limited_reach
from zoo.adapters.layer import RECORD, Request, has_priors, prior_parameters
from zoo.errors import Options, nearest, require
from zoo.files import data_folder, read_object, read_tensors, replacing_path, write_json, write_text

# Scalings of a rotation, and what transformers calls them.
SCALINGS = {"yarn": "yarn", "linear": "linear", "ntk": "dynamic"}
# Settings that are arguments of `limited_reach`.
REACH = ("window", "soft", "sinks")
TENSORS = "adapter.safetensors"
LORA = {"q_proj", "k_proj", "v_proj", "o_proj"}
CARD = """---
base_model: {base}
library_name: priorzoo
---
`zoo.load_adapted("FOLDER", base="{base}")` puts this adapter on its base; \
of a shipped one FOLDER is its name.

| | |
|---|---|
{rows}
"""


def open_released(
    name: str, settings: Mapping[str, str] | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A causal LM of a folder, a GGUF file or the hub under `settings`, on which a prior or LoRA
    may be put.

    Args:
        settings: `yarn`, `linear` or `ntk` (dynamic), a factor of its rotation; `window` or `soft`
            with `sinks`, as in `limited_reach`, a prior; `dtype`; any other key is a field of its
            configuration, such as rope_parameters.rope_theta.
        kwargs: of transformers' from_pretrained.

    Raises:
        ValueError: for settings that the model does not have.
    """
    values = {key: _value(key, text) for key, text in (settings or {}).items()}
    name = find_folder(name)
    source, file = hub_name(name)
    dtype = values.pop("dtype", torch.float32 if file else "auto")
    options: Options = {"dtype": dtype, **file, **kwargs}
    if values:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False, **file)
        for key, value in values.items():
            if key in SCALINGS:
                _scale_rotation(config, key, value)
            elif key not in REACH:
                _set_field(config, key, value)
        options["config"] = config
    model = hf.load_whole(
        AutoModelForCausalLM.from_pretrained, source, trust_remote_code=False, **options
    )
    if file:
        # Its weights are in `dtype` now, and can be saved.
        model.__dict__ |= {"hf_quantizer": None, "is_quantized": False}
        model.config.__dict__.pop("quantization_config", None)
    reach = {key: values.pop(key) for key in REACH if key in values}
    model.__dict__[RECORD] = {
        "base": {"name": _base_name(name)},
        "settings": values,
        "reach": reach,
        "priors": None,
        "lora": None,
        "training": {},
    }
    if reach:
        adapt(model, **limited_reach(**reach))
    return model


def _scale_rotation(config: PretrainedConfig, scaling: str, factor: float) -> None:
    """Set a scaling of the rotation in a configuration."""
    tables = getattr(config.get_text_config(), "rope_parameters", None)
    if not tables:
        raise ValueError(f"{config.model_type} has no rotation to scale by {scaling}={factor}")
    # Of a model with windows those layers alone that look further.
    table = tables.get("full_attention", tables)
    table.update(rope_type=SCALINGS[scaling], factor=float(factor))


def _base_name(name: str) -> str:
    """What an adapter calls its base: a name in the data folder, which any machine may have, the
    absolute path of another folder or file, or a name of the hub."""
    path = Path(name).absolute()
    if path.parent == data_folder().absolute():
        return path.name
    if path.exists():
        return str(path)
    return name


def add_lora(model: PreTrainedModel, rank: int) -> None:
    """Add LoRA of PEFT to the projections of attention, in place; B starts at 0, so that the output
    is the same."""
    require("peft", "LoRA", "hf")
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    names = {name.rpartition(".")[2] for name, _ in model.named_modules()} & LORA
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        # None: as PEFT has it for the architecture.
        target_modules=sorted(names) or None,
    )
    inject_adapter_in_model(config, model)
    # To float32: small steps are lost in bfloat16.
    cast_adapter_dtype(model, "default")
    model.__dict__[RECORD]["lora"] = rank


def merge_lora(model: PreTrainedModel) -> None:
    """Merge LoRA into the weights that it was added to, in place."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, module.get_base_layer())
    # It is a whole model from here on.
    model.__dict__.pop(RECORD, None)


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write what a model has besides its base, which `open_released` opened: priors, LoRA,
    settings."""
    priors = getattr(model.config, RECORD, None)
    record = model.__dict__[RECORD] | {"priors": priors}
    tensors = _trained(model)
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    record["base"] = {
        **_identity(model),
        "digest": weights_digest(model, priors),
        "window": window,
        **record["base"],
    }
    with replacing_path(folder / TENSORS) as file:
        save_file(tensors, file)
    write_record(record, folder)


def write_record(record: Options, folder: Path) -> None:
    """Write adapter.json and the card, with `measured`, rows of scores by length, where the record
    has them."""
    facts = {
        "base": record["base"]["name"],
        "settings": json.dumps(record["settings"]),
        "priors": json.dumps(record["priors"]),
        "LoRA rank": record["lora"] or "none",
        **record["training"],
    }
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    card = CARD.format(base=facts["base"], rows=rows)
    measured = record.get("measured")
    if measured:
        card += "\n" + _scores_table(measured)
    write_text(folder / "README.md", card)
    write_json(folder / ADAPTER, record)


def _scores_table(measured: Sequence[Options]) -> str:
    """Rows of scores as a table of Markdown."""
    columns: list[str] = []
    for row in measured:
        columns += [name for name in row if name not in columns]
    lines = [columns, ["---:"] * len(columns)]
    for row in measured:
        lines.append([str(row.get(name, "–")) for name in columns])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def load_adapter(
    folder: Path,
    *,
    base: str | None = None,
    merge: bool = False,
    settings: Options | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """As `zoo.load_adapted`; `settings` of `open_released` go over the adapter's own. Raises
    ValueError for a base of other sizes or, where something was trained, other weights."""
    record = read_object(folder / ADAPTER)
    tensors = read_tensors(folder / TENSORS)
    name = base or record["base"]["name"]
    stored = {key: json.dumps(value) for key, value in record["settings"].items()}
    try:
        model = open_released(name, {**stored, **(settings or {})}, **kwargs)
    except OSError as error:
        cure = "give base=FOLDER"
        if Path(name).name == name:
            cure = f"`priorzoo fetch-data text {name}`, or base=FOLDER"
        raise ValueError(
            f"{folder} is an adapter of {name}, which is no folder and not of the hub: {cure}"
        ) from error
    _check_base(model, name, record, folder, trained=bool(tensors))
    if record["lora"]:
        add_lora(model, record["lora"])
    priors = record["priors"]
    if priors:
        if has_priors(model):
            raise ValueError(f"{folder} has a prior: window, soft and sinks do not apply")
        hf.adapt(model, Request(**priors))
    for key in ("reach", "training"):
        if key in record:
            model.__dict__[RECORD][key] = record[key]
    expected = _trained(model)
    if expected.keys() != tensors.keys():
        odd = sorted(expected.keys() ^ tensors.keys())[0]
        raise ValueError(f"{folder / TENSORS} does not fit its {ADAPTER}: tensor {odd!r}")
    model.load_state_dict(tensors, strict=False)
    if merge and record["lora"]:
        merge_lora(model)
    return model.eval()


def _check_base(
    model: PreTrainedModel, name: str, record: Options, folder: Path, *, trained: bool
) -> None:
    """ValueError for a base of other sizes than the adapter's or, where something was trained, of
    other weights."""
    expected = record["base"]
    identity = _identity(model)
    # An adapter without a digest fits a base with any weights.
    if trained and expected["digest"]:
        identity["digest"] = weights_digest(model, record["priors"])
    for key, value in identity.items():
        if value != expected[key]:
            raise ValueError(
                f"{folder} is an adapter of {expected['name']}, and {name} is another model: "
                f"{key} {value}, expected {expected[key]}"
            )


def _trained(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters of priors that can be trained, and of LoRA; what the record tells is not among
    them."""
    priors = prior_parameters(model)
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (name in priors or ".lora_" in name):
            tensors[name] = parameter.detach().cpu().contiguous()
    return tensors


def _value(key: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if key in (*SCALINGS, *REACH) and not (type(value) in (int, float) and value > 0):
        raise ValueError(f"{key}={text}: expected a positive number")
    if key == "dtype" and not isinstance(getattr(torch, text, None), torch.dtype):
        raise ValueError(f"dtype={text}: expected one of torch, such as bfloat16")
    return value


def _set_field(config: PretrainedConfig, key: str, value: object) -> None:
    """Set a field of a configuration, or of its text model's, to which dots lead."""
    *path, last = key.split(".")
    first = path[0] if path else last
    place: Any = config if hasattr(config, first) else config.get_text_config()
    for part in path:
        place = place.get(part) if isinstance(place, dict) else getattr(place, part, None)
    if isinstance(place, dict) and last in place:
        place[last] = value
    elif not isinstance(place, dict) and hasattr(place, last):
        setattr(place, last, value)
    else:
        fields = {*config.to_dict(), *config.get_text_config().to_dict()}
        hint = nearest(key, {*SCALINGS, *REACH, "dtype", *fields})
        raise ValueError(f"{config.model_type} has no field {key!r} in its configuration; {hint}")


def _identity(model: PreTrainedModel) -> Options:
    """Architecture and sizes of a base."""
    config = model.config.get_text_config()
    sizes = [
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_size,
        config.vocab_size,
    ]
    return {"architecture": type(model).__name__, "sizes": sizes}


def weights_digest(model: PreTrainedModel, record: Options | None = None) -> str:
    """16 hex digits of the base's parameters in bfloat16, the same however wide a model is loaded;
    without learned positions where the record of its priors says that they are taken out."""
    digest = hashlib.sha256()
    priors = prior_parameters(model)
    removed: set[str] = set()
    if record is not None and not record["keep_rope"]:
        removed.update(hf.LEARNED)
    base = {}
    for name, parameter in model.named_parameters():
        if name not in priors:
            # PEFT has a layer with LoRA as its `base_layer`.
            base[name.replace(".base_layer.", ".")] = parameter
    for name, parameter in sorted(base.items()):
        if ".lora_" in name or not removed.isdisjoint(name.split(".")):
            continue
        digest.update(name.encode())
        weights = parameter.detach().cpu().bfloat16().contiguous().flatten()
        digest.update(weights.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
