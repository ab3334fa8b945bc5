"""Released checkpoints: dense transcriptions of the released code's formulas, in its names, against the models made of them."""

from __future__ import annotations

import json
import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modalities.text.model import CausalLM
from modalities.text.released import BAM_METHODS, import_released
from recipes import cli
from recipes import import_released as command
from zoo import Positions
from zoo.released import goat_attention

V, C, H, LAYERS, HIDDEN, CONTEXT, LENGTH = 50, 48, 6, 2, 40, 32, 21
State = dict[str, Tensor]


def drawn(shapes: dict[str, tuple[int, ...]]) -> State:
    """Norms near 1, matrices that keep the size of what they multiply, everything else of size 1/2."""
    random = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=random)
        state[name] = 1 + 0.2 * value if "norm" in name or "ln_" in name else 0.5 * value
        if len(shape) == 2:
            state[name] = 1.5 * value / math.sqrt(shape[1])
    return state


def bam_state(method: str, *, shared: bool = True, kv_heads: int = H) -> State:
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (V, C), "norm.weight": (C,), "output.weight": (V, C)}
    priors = ["prior"] * shared or [f"layers.{n}.attention.prior" for n in range(LAYERS)]
    if method.startswith("bam"):
        shapes |= {f"{prior}.{name}": (1, H, 1, 1) for prior in priors for name in ("shape", "scale", "loc")}
    for n in range(LAYERS):
        layer = f"layers.{n}"
        shapes |= {f"{layer}.attention_norm.weight": (C,), f"{layer}.ffn_norm.weight": (C,)}
        shapes |= {f"{layer}.attention.{w}.weight": (C, C) for w in ("wq", "wo")}
        shapes |= {f"{layer}.attention.{w}.weight": (C // H * kv_heads, C) for w in ("wk", "wv")}
        shapes |= {f"{layer}.feed_forward.{w}.weight": (HIDDEN, C) for w in ("w1", "w3")}
        shapes |= {f"{layer}.feed_forward.w2.weight": (C, HIDDEN)}
        shapes |= {f"{layer}.attention.seq_scale": (1, H, 1, 1)} if method.endswith("_ssmax") else {}
    return drawn(shapes)


def cable_state() -> State:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (V, C)}
    shapes |= {"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)}
    linear = {"attn.c_attn": (3 * C, C), "attn.h_attn": (H, C), "attn.c_proj": (C, C)}
    linear |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    for layer in (f"transformer.h.{n}" for n in range(LAYERS)):
        shapes |= {f"{layer}.{norm}.{kind}": (C,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, shape in linear.items():
            shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[:1]}
    state = drawn(shapes)
    return state | {"lm_head.weight": state["transformer.wte.weight"]}


# ------------------------------------------------------------------------------------------ the released formulas, float64


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def heads_of(x: Tensor, count: int) -> Tensor:
    """(B, T, n·D) → (B, count, T, D); fewer heads are repeated."""
    x = x.unflatten(-1, (-1, C // H)).transpose(1, 2)
    return x.repeat_interleave(count // x.shape[1], 1)


def turned(x: Tensor, theta: float) -> Tensor:
    """Pairs of neighbouring columns, as complex numbers times e^(i·position·ω)."""
    width = x.shape[-1]
    angle = torch.arange(x.shape[2])[:, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(angle**0, angle)
    ).flatten(3)


def bam_logits(
    state: State, method: str, tokens: Tensor, documents: Tensor | None = None, theta: float = 5e5
) -> Tensor:
    w = {name: value.double() for name, value in state.items()}
    kind, length = method.removesuffix("_ssmax"), tokens.shape[1]
    documents = torch.zeros_like(tokens) if documents is None else documents
    seen = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    x, at = w["tok_embeddings.weight"][tokens], torch.arange(length).double()
    if kind == "sinusoidal":
        angle = at[:, None] * 10000.0 ** (-torch.arange(C).double() / C)
        x = x + torch.where(torch.arange(C) % 2 == 0, angle.sin(), angle.cos())
    for layer in (f"layers.{n}" for n in range(LAYERS)):
        y = rms(x, w[f"{layer}.attention_norm.weight"])
        q, k, v = (heads_of(y @ w[f"{layer}.attention.{name}.weight"].T, H) for name in ("wq", "wk", "wv"))
        if kind == "rotary":
            q, k = turned(q, theta), turned(k, theta)
        logits, added = q @ k.transpose(-1, -2) / math.sqrt(C // H), torch.zeros(1, dtype=torch.float64)
        if kind == "alibi":
            slopes = [2.0 ** (-2 * (h + 1)) for h in range(4)] + [2.0 ** -(2 * h + 1) for h in range(H - 4)]
            added = -torch.tensor(slopes).double()[:, None, None] * (at[:, None] - at).abs()
        if kind == "bam":
            prior = "prior" if "prior.shape" in w else f"{layer}.attention.prior"
            shape, scale, loc = (w[f"{prior}.{name}"] for name in ("shape", "scale", "loc"))
            added = -(((at - at[:, None] - (loc.exp() - (-loc).exp())).abs() + 1e-5) ** shape) * scale.exp()
        row = torch.ones(1, dtype=torch.float64)
        if method.endswith("_ssmax"):
            row = seen.sum(-1, keepdim=True).double().log() * w[f"{layer}.attention.seq_scale"]
        logits = (logits + added) * row if kind == "bam" else logits * row + added
        out = logits.masked_fill(~seen, -math.inf).softmax(-1) @ v
        x = x + out.transpose(1, 2).flatten(2) @ w[f"{layer}.attention.wo.weight"].T
        y, mlp = rms(x, w[f"{layer}.ffn_norm.weight"]), f"{layer}.feed_forward"
        gate = y @ w[f"{mlp}.w1.weight"].T
        x = x + (gate * gate.sigmoid() * (y @ w[f"{mlp}.w3.weight"].T)) @ w[f"{mlp}.w2.weight"].T
    return rms(x, w["norm.weight"]) @ w["output.weight"].T


def cable_logits(state: State, tokens: Tensor) -> Tensor:
    w = {name: value.double() for name, value in state.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return rms(x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x, length = w["transformer.wte.weight"][tokens], tokens.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in (f"transformer.h.{n}" for n in range(LAYERS)):
        y = norm(x, f"{layer}.ln_1")
        q, k, v = (heads_of(part, H) for part in linear(y, f"{layer}.attn.c_attn").chunk(3, -1))
        b = -(1 + linear(y, f"{layer}.attn.h_attn").exp()).log().cumsum(1).transpose(1, 2)
        logits = (q @ k.transpose(-1, -2) + b[..., :, None] - b[..., None, :]).masked_fill(hidden, -math.inf)
        x = x + linear((logits.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{layer}.attn.c_proj")
        up = linear(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc")
        up = 0.5 * up * (1 + (math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)).tanh())
        x = x + linear(up, f"{layer}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


# ------------------------------------------------------------------------------------------ files


TOKENS = torch.randint(V, (2, LENGTH), generator=torch.Generator().manual_seed(1))
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 4 + [2] * 8, [0] * 20 + [1]])


def args_json(method: str, **settings: Any) -> str:
    """What BAM's training writes beside model.pt."""
    model = {"dim": C, "n_layers": LAYERS, "n_heads": H, "max_seq_len": CONTEXT, "norm_eps": 1e-5} | settings
    return json.dumps({"args": {"position_encoding": method}, "dataset_args": {}, "model_args": model})


def compiled(state: State) -> State:
    """The names of a compiled model inside DDP."""
    return {f"module._orig_mod.{name}": value for name, value in state.items()}


def written(path: Path, state: State) -> Path:
    if path.suffix == ".safetensors":
        save_file({n: v for n, v in state.items() if n != "lm_head.weight"}, path)  # it has one name for tied matrices
    else:
        torch.save(state, path)
    return path


def loaded(folder: Path) -> CausalLM:
    return CausalLM.from_pretrained(folder).double().eval()


@torch.no_grad()
def close(model: CausalLM, expected: Tensor, **given: Tensor) -> None:
    torch.testing.assert_close(model(TOKENS, **given).double(), expected, atol=2e-6, rtol=1e-6)


# ------------------------------------------------------------------------------------------ BAM


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("method", BAM_METHODS)
def test_bams_models_are_imported(method: str, suffix: str, tmp_path: Path) -> None:
    """A file of torch with the names of DDP and its args.json, or .safetensors and options."""
    state = bam_state(method)
    options: dict[str, Any] = {}
    if suffix == ".pt":
        (tmp_path / "args.json").write_text(args_json(method))
        file = written(tmp_path / "model.pt", compiled(state))
    else:
        file, options = written(tmp_path / "model.safetensors", state), {"context": CONTEXT}
        options |= {} if method.startswith("bam") else {"method": method, "heads": H}
    import_released("bam", file, **options).save_pretrained(tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert model.config.train_context == CONTEXT and model.config.num_heads == H
    close(model, bam_logits(state, method, TOKENS))
    if method.startswith("sinusoidal"):  # counted from the start of the row there: equal in its first document
        end = slice(None, 9)
        torch.testing.assert_close(
            model(TOKENS, segments=DOCUMENTS)[:, end].double(),
            bam_logits(state, method, TOKENS)[:, end],
            atol=2e-6,
            rtol=1e-6,
        )
    else:
        close(model, bam_logits(state, method, TOKENS, DOCUMENTS), segments=DOCUMENTS)


@pytest.mark.parametrize("method", ["bam", "bam_ssmax"])
def test_a_prior_for_each_layer(method: str, tmp_path: Path) -> None:
    state = bam_state(method, shared=False)
    model = import_released("bam", written(tmp_path / "model.pt", state), context=CONTEXT)
    assert not model.config.share_prior
    close(model.double().eval(), bam_logits(state, method, TOKENS))


def test_args_json_says_what_tensors_do_not(tmp_path: Path) -> None:
    state = bam_state("rotary", kv_heads=2)
    file = written(tmp_path / "model.pt", state)
    (tmp_path / "args.json").write_text(args_json("rotary", rope_theta=1000.0))
    model = import_released("bam", file).double().eval()
    assert model.config.num_kv_heads == 2
    close(model, bam_logits(state, "rotary", TOKENS, theta=1000.0))
    written(file, bam_state("bam_ssmax"))
    (tmp_path / "args.json").write_text(args_json("bam_ssmax", train_loc=True, train_scale=False, ssmax_prior=False))
    config = import_released("bam", file).config
    assert config.position_options == {"train_alpha": False, "train_mu": True}
    assert not config.scale_prior


def test_tensors_of_half_precision_are_read(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in bam_state("nope").items()}
    options: dict[str, Any] = {"method": "nope", "heads": H, "context": CONTEXT}
    model = import_released("bam", written(tmp_path / "model.safetensors", state), **options).double().eval()
    close(model, bam_logits(state, "nope", TOKENS))


# ------------------------------------------------------------------------------------------ CABLE


class CableConfig:
    """Stands in for the class that CABLE's training script defines."""

    def __init__(self) -> None:
        self.block_size, self.n_head, self.n_embd = CONTEXT, H, C


@pytest.mark.parametrize("layout", ["model_19072.pt", "checkpoint.pt", "model.safetensors"])
def test_cables_model_is_imported(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, context = cable_state(), CONTEXT
    if layout == "checkpoint.pt":  # beside its configuration, an object of the script's own class
        monkeypatch.setattr(CableConfig, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "CableConfig", CableConfig, raising=False)
        torch.save({"model": compiled(state), "config": CableConfig(), "step": 5}, tmp_path / layout)
        monkeypatch.delattr(sys.modules["__main__"], "CableConfig")
        model = import_released("cable", tmp_path / layout)
    else:
        model = import_released("cable", written(tmp_path / layout, state), context=context)
    model.save_pretrained(tmp_path / "out")
    assert model.config.train_context == context
    assert model.config.tokenizer == "gpt2"
    close(loaded(tmp_path / "out"), cable_logits(state, TOKENS))


# ------------------------------------------------------------------------------------------ what cannot be imported


def changed(state: State, name: str, value: Tensor | None) -> State:
    """With another tensor of this name, or without it."""
    return {n: v for n, v in (state | {name: value}).items() if v is not None}


BAD: dict[str, tuple[str, State, dict[str, Any], str]] = {
    "missing": (
        "bam",
        changed(bam_state("bam"), "layers.1.ffn_norm.weight", None),
        {},
        "lacks .*layers.1.ffn_norm.weight",
    ),
    "misspelt": (
        "bam",
        changed(changed(bam_state("bam"), "norm.weight", None), "norms.weight", torch.ones(C)),
        {},
        "lacks the tensor 'norm.weight'; did you mean 'norms.weight'",
    ),
    "extra": ("bam", bam_state("bam") | {"gate.weight": torch.ones(1)}, {}, "BAM's model bam has not: gate.weight"),
    "ssmax": (
        "bam",
        bam_state("alibi_ssmax"),
        {"method": "alibi"},
        "model alibi has not: layers.0.attention.seq_scale",
    ),
    "no ssmax": (
        "bam",
        bam_state("alibi"),
        {"method": "alibi_ssmax", "heads": H},
        "lacks .*layers.0.attention.seq_scale",
    ),
    "shape": (
        "bam",
        changed(bam_state("bam"), "layers.0.attention.wo.weight", torch.ones(C, C + 1)),
        {},
        r"wo.weight' has shape \(48, 49\), expected \(48, 48\)",
    ),
    "embedding": (
        "bam",
        changed(bam_state("bam"), "tok_embeddings.weight", torch.ones(3)),
        {},
        "expected one of 2 axes",
    ),
    "no heads": ("bam", bam_state("nope"), {"method": "nope"}, "number of heads .* is not in the file; give heads"),
    "odd heads": ("bam", bam_state("nope"), {"method": "nope", "heads": 5}, "5 heads do not divide the width 48"),
    "minus heads": ("bam", bam_state("nope"), {"method": "nope", "heads": -6}, "must be a number above 0, got -6"),
    "other heads": ("bam", bam_state("bam"), {"heads": 3}, "number of heads .*: 3 by heads, 6 by prior.shape"),
    "no method": ("bam", bam_state("nope"), {"heads": H}, "give method: alibi, rotary, nope, sinusoidal$"),
    "no method of ssmax": ("bam", bam_state("rotary_ssmax"), {}, "give method: alibi_ssmax, rotary_ssmax"),
    "method": ("bam", bam_state("nope"), {"method": "rotari"}, "unknown method 'rotari' .* did you mean 'rotary'"),
    "other method": ("bam", bam_state("bam"), {"method": "nope"}, "'nope' by method, 'bam' by its tensors"),
    "no context": ("bam", bam_state("bam"), {"context": None}, "training context .* give context"),
    "family": ("bamm", bam_state("bam"), {}, "unknown family 'bamm' .* did you mean 'bam'"),
    "layers": (
        "bam",
        {n: v for n, v in bam_state("bam").items() if "layers" not in n},
        {},
        "lacks .*layers.0.attention",
    ),
    "untied": ("cable", changed(cable_state(), "lm_head.weight", torch.ones(V, C)), {}, "one matrix for both"),
    "cable's shape": (
        "cable",
        changed(cable_state(), "transformer.h.1.attn.c_attn.weight", torch.ones(3 * C + H, C)),
        {},
        r"c_attn.weight' has shape \(150, 48\), expected \(144, 48\)",
    ),
    "cable's method": ("cable", cable_state(), {"method": "bam"}, "files of cable have one method"),
    "no model": ("cable", {}, {}, "lacks the tensor 'transformer.wte.weight'"),
    "twice": ("cable", cable_state() | compiled(cable_state()), {}, "twice"),
    "no tensor": ("cable", cable_state() | {"step": 3}, {}, "'step' is a int, expected a tensor"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    family, state, options, message = BAD[case]
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=message):
        import_released(family, tmp_path / "model.pt", **{"context": CONTEXT} | options)


class Runs:
    """Unpickles by making a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("pickled", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_no_code_of_a_file_runs(pickled: Callable[[Any, Path], None], tmp_path: Path) -> None:
    pickled({"model": cable_state(), "config": Runs(tmp_path / "made")}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"refused: it (needs .*mkdir|holds more than tensors)"):
        import_released("cable", tmp_path / "model.pt", context=CONTEXT)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_other_files_are_refused(name: str, tmp_path: Path) -> None:
    for content in (b"", b"no weights at all", b"PK\x03\x04 and no more"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            import_released("bam", tmp_path / name, context=CONTEXT)
    with pytest.raises(FileNotFoundError):
        import_released("bam", tmp_path / f"no {name}")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, expected tensors by name"):
        import_released("bam", tmp_path / "list.pt")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ('{"args": 3}', "args.json: expected"), (args_json("bam", norm_eps=1e-6), "norm_eps is 1e-06")],
)
def test_an_args_json_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        import_released("bam", written(tmp_path / "model.pt", bam_state("bam")), context=CONTEXT)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(tmp_path / "model.pt", bam_state("rotary")), tmp_path / "out"
    assert cli.main(["import", "bam", str(file), "--out", str(out)]) == 2
    assert "give method: alibi, rotary, nope, sinusoidal" in capsys.readouterr().err
    assert not out.exists()
    words = [
        "bam",
        str(file),
        "--method",
        "rotary",
        "--heads",
        str(H),
        "--context",
        str(CONTEXT),
        "--tokenizer",
        "bytes",
    ]
    assert command.main([*words, "--out", str(out)]) == 0
    assert "rope, " in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    close(loaded(out), bam_logits(bam_state("rotary"), "rotary", TOKENS))


# ------------------------------------------------------------------------------------------ GOAT's attention module


def goat_state(*, rank: int, kv_heads: int = H, sink: bool = True, fused: bool = True, bias: bool = True) -> State:
    kv, sinks = C // H * kv_heads, 3
    shapes: dict[str, tuple[int, ...]] = {"lambda_sym": (kv_heads, rank), "lambda_asym": (kv_heads, rank)}
    projections = {"in_proj": C + 2 * kv} if fused else {"q_proj": C, "k_proj": kv, "v_proj": kv}
    for name, rows in (projections | {"out_proj": C}).items():
        shapes |= {f"{name}.weight": (rows, C)} | ({f"{name}.bias": (rows,)} if bias else {})
    if sink:
        shapes |= {name: (kv_heads,) for name in ("sink_gain", "sink_bump", "recency_slope_raw")}
        shapes |= {"key_bias.fc1.weight": (4, 2 * sinks + 2), "key_bias.fc1.bias": (4,)}
        shapes |= {"key_bias.fc2.weight": (1, 4), "key_bias.fc2.bias": (1,)}
    shapes |= {"prior_gate_scale_raw": (H,), "prior_gate_bias": (H,)}
    frequencies = {"rel_freqs_base": 10_000.0 ** (-torch.arange(rank) / max(rank - 1, 1))}
    return drawn(shapes) | frequencies | {"abs_freqs_base": 500.0 ** (-torch.arange(sinks) / (sinks - 1))}


def goat_output(state: State, x: Tensor, *, causal: bool, gated: bool, scale: float) -> Tensor:
    w = {name: value.double() for name, value in state.items()}
    kv_heads, rank = w["lambda_sym"].shape
    kv, group, length = C // H * kv_heads, H // kv_heads, x.shape[1]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))

    if "in_proj.weight" in w:
        parts = linear(x, "in_proj").split([C, kv, kv], -1)
    else:
        parts = tuple(linear(x, f"{name}_proj") for name in "qkv")
    q, k, v = (heads_of(part, H) for part in parts)
    content = C // H - 2 * rank - ("sink_gain" in w)
    q, k = q[..., :content], k[..., :content]
    at = torch.arange(length).double()
    angle = (at[:, None, None] - at[:, None]) * w["rel_freqs_base"]
    sym, asym = (w[name].repeat_interleave(group, 0)[:, None, None] for name in ("lambda_sym", "lambda_asym"))
    prior = (sym * angle.cos() + asym * angle.sin()).sum(-1)
    if "sink_gain" in w:
        waves, ramp = at[:, None] * w["abs_freqs_base"], at[:, None]
        seen = torch.cat([waves.cos(), waves.sin(), ramp / CONTEXT, (1 + ramp).log() / math.log(1 + CONTEXT)], -1)
        inner = linear(seen, "key_bias.fc1")
        u = linear(inner * inner.sigmoid(), "key_bias.fc2")[:, 0]
        gain, bump, raw = (
            w[name].repeat_interleave(group)[:, None] for name in ("sink_gain", "sink_bump", "recency_slope_raw")
        )
        key = gain * u + bump * (at == 0) + causal * (1 + raw.exp()).log() * at
        prior = prior + scale * key[:, None]
    gate = torch.ones(1, dtype=torch.float64)
    if gated:
        slope, bias = (w[f"prior_gate_{name}"][:, None] for name in ("scale_raw", "bias"))
        gate = torch.sigmoid(bias - (1 + slope.exp()).log() * q.norm(dim=-1))[..., None]
    logits = q @ k.transpose(-1, -2) / math.sqrt(content) + gate * prior
    if causal:
        logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    return linear((logits.softmax(-1) @ v).transpose(1, 2).flatten(2), "out_proj")


GOATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "for_gpt": ({"rank": 0}, {}),
    "spectral": ({"rank": 2}, {}),
    "grouped": ({"rank": 2, "kv_heads": 2, "fused": False}, {}),
    "gated": ({"rank": 1, "kv_heads": 3}, {"prior_gate": True}),
    "scaled": ({"rank": 2}, {"prior_scale": 0.3}),
    "for_bert": ({"rank": 2, "fused": False}, {"causal": False}),
    "no key bias": ({"rank": 3, "sink": False, "bias": False}, {"train_context": None}),
}


@pytest.mark.parametrize("case", GOATS)
@torch.no_grad()
def test_goats_module_is_imported(case: str) -> None:
    made, options = GOATS[case]
    state, x = goat_state(**made), torch.randn(2, LENGTH, C, generator=torch.Generator().manual_seed(2)).double()
    attention = goat_attention(state, **{"train_context": CONTEXT} | options).double()
    causal, gated = options.get("causal", True), options.get("prior_gate", False)
    expected = goat_output(state, x, causal=causal, gated=gated, scale=options.get("prior_scale", 1.0))
    torch.testing.assert_close(attention(x, Positions.line(LENGTH)), expected, atol=1e-6, rtol=1e-6)


def test_columns_that_goats_module_does_not_read_stay_zero() -> None:
    attention = goat_attention(goat_state(rank=2), train_context=CONTEXT)
    attention(torch.randn(1, LENGTH, C), Positions.line(LENGTH)).square().sum().backward()
    for layer in (attention.query, attention.key):
        grad, width = layer.weight.grad, C // H
        assert grad is not None and layer.bias is not None
        assert not layer.weight.unflatten(0, (H, width))[:, width - 5 :].any()
        assert not grad.unflatten(0, (H, width))[:, width - 5 :].any()


GOAT_BAD: dict[str, tuple[State, dict[str, Any], str]] = {
    "context": (goat_state(rank=2), {"train_context": None}, "give train_context"),
    "extra": (goat_state(rank=2) | {"bias_k": torch.ones(1, 1, C)}, {}, "has not: bias_k"),
    "missing": (changed(goat_state(rank=2), "sink_bump", None), {}, "lacks the tensor 'sink_bump'"),
    "shape": (changed(goat_state(rank=2), "lambda_asym", torch.ones(H, 3)), {}, r"expected \(6, 2\)"),
    "no prior": (goat_state(rank=0, sink=False), {}, "attention without a prior"),
    "too many": (goat_state(rank=4), {}, "leaves none of the 8"),
    "frequencies": (changed(goat_state(rank=2), "abs_freqs_base", torch.tensor([1.0, 0.9, 0.1])), {}, "by one ratio"),
    "scale": (goat_state(rank=2), {"prior_scale": -1.0}, "at least 0"),
}


@pytest.mark.parametrize("case", GOAT_BAD)
def test_goats_modules_that_do_not_fit_are_named(case: str) -> None:
    state, options, message = GOAT_BAD[case]
    with pytest.raises(ValueError, match=message):
        goat_attention(state, **{"train_context": CONTEXT} | options)


def test_sinusoidal_positions_have_known_columns() -> None:
    from zoo.encodings import Sinusoidal

    with pytest.raises(ValueError, match="unknown columns 'interleaved'"):
        Sinusoidal(8, columns="interleaved")
