"""Checkpoints that the papers' authors trained, as models of ours with the same logits.

`bam`: the ten models of BAM's code (arXiv 2505.22842): bam, alibi, rotary, nope and sinusoidal, each with `_ssmax` and without.
Its training writes model.pt and, beside it, args.json, which says what the tensors do not: the method, the number of heads, the
training context. `cable`: the model of CABLE's first code (arXiv 2503.08067), whose biases are not weighted, whose gate is a
softplus, and whose content is not divided by √d.

Both write the state dict, or one as "model" with a "config" beside it. The sizes are read off the tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modalities.text.model import CausalLM, TextConfig
from zoo.inputs import read_object
from zoo.naming import nearest
from zoo.released import Tensors, read_released

__all__ = ["BAM_METHODS", "FAMILIES", "import_released"]

FAMILIES = ("bam", "cable")
# By BAM's names: the method, and what its code sets of it. ALiBi's bias is added outside SSMax's scale.
BAM_METHODS: dict[str, dict[str, Any]] = {
    "bam": {"position": "ggd"},
    "alibi": {"position": "alibi", "lanes": "beside", "scale_prior": False},
    "rotary": {"position": "rope", "position_options": {"theta": 500_000.0}},
    "nope": {"position": "nope"},
    "sinusoidal": {"position": "sinusoidal", "position_options": {"columns": "alternating"}},
}
BAM_METHODS |= {f"{method}_ssmax": options | {"ssmax": True} for method, options in BAM_METHODS.items()}
# Options of a method by what args.json calls them.
BAM_SETTINGS = {
    "ggd": {"train_alpha": "train_scale", "train_beta": "train_shape", "train_mu": "train_loc"},
    "rope": {"theta": "rope_theta"},
    "sinusoidal": {"theta": "sinusoidal_theta"},
}
BAM_TOKENIZER = "data/mistral-v0.3/tokenizer.json"

# Released names and ours, inside a layer; one tensor there may be several of ours, one below the other.
BAM_LAYER: dict[str, tuple[str, ...]] = {
    "attention_norm.weight": ("attention_norm.weight",),
    "attention.wq.weight": ("attention.query.weight",),
    "attention.wk.weight": ("attention.key.weight",),
    "attention.wv.weight": ("attention.value.weight",),
    "attention.wo.weight": ("attention.out.weight",),
    "ffn_norm.weight": ("mlp_norm.weight",),
    "feed_forward.w1.weight": ("mlp.gate.weight",),
    "feed_forward.w3.weight": ("mlp.up.weight",),
    "feed_forward.w2.weight": ("mlp.down.weight",),
}
BAM_PRIOR = {"scale": "theta_alpha", "shape": "theta_beta", "loc": "theta_mu"}  # each (1, H, 1, 1)
CABLE_LAYER: dict[str, tuple[str, ...]] = {
    f"{theirs}.{kind}": tuple(f"{name}.{kind}" for name in ours)
    for theirs, ours in {
        "ln_1": ("attention_norm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.h_attn": ("attention.prior.decay",),
        "attn.c_proj": ("attention.out",),
        "ln_2": ("mlp_norm",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    }.items()
    for kind in ("weight", "bias")
}


@dataclass(frozen=True)
class _Asked:
    """What the caller says of a file; see `import_released`."""

    method: str | None
    heads: int | None
    context: int | None
    tokenizer: str | None


def import_released(
    family: str,
    path: str | os.PathLike[str],
    *,
    method: str | None = None,
    heads: int | None = None,
    context: int | None = None,
    tokenizer: str | None = None,
) -> CausalLM:
    """The model of a released checkpoint: the same logits, up to rounding.

    BAM's sinusoidal models count positions from the start of a packed row, ours from that of a document.

    Args:
        family: "bam" or "cable".
        path: .safetensors, or a file of torch that needs no code to be read. Of bam an args.json in its folder is read too.
        method: of bam, one of `BAM_METHODS`; needed where neither args.json nor the tensors of a prior tell it.
        heads: H; needed where neither per-head tensors nor args.json say it.
        context: tokens of a training row; needed where args.json, or a config in the file, does not say it.
        tokenizer: spec of `load_tokenizer`; None: Mistral v0.3's of bam, GPT-2's of cable.

    Raises:
        OSError: where the file cannot be opened.
        ValueError: for a file that cannot be read without running code from it; a tensor that is missing, of another shape or
            unknown; a fact that is missing, or that two sources say differently; a model that this project does not have.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r} of released checkpoints; {nearest(family, FAMILIES)}")
    tensors, config = read_released(path)
    asked = _Asked(method, heads, context, tokenizer)
    if family == "cable":
        return _cable(tensors, config, asked)
    beside = Path(path).with_name("args.json")
    return _bam(tensors, _read_json(beside) if beside.is_file() else {"model_args": config}, asked)


