"""The controls that the README's claims stand beside, measured on the shipped weights.

    python tools/controls.py reduced          pictures read large, and reduced before the model       needs `vision glyphs`
    python tools/controls.py seeds            GOAT beside axial 2-D RoPE: seeds, and pairs of pictures   needs `vision glyphs`
    python tools/controls.py context-mixer    DNA: mixers of counters with as many bases   needs `dna genomes` and a C compiler

Each writes OUT/<name>.json: settings and rows, with 95% intervals. What is needed is fetched by `recipes/fetch_data.py`.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that a plain `python tools/…` finds the project

import zoo
from modalities.contract import find_modality
from recipes.report import load_results
from zoo.cli import call
from zoo.files import write_json
from zoo.slices import slices

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "controls"
SEEDS = ROOT / "benchmarks" / "vision_tiny"
Out = Annotated[Path, typer.Option(help="folder of the JSON files")]
DRAWS = 10_000  # of a bootstrap
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t, two-sided, of n values


# ---- intervals and files ----


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """95% interval of a share."""
    z, p = 1.96, hits / trials
    middle, half = p + z * z / (2 * trials), z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials**2))
    return (middle - half) / (1 + z * z / trials), (middle + half) / (1 + z * z / trials)


def interval(values: np.ndarray, units: np.ndarray | None = None) -> dict[str, float]:
    """Mean of values (N,) and its 95% interval: bootstrap over units (N,), such as fonts; None: each value is its own."""
    units = np.arange(len(values)) if units is None else np.unique(units, return_inverse=True)[1]
    sums, counts = np.bincount(units, weights=values), np.bincount(units)
    rng, means = np.random.default_rng(0), []
    for part in slices(DRAWS, 500):
        drawn = rng.integers(len(sums), size=(part.stop - part.start, len(sums)))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def save(out: Path, name: str, settings: dict[str, Any], started: float, **tables: list[dict[str, Any]]) -> None:
    """Write OUT/NAME.json and print its tables, columns parted by tabs."""
    seconds = round(time.perf_counter() - started)
    rounded = json.loads(json.dumps(tables), parse_float=lambda text: round(float(text), 5))
    write_json(out / f"{name}.json", {"control": name, "settings": settings, "seconds": seconds, **rounded})
    for title, rows in rounded.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        typer.echo(f"\n{name}: {title}\n" + "\t".join(columns))
        for row in rows:
            typer.echo("\t".join(str(row.get(column, "")) for column in columns))


# ---- pictures ----

VISION = ("goat", "rope2d_axial", "learned", "ggd2d_separable")


def letters() -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Held-out pictures, labels (N,) and fonts (N,). They are stored font after font, 26 letters each."""
    from modalities.vision.data import open_heldout

    data = open_heldout("glyphs").items
    pictures, labels = zip(*(data[place] for place in range(len(data))), strict=True)
    if not np.array_equal(labels, data.order % 26):
        raise SystemExit(
            "these pictures are not 26 letters a font: fetch them with recipes/fetch_data.py vision glyphs --offline"
        )
    return list(pictures), np.array(labels), data.order // 26


