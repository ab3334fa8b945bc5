"""Whole models with one position method beside another: text training steps, vision transformers, DNA decoders.

All methods of a table take turns, and ratios are to the first. What a model is, what its pass computes and what its memory is
differ by table; how they are timed, compared and recorded does not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch

from modalities.cost import Meter, device_name
from modalities.decoder import causal_lm_loss
from recipes.config import Model, Optim, Recipe, Train, resolve
from tools.benches import harness
from tools.benches.harness import PASSES, Record, Row, text_of
from tools.benches.screen import BadParameter, Option
from zoo import create_model, list_models, prior_attention

CLIP = 1.0  # norm that a training step cuts gradients to
TEXT = {"cuda": ("125m", "2048,16384", 32768), "cpu": ("tiny", "128", 512)}  # size, contexts, tokens a step
Methods = Annotated[str, Option(help="comma-separated position methods; ratios are to the first")]


@dataclass
class Subject:
    """A model made ready to be timed.

    Attributes:
        passes: what is timed, by name.
        units: tokens, images or bases of one pass.
        flops: floating-point operations of one pass; 0 where they are not counted.
        peak_bytes: memory at its peak; each command says of what.
    """

    passes: dict[str, Callable[[], object]]
    units: int
    flops: float = 0.0
    peak_bytes: int | None = None
    about: Row = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------ comparison


def named(methods: str, kind: str, size: str) -> dict[str, str]:
    """Method → model name, such as {"rope": "text_rope_tiny"}. BadParameter names an unknown size or method."""
    known = {}
    for name in list_models(f"{kind}_*"):
        rest = name.removeprefix(f"{kind}_").removesuffix("_patch16").removesuffix("_patch8").removesuffix("_patch14")
        method, _, its_size = rest.rpartition("_")
        known.setdefault(its_size, {})[method] = name
    harness.one_of("model", size, known)
    chosen = harness.words(methods)
    if not chosen:
        raise BadParameter("--methods takes at least one")
    return {method: known[size][harness.one_of("methods", method, sorted(known[size]))] for method in chosen}


def compare(
    record: Record, makers: Mapping[str, Callable[[], Subject]], cell: str, seconds: float, device: torch.device
) -> list[Row]:
    """A row for each pass and method, all methods in turns; a method that fails is noted and the others are measured."""
    subjects: dict[str, Subject] = {}
    for method, make in makers.items():
        record.status.update(f"{cell}: making {method}")
        with record.guard(method, cell):
            subjects[method] = make()
    rows = []
    for what in next(iter(subjects.values())).passes if subjects else ():
        runs = {method: subject.passes[what] for method, subject in subjects.items()}
        record.status.update(f"{cell}: timing {what}")
        rounds = harness.in_turns(runs, seconds * len(runs), harness.by_clock(device))
        first = next(iter(runs))
        for method, subject in subjects.items():
            ms, memory = rounds.ms(method), subject.peak_bytes
            least, tflops = subjects[first].peak_bytes, subject.flops / ms / 1e9
            rows.append({
                "cell": cell, "method": method, "what": what, "ms": ms, "ratio": rounds.ratio(method, first),
                "pairs": len(rounds.rows), "units_per_s": 1e3 * subject.units / ms,
                "speed_ratio": 1 / rounds.ratio(method, first), "tflops": tflops or None, "peak_bytes": memory,
                "mfu": tflops / record.about["matmul_tflops"] if tflops else None,
                "peak_ratio": memory / least if memory and least else None, **subject.about,
            })  # fmt: skip
    del subjects
    harness.free(device)
    return rows


def finish(record: Record, title: str, units: str) -> None:
    """Print the table; Exit(1) where a method failed."""
    columns = {
        "method": lambda row: row["method"],
        "pass": lambda row: row["what"],
        "ms": text_of("ms", ",.1f"),
        units: text_of("units_per_s", ",.1f"),
        "time": text_of("ratio", ".3f"),
        "speed": text_of("speed_ratio", ".3f"),
        "TFLOP/s": text_of("tflops", ".3g"),
        "MFU": text_of("mfu", ".1%"),
        "peak MiB": text_of("peak_bytes", ",.0f", 2**20),
        "memory": text_of("peak_ratio", ".3f"),
    }
    record.show(title, columns, section=lambda row: row["cell"])
    harness.end(record)


def loss_and_gradients(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """A pass without an optimiser; what some position methods do not use has no gradient."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(loss(), leaves, allow_unused=True)


# -------------------------------------------------------------------------------------------------- text, training