def _bam(tensors: Tensors, args: Mapping[str, Any], asked: _Asked) -> CausalLM:
    said, first = args.get("model_args", {}), "layers.0.attention"
    ssmax, shared, own = (name in tensors for name in (f"{first}.seq_scale", "prior.shape", f"{first}.prior.shape"))
    untold = [name for name in BAM_METHODS if name.endswith("_ssmax") == ssmax and not name.startswith("bam")]
    by_tensors = ("bam_ssmax" if ssmax else "bam") if shared or own else None
    method = _agreed(
        f"the method of {tensors.source}",
        {"method": asked.method, "args.json": args.get("args", {}).get("position_encoding"), "its tensors": by_tensors},
        f"give method: {', '.join(untold)}",
    )
    if method not in BAM_METHODS:
        raise ValueError(f"unknown method {method!r} of BAM's code; {nearest(str(method), BAM_METHODS)}")
    per_head = [name for name in (f"{first}.seq_scale", "prior.shape", f"{first}.prior.shape") if name in tensors]
    heads = _number(
        f"the number of heads of {tensors.source}",
        {"heads": asked.heads, "args.json": said.get("n_heads")} | {n: tensors.shape(n, 4)[1] for n in per_head},
        "give heads: a number that divides its width",
    )
    model = CausalLM(_bam_config(tensors, said, asked, method, heads, shared))
    names: dict[str, tuple[str, ...]] = {
        "tok_embeddings.weight": ("embedding.weight",),
        "norm.weight": ("norm.weight",),
        "output.weight": ("head.weight",),
    }
    state = _take(tensors, names | _layers(BAM_LAYER, "layers", model), model)
    width, layers = model.config.dim // heads, [f"layers.{n}.attention" for n in range(model.config.num_layers)]
    headwise = {f"{layer}.seq_scale": f"{layer}.ssmax.s" for layer in layers} if model.config.ssmax else {}
    if model.config.position == "ggd":
        priors = {"prior": f"{first}.prior"} if shared else {f"{layer}.prior": f"{layer}.prior" for layer in layers}
        headwise |= {f"{there}.{t}": f"{here}.{o}" for there, here in priors.items() for t, o in BAM_PRIOR.items()}
    state |= {ours: tensors.take(theirs, 1, heads, 1, 1).flatten() for theirs, ours in headwise.items()}
    if model.config.position == "rope":
        turned = [name for name in state if name.endswith(("query.weight", "key.weight"))]
        state |= {name: _halves(state[name], width) for name in turned}
    tensors.finish(f"BAM's model {method}")
    model.load_state_dict(state)
    return model


