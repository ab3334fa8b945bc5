"""A linear probe on frozen features: does a window of DNA lie in annotated features, such as coding sequence?"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modalities.decoder.scoring import device_of
from modalities.dna.baselines.markov import kmers
from modalities.dna.bases import UNKNOWN, reverse_complement
from modalities.dna.evaluation import DnaEvaluator, StrandSettings, one_count, strands_of, window_of
from modalities.dna.formats import feature_kinds, read_features
from modalities.dna.genome import open_genome
from modalities.dna.scoring import WindowScorer, tokens_of
from modalities.dna.sources import DnaSource, find_source
from modalities.dna.tokenizers import load_tokenizer
from modalities.evaluation import Axis, Cell, CellValue, ModelResult, Score, option
from modalities.figures import RULE, panels
from modalities.heldout import fingerprint_of
from modalities.results import short_names
from zoo.model import ZooModel
from zoo.naming import nearest
from zoo.prior_plot import save_figure
from zoo.slices import slices

__all__ = ["LinearProbe", "LinearProbeSettings"]

CELL_WINDOWS = 64
ENOUGH = 50  # windows of a class
FOLDS, INNER = 5, 3  # of the test, and inside a training part for the strength of regularisation
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # C of scikit-learn
ORDER = 4  # of the k-mers of the control
BLOCK, BLOCKS = 50_000, 40  # most bases of a block, least number of blocks
DRAWS = 1000  # of the bootstrap
ROWS = ("features", "k-mers", "features − k-mers", "shuffled labels")


@dataclass(frozen=True)
class LinearProbeSettings(StrandSettings):
    """An annotated genome, and what to tell apart in it. `samples` counts windows of each class (default 1000)."""

    genbank: str | None = option(None, "GenBank file with features, several with commas")
    feature: str = option("CDS", "kind of feature whose bases are the positive class")
    window: int | None = option(None, "bases of a window, as 512 or 1k; default: the training length", parse=one_count)
    seed: int = option(42, "of every random draw")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.samples is not None and self.samples < ENOUGH:
            raise ValueError(f"samples {self.samples}: a probe needs at least {ENOUGH} windows of each class")


@dataclass(frozen=True)
class Examples:
    """Windows, and what is known of them: (N,) each. `blocks` are numbered."""

    contigs: tuple[str, ...]
    starts: tuple[int, ...]
    labels: np.ndarray
    blocks: np.ndarray


class LinearProbe(DnaEvaluator):
    """Area under the ROC curve of a logistic regression on the model's mean features of a window, which tells windows that lie
    in annotated features as a whole from windows that hold no base of one; as many of each.

    Windows lie on a grid, do not overlap and have no unknown base. Folds are of whole blocks of the genome (at most 50,000
    bases): five, each predicted by a regression on the other four, whose C is chosen inside them. The AUC is the mean over
    folds, its 95% interval a bootstrap over blocks. Three rows stand beside it:

    k-mers: the same of the frequencies of 4-mers, the composition that needs no model.
    features − k-mers: the difference of the two on the same windows, with the interval of the difference.
    shuffled labels: features with labels in random order; 0.5 but for chance.

    With strands "both" features are means over a window and its reverse complement.
    """

    name = "probe"
    summary = (
        "AUC of a linear probe on frozen features, such as coding against non-coding, beside k-mers and shuffled labels"
    )
    scores = (
        Score("auc", "area under the ROC curve", unit_interval=True),
        Score("low", "95% interval, from", unit_interval=True),
        Score("high", "95% interval, to", unit_interval=True),
    )
    axis = Axis("probe", "what the probe reads")
    settings_class = LinearProbeSettings
    default_samples = 1000

    @property
    def source_name(self) -> str:
        return f"{self.settings.feature} of {self.settings.genbank}"

    def points(self, model: ZooModel) -> tuple[str, ...]:
        return ROWS

    def window(self, model: ZooModel) -> int:
        return self.settings.window or window_of(model, model.config.train_context)

    def examples(self, window: int) -> Examples:
        if self.settings.genbank is None:
            raise ValueError("probe reads an annotated genome: name a GenBank file with --genbank")
        settings = self.settings
        samples = settings.samples or self.default_samples
        return _examples(find_source(settings.genbank), settings.feature, window, samples, settings.seed)

    def identity(self, model: ZooModel) -> dict[str, Any]:
        kept = {k: v for k, v in asdict(self.settings).items() if k in ("feature", "seed")}
        examples = self.examples(self.window(model))
        return kept | {
            "bases": open_genome(find_source(self.settings.genbank)).fingerprint,
            "windows": _digest(examples),
            "window": self.window(model),
            "strands": strands_of(model, self.settings),
            "tokenizer": load_tokenizer(model.config.tokenizer).fingerprint,
        }

    def cells(self, model: ZooModel) -> list[Cell]:
        if isinstance(model, WindowScorer):
            raise ValueError(f"{model.config.position} has no features to probe; leave it out")
        _sklearn()  # raises before anything is measured
        window = self.window(model)
        examples, both = self.examples(window), strands_of(model, self.settings) == "both"
        return [
            Cell(f"windows={part.start}-{part.stop}", (1 + both) * window * (part.stop - part.start), {"part": part})
            for part in slices(len(examples.labels), CELL_WINDOWS)
        ]

    def measure(self, model: ZooModel, cell: Cell) -> CellValue:
        """Features (n, C), float32 in base64, of windows; 4-mers are counted when rows are made."""
        window, part = self.window(model), cell.data["part"]
        codes = self._codes(window)[part]
        size, strands = self.settings.batch_size(window), [codes]
        if strands_of(model, self.settings) == "both":
            strands.append(reverse_complement(codes))
        features = [
            np.concatenate([mean_features(model, one[piece]) for piece in slices(len(one), size)]) for one in strands
        ]
        mean = np.mean(features, axis=0).astype("<f4")
        return {"window": window, "width": mean.shape[1], "features": base64.b64encode(mean.tobytes()).decode()}

    def _codes(self, window: int) -> np.ndarray:
        """(N, window)."""
        genome, examples = open_genome(find_source(self.settings.genbank)), self.examples(window)
        places = zip(examples.contigs, examples.starts, strict=True)
        return np.stack([genome.codes(contig, start, start + window) for contig, start in places])

    def rows(self, cells: Mapping[str, CellValue]) -> list[dict[str, Any]]:
        parts = list(cells.values())
        window, width = parts[0]["window"], parts[0]["width"]
        raw = b"".join(base64.b64decode(cell["features"]) for cell in parts)
        examples, features = self.examples(window), np.frombuffer(raw, "<f4").reshape(-1, width)
        composition = np.stack([np.bincount(kmers(codes, ORDER), minlength=4**ORDER) for codes in self._codes(window)])
        labels, seed = examples.labels, self.settings.seed
        shuffled = np.random.default_rng([seed, 1]).permutation(labels)
        folds = _folds(labels, examples.blocks, seed)
        common = {"windows": len(labels), "blocks": len(set(examples.blocks.tolist())), "window": window}
        scored = {
            "features": (labels, _held_out_scores(features, labels, examples.blocks, folds)),
            "k-mers": (labels, _held_out_scores(composition / window, labels, examples.blocks, folds)),
            "shuffled labels": (shuffled, _held_out_scores(features, shuffled, examples.blocks, folds)),
        }
        draws = {name: _bootstrap(*one, folds, examples.blocks, seed) for name, one in scored.items()}
        draws["features − k-mers"] = draws["features"] - draws["k-mers"]
        rows = []
        for name in ROWS:
            auc, rest = float(draws[name][0]), draws[name][1:]
            low, high = np.nanquantile(rest, (0.025, 0.975)).tolist()
            rows.append({"probe": name, "auc": auc, "low": low, "high": high, **common})
        return rows

    def draw(self, results: list[ModelResult], path: Path) -> None:
        """AUC and interval of every model and of its controls."""
        figure, (axis,) = panels(1, 1, width=7.0, height=1.2 + 0.8 * len(results))
        shown, colors = [name for name in ROWS if "−" not in name], ("#0072B2", "#E69F00", "0.55")
        for n, result in enumerate(results):
            for k, (name, color) in enumerate(zip(shown, colors, strict=True)):
                (row,) = (row for row in result.rows if row["probe"] == name)
                place = n + 0.22 * (k - 1)
                axis.plot([row["low"], row["high"]], [place, place], color=color, linewidth=1.6)
                axis.plot(row["auc"], place, "o", color=color, markersize=5, label=None if n else name)
        axis.set_yticks(range(len(results)), short_names(results))
        axis.set(ylim=(len(results) - 0.5, -0.5), xlabel="area under the ROC curve, 95% interval over blocks")
        axis.axvline(0.5, **RULE)
        axis.grid(axis="x", alpha=0.25, linewidth=0.6)
        axis.legend(fontsize=8, frameon=False)
        save_figure(figure, path)


@torch.inference_mode()
def mean_features(model: Any, windows: np.ndarray) -> np.ndarray:
    """(B, C) float64: the mean over the tokens of windows (B, T), without the start, of features after the last norm."""
    tokenizer = load_tokenizer(model.config.tokenizer)
    ids, spans, _ = tokens_of(tokenizer, windows)
    tokens = torch.as_tensor(ids, device=device_of(model))
    inputs = torch.cat([torch.full_like(tokens[:, :1], tokenizer.bos_id), tokens], dim=1)
    features = model.forward_features(inputs)[:, 1:, : model.config.dim]  # a copy expert's logits stand behind them
    features = features.double().cpu().numpy()
    real = (spans > 0)[..., None]
    return (features * real).sum(1) / real.sum(1)


@lru_cache(maxsize=4)
def _examples(source: DnaSource, feature: str, window: int, samples: int, seed: int) -> Examples:
    """Windows of both classes, equally many, in random order.

    Raises:
        ValueError: for a kind of features that there is none of; for too few of a class, or of blocks that have one, with
            the counts.
    """
    genome = open_genome(source)
    inside = dict(part for path in source.files for part in read_features(path, feature))
    if not any(inside.values()) and feature not in (kinds := {k for path in source.files for k in feature_kinds(path)}):
        raise ValueError(
            f"{source.name} has no features {f'{feature!r}; {nearest(feature, kinds)}' if kinds else 'at all'}"
        )
    names, starts, labels, blocks = [], [], [], []
    block = max(window, min(BLOCK, genome.bases // BLOCKS))
    done = 0
    for contig in genome.contigs:
        mask = np.zeros(contig.length + 1, np.int64)
        for start, stop in inside.get(contig.name, ()):
            mask[start] += 1
            mask[stop] -= 1
        count = contig.length // window
        covered = (np.cumsum(mask[:-1])[: count * window] > 0).reshape(count, window).sum(1)
        known = (genome.codes(contig.name)[: count * window] != UNKNOWN).reshape(count, window).all(1)
        chosen = np.flatnonzero(known & ((covered == 0) | (covered == window)))
        names += [contig.name] * len(chosen)
        starts += (chosen * window).tolist()
        labels += (covered[chosen] == window).tolist()
        blocks += (done + chosen * window // block).tolist()
        done += contig.length // block + 1
    truth, rng = np.array(labels, bool), np.random.default_rng([seed, window])
    size = min(samples, int(truth.sum()), int((~truth).sum()))
    kept = [rng.permutation(np.flatnonzero(truth == one))[:size] for one in (True, False)]
    order = rng.permutation(np.concatenate(kept).astype(int))
    places = np.array(blocks, np.int64)[order]
    if size < ENOUGH or len(set(places.tolist())) < 2 * FOLDS:
        raise ValueError(
            f"{source.name} has {int(truth.sum()):,} windows of {window:,} bases in {feature} features and "
            f"{int((~truth).sum()):,} outside, in {len(set(blocks)):,} blocks; a probe needs at least {ENOUGH} of each in "
            f"{2 * FOLDS}: choose a shorter window, another feature, or a larger genome"
        )
    return Examples(tuple(names[n] for n in order), tuple(starts[n] for n in order), truth[order], places)


def _digest(examples: Examples) -> str:
    rows = zip(examples.contigs, examples.starts, examples.labels.tolist(), strict=True)
    return fingerprint_of(f"{contig}\t{start}\t{label}\n".encode() for contig, start, label in rows)


def _folds(labels: np.ndarray, blocks: np.ndarray, seed: int) -> np.ndarray:
    """(N,) the fold of each window, whole blocks together and classes balanced."""
    sklearn = _sklearn()
    splitter = sklearn.model_selection.StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    fold = np.zeros(len(labels), np.int64)
    for n, (_, test) in enumerate(splitter.split(labels[:, None], labels, blocks)):
        fold[test] = n
    return fold


def _held_out_scores(features: np.ndarray, labels: np.ndarray, blocks: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """(N,) decision values of each window, by regressions that were fitted without its fold."""
    sklearn = _sklearn()
    scores = np.full(len(labels), math.nan)
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        regression = sklearn.pipeline.make_pipeline(
            sklearn.preprocessing.StandardScaler(), sklearn.linear_model.LogisticRegression(max_iter=2000)
        )
        search = sklearn.model_selection.GridSearchCV(
            regression,
            {"logisticregression__C": STRENGTHS},
            scoring="roc_auc",
            cv=sklearn.model_selection.StratifiedGroupKFold(INNER),
        )
        search.fit(features[train].astype(np.float64), labels[train], groups=blocks[train])
        scores[test] = search.decision_function(features[test].astype(np.float64))
    return scores


def _bootstrap(labels: np.ndarray, scores: np.ndarray, folds: np.ndarray, blocks: np.ndarray, seed: int) -> np.ndarray:
    """(1 + DRAWS,) AUC, mean over folds: of all windows, then of blocks drawn with replacement, the same for all probes."""
    names, index = np.unique(blocks, return_inverse=True)
    rng, found = np.random.default_rng([seed, 2]), [auc(labels, scores, folds, np.ones(len(labels)))]
    for _ in range(DRAWS):
        times = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))
        found.append(auc(labels, scores, folds, times[index]))
    return np.array(found)


def auc(labels: np.ndarray, scores: np.ndarray, folds: np.ndarray, weights: np.ndarray) -> float:
    """Mean over folds of P(score of a positive > that of a negative) + ½ P(equal), windows weighted; folds without a class do
    not count, and NaN where all lack one."""
    found = []
    for fold in range(FOLDS):
        mine = folds == fold
        y, s, w = labels[mine], scores[mine], weights[mine]
        if (total := w[y].sum() * w[~y].sum()) > 0:
            _, rank = np.unique(s, return_inverse=True)
            positive, negative = (np.bincount(rank[k], w[k], minlength=rank.max() + 1) for k in (y, ~y))
            below = np.cumsum(negative) - negative
            found.append((positive * (below + negative / 2)).sum() / total)
    return float(np.mean(found)) if found else math.nan


def _sklearn() -> Any:
    try:
        import sklearn
        import sklearn.linear_model
        import sklearn.model_selection
        import sklearn.pipeline
        import sklearn.preprocessing
    except ImportError as error:
        raise ImportError("the probe needs the package `scikit-learn`: pip install scikit-learn") from error
    return sklearn