def training(
    device: harness.Device = "auto",
    model: Annotated[str, Option(help="default 125m on CUDA, tiny on the CPU")] = "",
    methods: Methods = "rope,alibi,goat,ggd_ssmax",
    lengths: Annotated[str, Option("--lengths", "--contexts", help="tokens a row; on CUDA 2048,16384")] = "",
    tokens: Annotated[int, Option(help="tokens a step; default 32768 on CUDA")] = 0,
    engine: Annotated[str, Option(help="auto, deepspeed or torch")] = "auto",
    seconds: harness.Seconds = 8.0,
    minutes: harness.Minutes = 0.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Training steps of a text model, one position method beside another: tokens/s, MFU, peak memory.

    A step is forward, loss, backward, gradient clipping and the optimiser, through the recipes' own engine: DeepSpeed, ZeRO
    stage 1 and bfloat16 on CUDA, one process. Where DeepSpeed is not installed it is plain torch, weights in bfloat16 and
    fused AdamW, and the record names it. Tokens are random. Memory is of the model and a step.

    MFU = tokens/s · F / ceiling, with F = 6·N + 6·layers·C·(L + 1) operations a token. N: parameters that multiply
    activations, the output matrix once, the embedding as a look-up not at all; 2 operations each forward and 4 backward. The
    rest, for each layer: <q, k> and the weighted sum of values over the (L + 1)/2 visible keys of a row. Recomputation counts
    nothing. The ceiling is a large matrix product of the same run.
    """
    harness.one_of("engine", engine, ("auto", "deepspeed", "torch"))
    place = harness.device_of(device)
    default_size, default_lengths, default_tokens = TEXT[place.type]
    names = named(methods, "text", model or default_size)
    contexts = sorted(harness.numbers("lengths", lengths or default_lengths))
    with_deepspeed = engine != "torch" and importlib.util.find_spec("deepspeed") is not None
    if engine == "deepspeed" and not with_deepspeed:
        raise BadParameter("--engine deepspeed: deepspeed is not installed; --engine torch does without")
    ranks = None
    if with_deepspeed:
        from recipes.engine import start

        ranks = start()
        place = ranks.device
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    about = {
        "model": model or default_size, "device": device_name(place), "dtype": str(dtype).removeprefix("torch."),
        "engine": f"DeepSpeed ZeRO-{int(place.type == 'cuda')}" if ranks else "plain torch", "plain": next(iter(names)),
        "matmul_tflops": harness.matmul_ceiling(place, dtype, harness.by_clock(place)),
    }  # fmt: skip
    record = Record(about, out=out, commit=commit, minutes=minutes)

    def measure(context: int) -> list[Row]:
        batch = max(1, (tokens or default_tokens) // context)
        makers = {
            method: lambda name=name: training_subject(name, context, batch, place, ranks)
            for method, name in names.items()
        }
        return compare(record, makers, f"{batch} × {context} tokens", seconds, place)

    with record.status:
        record.measure([(f"context {n}", "contexts", lambda n=n: measure(n)) for n in contexts])
    title = (
        f"training steps of {about['model']} on {about['device']}, {about['dtype']}, {about['engine']}; "
        f"ratios to {about['plain']}; MFU of {about['matmul_tflops']:.2f} TFLOP/s measured"
    )
    finish(record, title, "tokens/s")


def training_subject(name: str, context: int, batch: int, device: torch.device, ranks: Any) -> Subject:
    """A model and its step on (batch, context + 1) random tokens; two steps are taken, and a third one's memory."""
    tokens = torch.randint(0, 256, (batch, context + 1), device=device)
    data = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    torch.manual_seed(0)
    with Meter(device) as making:
        model = create_model(name, train_context=context)
        flops = flops_per_token(model, context)
        step = torch_step(model, device) if ranks is None else engine_step(model, batch, ranks)
    for _ in range(2):  # kernels compiled, and Adam's moments allocated
        step(data)
    held = torch.cuda.memory_allocated(device) - held if device.type == "cuda" else making.peak_bytes
    with Meter(device) as meter:
        step(data)
    peak = None if meter.peak_bytes is None or held is None else held + meter.peak_bytes
    about = {"parameters": sum(p.numel() for p in model.parameters()), "flops_per_token": flops}
    return Subject({"step": lambda: step(data)}, tokens[:, 1:].numel(), flops * batch * context, peak, about)


def engine_step(model: torch.nn.Module, batch: int, ranks: Any) -> Callable[[Row], float]:
    """A step by recipes.engine: DeepSpeed as `recipes/train.py` runs it; returns the loss."""
    from modalities.text import TextDataConfig
    from recipes.engine import Engine

    train = Train(steps=10**6, batch=batch, micro_batch=batch, zero_stage=int(ranks.device.type == "cuda"), clip=CLIP)
    recipe = Recipe("bench", "text", Model("bench"), TextDataConfig(), Optim(), train)
    engine = Engine(model, resolve(recipe, world=1, device=ranks.device.type), ranks)
    engine.train()

    def step(data: Row) -> float:
        loss, _ = causal_lm_loss(engine, data)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def torch_step(model: torch.nn.Module, device: torch.device) -> Callable[[Row], float]:
    """A step without DeepSpeed; returns the loss."""
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=Optim().lr, betas=Optim().betas, fused=True)

    def step(data: Row) -> float:
        loss, _ = causal_lm_loss(model, data)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def flops_per_token(model: Any, context: int) -> float:
    """F of `training`'s docstring, from the model's own linear layers and its output matrix."""
    matrices = sum(m.weight.numel() for m in model.layers.modules() if isinstance(m, torch.nn.Linear))
    config = model.config
    return 6.0 * (matrices + config.vocab_size * config.dim) + 6.0 * config.num_layers * config.dim * (context + 1)