def _bam_config(
    tensors: Tensors, said: Mapping[str, Any], asked: _Asked, method: str, heads: int, shared: bool
) -> TextConfig:
    vocabulary, dim = tensors.shape("tok_embeddings.weight", 2)
    width = _width(tensors, dim, heads)
    if said.get("norm_eps", 1e-5) != 1e-5:
        raise ValueError(f"norm_eps is {said['norm_eps']} in args.json; the norms of our models have 1e-5")
    options: dict[str, Any] = {"position_options": {}} | BAM_METHODS[method]
    read = {ours: said[theirs] for ours, theirs in BAM_SETTINGS.get(options["position"], {}).items() if theirs in said}
    options["position_options"] = options["position_options"] | read
    if options["position"] == "ggd":
        options |= {"share_prior": shared, "scale_prior": said.get("ssmax_prior", True)}
    return TextConfig(
        vocab_size=vocabulary,
        dim=dim,
        num_layers=tensors.count(r"layers\.(\d+)\."),
        num_heads=heads,
        num_kv_heads=max(tensors.shape("layers.0.attention.wk.weight", 2)[0] // width, 1),
        hidden_dim=tensors.shape("layers.0.feed_forward.w1.weight", 2)[0],
        train_context=_context(tensors, {"context": asked.context, "args.json": said.get("max_seq_len")}),
        tied=False,
        tokenizer=asked.tokenizer or BAM_TOKENIZER,
        **options,
    )


def _cable(tensors: Tensors, config: Mapping[str, Any], asked: _Asked) -> CausalLM:
    if asked.method is not None:
        raise ValueError(f"method={asked.method!r}: files of cable have one method; it is bam's files that need one")
    # Tied: files of torch have the matrix under both names, .safetensors under one.
    matrices = [name for name in ("transformer.wte.weight", "lm_head.weight") if name in tensors]
    matrices = matrices or ["transformer.wte.weight"]
    vocabulary, dim = tensors.shape(matrices[0], 2)
    decay = "transformer.h.0.attn.h_attn.weight"
    heads = _number(
        f"the number of heads of {tensors.source}",
        {"heads": asked.heads, "its config": config.get("n_head"), decay: tensors.shape(decay, 2)[0]},
        "",
    )
    model = CausalLM(
        TextConfig(
            vocab_size=vocabulary,
            dim=dim,
            num_layers=tensors.count(r"transformer\.h\.(\d+)\."),
            num_heads=heads,
            hidden_dim=tensors.shape("transformer.h.0.mlp.c_fc.weight", 2)[0],
            style="gpt2",
            position="cable",
            position_options={"weighted": False, "gate": "softplus"},
            train_context=_context(tensors, {"context": asked.context, "its config": config.get("block_size")}),
            tokenizer=asked.tokenizer or "gpt2",
            lanes="beside",
            logit_options={"temperature": 1 / math.sqrt(_width(tensors, dim, heads))},
        )
    )
    embeddings = [tensors.take(name, vocabulary, dim) for name in matrices]
    if not all(torch.equal(embeddings[0], other) for other in embeddings[1:]):
        raise ValueError(f"{tensors.source}: {' and '.join(matrices)} differ; CABLE's model has one matrix for both")
    names = {f"transformer.ln_f.{kind}": (f"norm.{kind}",) for kind in ("weight", "bias")}
    state = _take(tensors, names | _layers(CABLE_LAYER, "transformer.h", model), model)
    tensors.finish("CABLE's model")
    model.load_state_dict(state | {"embedding.weight": embeddings[0]})
    return model


def _agreed(what: str, said: Mapping[str, Any], otherwise: str) -> Any:
    """The one value that all who say something say. Raises ValueError where they differ, or nobody does."""
    values = [(who, value) for who, value in said.items() if value is not None]
    if not values:
        raise ValueError(f"{what} is not in the file; {otherwise}")
    for who, value in values[1:]:
        if value != values[0][1]:
            raise ValueError(f"{what}: {values[0][1]!r} by {values[0][0]}, {value!r} by {who}")
    return values[0][1]


def _number(what: str, said: Mapping[str, Any], otherwise: str) -> int:
    """As `_agreed`, of a number above 0."""
    value = _agreed(what, said, otherwise)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a number above 0, got {value!r}")
    return value


def _context(tensors: Tensors, said: Mapping[str, Any]) -> int:
    return _number(f"the training context of {tensors.source}", said, "give context: the tokens of a training row")


def _width(tensors: Tensors, dim: int, heads: int) -> int:
    """D, of a head."""
    if dim % heads:
        raise ValueError(f"{heads} heads do not divide the width {dim} of {tensors.source}")
    return dim // heads


def _layers(names: Mapping[str, tuple[str, ...]], where: str, model: CausalLM) -> dict[str, tuple[str, ...]]:
    """The names of one layer, for every layer."""
    return {
        f"{where}.{n}.{theirs}": tuple(f"layers.{n}.{name}" for name in ours)
        for n in range(len(model.layers))
        for theirs, ours in names.items()
    }


def _take(tensors: Tensors, names: Mapping[str, tuple[str, ...]], model: CausalLM) -> dict[str, Tensor]:
    """Released tensors by our names and with our shapes."""
    own = model.state_dict()
    state: dict[str, Tensor] = {}
    for theirs, ours in names.items():
        rows, inner = [len(own[name]) for name in ours], own[ours[0]].shape[1:]
        state |= zip(ours, tensors.take(theirs, sum(rows), *inner).split(rows), strict=True)
    return state


def _halves(weight: Tensor, width: int) -> Tensor:
    """Rows of each head of `width` from column pairs (2n, 2n + 1), which BAM's RoPE turns, to (n, n + width/2)."""
    return weight.unflatten(0, (-1, width // 2, 2)).transpose(1, 2).reshape(weight.shape)


def _read_json(path: Path) -> Mapping[str, Any]:
    found = read_object(path)
    if all(isinstance(value, Mapping) for value in found.values()):
        return found
    raise ValueError(
        f"{path}: expected what BAM's training writes, settings by name in args, dataset_args and model_args"
    )