@torch.inference_mode()
def probabilities(model: Any, pictures: Sequence[Any], size: int, *, enlarged: bool = False) -> np.ndarray:
    """(N, classes) of pictures brought to `size` pixels; enlarged: reduced to the training size before."""
    from modalities.vision.transforms import preprocess

    config, found = model.config, []
    how: dict[str, Any] = {"mode": "upsampled" if enlarged else "native", "train_size": min(config.train_size)}
    for part in slices(len(pictures), max(1, 16384 // (size // config.patch_size) ** 2)):
        made = [preprocess(p, size, size, mean=config.mean, std=config.std, **how) for p in pictures[part]]
        found.append(model(torch.stack(made)).softmax(1).double().numpy())
    return np.concatenate(found)


def vision_model(method: str) -> Any:
    return zoo.create_model(f"vision_{method}_ssmax_tiny_patch8.glyphs").eval()


@app.command()
def reduced(out: Out = OUT) -> None:
    """Top-1 of pictures of 96, 144, 192 pixels: as they are, reduced before the model, and enlarged without detail."""
    from PIL import Image

    started, (pictures, labels, fonts) = time.perf_counter(), letters()
    models, rows, differences = {method: vision_model(method) for method in VISION}, [], []
    for size in (96, 144, 192):
        given = [picture.resize((size, size), Image.Resampling.BICUBIC) for picture in pictures]
        for method, model in models.items():
            small = {side: probabilities(model, given, side) for side in (48, 72, 96)}
            read = {"native": small[96] if size == 96 else probabilities(model, given, size)}
            read |= {f"reduced to {side}": p for side, p in small.items()}
            read |= {"mean of 48, 72, 96": sum(small.values())}
            read |= {"48 enlarged": probabilities(model, given, size, enlarged=True)}
            right = {name: (p.argmax(1) == labels).astype(float) for name, p in read.items()}
            at = {"method": method, "size": size}
            rows += [at | {"read": name} | interval(hits, fonts) for name, hits in right.items()]
            for name in ("reduced to 96", "mean of 48, 72, 96", "48 enlarged"):
                if size > 96 or name != "reduced to 96":
                    differences.append(at | {"native minus": name} | interval(right["native"] - right[name], fonts))
    settings = {"pictures": len(labels), "fonts": len(set(fonts)), "draws": DRAWS, "chance": 1 / 26, "train_size": 48}
    settings |= {"interval": "bootstrap over fonts, 95%", "weights": "shipped, seed 0"}
    save(out, "reduced", settings, started, rows=rows, differences=differences)


@app.command()
def seeds(
    stored: Annotated[Path, typer.Option(help="results of all seeds")] = SEEDS,
    out: Out = OUT,
) -> None:
    """GOAT minus axial 2-D RoPE: the stored top-1 of each seed, and the shipped weights picture by picture."""
    started, top1, sizes = time.perf_counter(), {}, (48, 72, 96, 144, 192)
    results = load_results(find_modality("vision").evaluators["resolution"], stored)
    for result in sorted(results, key=lambda r: ("(" in r.label, r.label)):  # shipped weights (seed 0), then runs
        by_size = {row["size"]: row["top1"] for row in result.rows}
        top1.setdefault(result.method, []).append([by_size[size] for size in sizes])
    goat, rope = (np.array(top1[f"{method}_ssmax"]) for method in ("goat", "rope2d_axial"))
    by_seed, n = [], len(goat)
    for size, ours, theirs in zip(sizes, goat.T, rope.T, strict=True):
        gap = ours - theirs
        half = T_95[n] * gap.std(ddof=1) / math.sqrt(n)
        row = {"size": size, "goat": ours.tolist(), "rope": theirs.tolist()}
        row |= {"goat_mean": ours.mean(), "rope_mean": theirs.mean()}
        row |= {"ranges_overlap": bool(ours.min() <= theirs.max() and theirs.min() <= ours.max()), "gap": gap.tolist()}
        by_seed.append(row | {"mean": gap.mean(), "low": gap.mean() - half, "high": gap.mean() + half})
    pictures, labels, fonts = letters()
    models, shipped = [vision_model(method) for method in ("goat", "rope2d_axial")], []
    for size in sizes:
        right = [(probabilities(model, pictures, size).argmax(1) == labels).astype(float) for model in models]
        shares = {"goat": right[0].mean(), "rope": right[1].mean()}
        shipped.append({"size": size} | shares | interval(right[0] - right[1], fonts))
    settings = {"seeds": n, "pictures": len(labels), "fonts": len(set(fonts)), "draws": DRAWS}
    settings |= {"by_seed": f"Student's t over {n} pairs, 95%", "shipped": "seed 0; bootstrap over fonts, 95%"}
    save(out, "seeds", settings, started, by_seed=by_seed, shipped=shipped)


# ---- DNA ----

SMALL_GENOMES = "genomes:falciparum,knowlesi,ustilago,zymoseptoria,yeast"  # what the tiny models were trained on


def zpaq(primed: np.ndarray, held: dict[str, np.ndarray]) -> dict[str, float]:
    """Bits a base of windows, one after the other, in an archive of `zpaq -m5` behind the rows that it is primed with."""
    from modalities.dna.bases import decode

    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, codes in ({"primed": primed[:0]} | held).items():
            Path(folder, name).write_text(decode(np.concatenate([primed.ravel(), codes.ravel()])))
            command = ["zpaq", "add", f"{name}.zpaq", name, "-m5", "-t1"]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            sizes[name] = Path(folder, f"{name}.zpaq").stat().st_size
    return {name: 8 * (sizes[name] - sizes["primed"]) / codes.size for name, codes in held.items()}


def costs(codes: np.ndarray, others: Sequence[str]) -> dict[str, np.ndarray]:
    """(N, T) bits of every base of windows: of two models, read whole and in pieces of their training length, and of others."""
    from modalities.dna.scoring import score_windows

    whole = codes.shape[1]
    asked = [(name, f"dna_{name}_tiny.genomes", (whole, 256)) for name in ("goat", "rope")]
    found = {}
    for name, target, sizes in [*asked, *((Path(other).name, other, (whole,)) for other in others)]:
        folder = Path(target, "model")
        model = (zoo.load_model(folder) if folder.is_dir() else zoo.create_model(target)).eval()
        for size in sizes:
            nll = score_windows(model, codes.reshape(-1, size)).nll.numpy()
            found[name if size == whole else f"{name} at {size}"] = nll.reshape(codes.shape) / math.log(2)
    return found


def compared(bits: dict[str, np.ndarray], one: str, other: str) -> dict[str, Any]:
    """One minus other, window by window: mean, interval, median, and the share of windows in which one is better."""
    gap = bits[one] - bits[other]
    low, high = wilson(int((gap < 0).sum()), len(gap))
    row = {"difference": f"{one} - {other}", "windows": len(gap)} | interval(gap) | {"median": float(np.median(gap))}
    return row | {"first_better": float((gap < 0).mean()), "better_low": low, "better_high": high}


@app.command()
def context_mixer(
    windows: Annotated[int, typer.Option(help="of each held-out chromosome, spread over all of it")] = 187,
    length: Annotated[int, typer.Option(help="bases of a window")] = 4096,
    models: Annotated[str, typer.Option(help="others beside GOAT and RoPE: names or run folders, with commas")] = "",
    out: Out = OUT,
) -> None:
    """Bits a base of held-out windows: GOAT, RoPE, and the mean of context mixers that have read different rows.

    Nothing crosses windows, but in zpaq.
    """
    from modalities.dna.baselines.mixer import BASES, MIXERS, ORDERS, RATE, ROWS, Mixer, draw_rows
    from modalities.dna.data import open_heldout
    from modalities.dna.repeats import WORD, repeated_words
    from modalities.dna.sources import find_source

    if length % 256 or length < 256:
        raise typer.BadParameter(f"--length {length}: a window is cut into pieces of 256 bases; expected a multiple")
    data = open_heldout(find_source(SMALL_GENOMES)).items
    others = tuple(filter(None, models.split(",")))
    started, means, pairs = time.perf_counter(), [], []
    found = data.stretches(length, windows, 0).items()
    held = {contig: np.stack([data.codes(stretch) for stretch in stretches]) for contig, stretches in found}
    held = {contig: codes[(codes < 4).all(1)] for contig, codes in held.items()}
    every_window = np.concatenate(list(held.values()))
    every = costs(every_window, others)
    rows = [draw_rows(data.genome, data, seed=seed) for seed in range(len(MIXERS))]
    mixers = [Mixer.fit(each).costs(every_window)[0] / math.log(2) for each in rows]
    every["mixer"] = np.mean(mixers, 0)
    every["goat and mixer, half each"] = np.mean([1 - np.log2(2 ** -every["goat"] + 2**-each) for each in mixers], 0)
    packed, done = zpaq(rows[0], held) if shutil.which("zpaq") else {}, 0
    for contig, codes in held.items():
        bits = {name: cost[done : done + len(codes)].mean(1) for name, cost in every.items()}
        again = repeated_words(data.genome, contig, codes)[:, WORD - 1 :].mean(1)
        done += len(codes)
        for part, chosen in {"all": again >= 0, "unique": again <= 0.5, "repeats": again > 0.5}.items():
            at, these = {"contig": contig, "part": part}, {name: values[chosen] for name, values in bits.items()}
            if chosen.any():
                means += [at | {"of": n} | interval(v) | {"median": float(np.median(v))} for n, v in these.items()]
                asked = [("goat", "mixer"), ("rope", "mixer"), ("goat", "rope")]
                asked += [(Path(one).name, beside) for one in others for beside in ("mixer", "goat")]
                pairs += [at | compared(these, *two) for two in asked]
        if packed:
            means.append({"contig": contig, "part": "all", "of": "zpaq -m5, never restarted", "mean": packed[contig]})
    settings = {"windows": {c: len(w) for c, w in held.items()}, "length": length, "row": ROWS[1], "bases": BASES}
    settings |= {"mixers": len(rows)}
    settings |= {"source": SMALL_GENOMES, "repeats": "over half of a window's 16-mers stand elsewhere in its genome"}
    settings |= {"interval": "bootstrap over windows, 95%", "draws": DRAWS, "orders": ORDERS, "rate": RATE}
    save(out, "context_mixer", settings, started, means=means, pairs=pairs)


if __name__ == "__main__":
    sys.exit(call(app, prog="tools/controls.py"))