def loss(
    device: harness.Device = "cpu",
    tokens: Annotated[int, Option(help="targets of a pass")] = 16384,
    vocabulary: Annotated[int, Option(help="entries of the vocabulary")] = 32768,
    dim: Annotated[int, Option(help="width of the features")] = 256,
    seconds: harness.Seconds = 8.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """The loss of a decoder's features and its gradients, in chunks of tokens, beside all logits at once; on CUDA by Liger too.

    Memory is what a pass adds at its peak, on the CPU in a process of its own for each; float32 there, bfloat16 on CUDA.
    """
    place = harness.device_of(device)
    about = {"device": device_name(place), "dim": dim, "plain": "at once"}
    record = Record(about, out=out, commit=commit)
    cell = f"{tokens} × {vocabulary}"

    def make(name: str) -> Subject:
        given = (loss_bytes, name, tokens, vocabulary, dim, place)
        memory = loss_bytes(*given[1:]) if place.type == "cuda" else harness.in_fresh_process(*given)
        run = loss_pass(name, tokens, vocabulary, dim, place)
        return Subject({PASSES[1]: run}, tokens, 6.0 * tokens * vocabulary * dim, memory)

    names = ("at once", "in chunks", *(["Liger"] if place.type == "cuda" else []))
    makers = {name: lambda name=name: make(name) for name in names}
    record.about["matmul_tflops"] = harness.matmul_ceiling(place, torch.float32, harness.by_clock(place))
    with record.status:
        record.measure([(cell, "losses", lambda: compare(record, makers, cell, seconds, place))])
    finish(record, f"loss of tokens × vocabulary on {about['device']}; ratios to all logits at once", "tokens/s")


def loss_pass(name: str, tokens: int, vocabulary: int, dim: int, device: torch.device) -> Callable[[], object]:
    """The mean loss of random features, and its gradients with respect to them and the unembedding."""
    from modalities.decoder import fused_loss
    from modalities.text.model import build

    if name == "Liger" and not fused_loss.installed():
        raise harness.Refused(f"liger-kernel {'.'.join(map(str, fused_loss.LIGER))} or later is not installed")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build(vocab_size=vocabulary, dim=dim, num_layers=1, num_heads=1, position="nope").to(device, dtype)
    features = torch.randn(1, tokens, dim, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (1, tokens), device=device)

    def losses() -> torch.Tensor:
        if name == "in chunks":
            return model.losses_in_chunks(features, targets)
        if name == "Liger":
            return fused_loss.fused_losses(features[0], model.embedding.weight, targets[0], -100)
        return torch.nn.functional.cross_entropy(model.forward_head(features)[0], targets[0], reduction="none")

    return lambda: torch.autograd.grad(losses().mean(), [features, model.embedding.weight])


def loss_bytes(name: str, tokens: int, vocabulary: int, dim: int, device: torch.device) -> int | None:
    """What `loss_pass` adds at its peak, in bytes."""
    run = loss_pass(name, tokens, vocabulary, dim, device)
    with Meter(device) as meter:
        run()
    return meter.peak_bytes


# ---------------------------------------------------------------------------------------------------------- vision


def vision(
    size: Annotated[int, Option(help="side of the images in pixels")] = 384,
    model: Annotated[str, Option(help="tiny, small or base")] = "small",
    batch: Annotated[int, Option(help="images a pass")] = 1,
    methods: Annotated[str, Option(help="comma-separated, beside nope; default all")] = "",
    memory_size: Annotated[int, Option(help="side of the image whose attention's memory is measured")] = 1024,
    device: harness.Device = "cpu",
    seconds: harness.Seconds = 6.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Vision transformers of every position method, as ratios to the one without positions.

    Passes of whole models, in float32 on the CPU and bfloat16 on CUDA. Memory is what one attention call on a large image, its
    prior computed anew, adds at its peak, the output included; it is measured for methods with a table.
    """
    from zoo.methods import list_grid_positions

    place = harness.device_of(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    names = named(f"nope,{methods or ','.join(list_grid_positions())}", "vision", model)
    about = {
        "device": device_name(place), "dtype": str(dtype).removeprefix("torch."), "image_size": size, "batch": batch,
        "plain": "nope", "memory_image_size": memory_size,
    }  # fmt: skip
    record = Record(about, out=out, commit=commit)
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(place, dtype)

    def make(name: str) -> Subject:
        torch.manual_seed(0)
        made = create_model(name).to(place, dtype)
        forward = lambda: made(images)  # noqa: E731
        passes = (harness.no_grad(forward), loss_and_gradients(made, lambda: forward().square().mean()))
        row = {"model": name, "tokens": made.positions(size, size).length}
        memory = attention_bytes(made, memory_size, place, dtype)
        return Subject(dict(zip(PASSES, passes, strict=True)), batch, peak_bytes=memory, about=row)

    makers = {method: lambda name=name: make(name) for method, name in names.items()}
    cell = f"{batch} × {size} px"
    with record.status:
        record.measure([(cell, "images", lambda: compare(record, makers, cell, seconds, place))])
    where = about["device"] if place.type == "cuda" else f"{record.about['threads']} CPU threads"
    finish(record, f"{where}; ratios to nope; attention's extra memory at {memory_size} px", "images/s")


@torch.no_grad()
def attention_bytes(model: Any, size: int, device: torch.device, dtype: torch.dtype) -> int | None:
    """Bytes that one attention call adds, for an image of `size` pixels and a fresh prior; None for a prior without table."""
    prior, config = model.layers[0].attention.prior, model.config
    grid = model.positions(size, size)
    shape = (1, grid.length, config.num_heads, config.dim // config.num_heads)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    make = partial(prior, grid, grid, causal=False, x=q[:, 0])  # x: where its numbers are made
    if config.position != "nope" and make().table is None:
        return None
    with Meter(device) as meter:
        prior_attention(q, k, v, make(), causal=False)
    return meter.peak_bytes


# ------------------------------------------------------------------------------------------------------------- DNA


def dna(
    model: Annotated[str, Option(help="size of the decoder")] = "25m",
    methods: Methods = "rope,goat",
    batch: Annotated[int, Option(help="rows a step")] = 1,
    context: Annotated[int, Option(help="bases a row; 0: the size's own")] = 0,
    device: harness.Device = "cpu",
    seconds: harness.Seconds = 20.0,
    out: harness.Out = None,
    commit: harness.Commit = "",
) -> None:
    """Training steps of a DNA decoder (loss and gradients in float32) with one position method beside another.

    Memory is what a step adds to the process at its peak, on the CPU in a process of its own for each model.
    """
    from modalities.dna.model import SIZES

    place = harness.device_of(device)
    names = named(methods, "dna", model)
    length = context or SIZES[model]["train_context"]
    about = {
        "model": model, "batch": batch, "context": length, "plain": next(iter(names)), "device": device_name(place),
    }  # fmt: skip
    record = Record(about, out=out, commit=commit)

    def make(name: str) -> Subject:
        subject = dna_subject(name, batch, length, place)
        if place.type == "cuda":
            subject.peak_bytes = step_bytes(name, batch, length, place)
        else:
            subject.peak_bytes = harness.in_fresh_process(step_bytes, name, batch, length, place)
        return subject

    makers = {method: lambda name=name: make(name) for method, name in names.items()}
    cell = f"{batch} × {length} bases"
    with record.status:
        record.measure([(cell, "steps", lambda: compare(record, makers, cell, seconds, place))])
    finish(record, f"{model} on {about['device']}; ratios to {about['plain']}", "bases/s")


def dna_subject(name: str, batch: int, context: int, device: torch.device) -> Subject:
    """A decoder and its step on (batch, context + 1) random bases after the token that begins a row."""
    from modalities.dna.model import next_token_loss
    from modalities.dna.tokenizers import load_tokenizer

    torch.manual_seed(0)
    model = create_model(name, train_context=context).to(device)
    tokens = torch.randint(0, 4, (batch, context + 1), device=device)
    tokens[:, 0] = load_tokenizer("bases").bos_id
    data = {"tokens": tokens, "segments": torch.zeros_like(tokens)}
    step = loss_and_gradients(model, lambda: next_token_loss(model, data)[0])
    return Subject({"step": step}, batch * context, about={"model": name})


def step_bytes(name: str, batch: int, context: int, device: torch.device) -> int | None:
    """What a step adds at its peak, in bytes, after the first, which alone allocates some of it."""
    step = dna_subject(name, batch, context, device).passes["step"]
    step()
    with Meter(device) as meter:
        step()
    return meter.peak_bytes
