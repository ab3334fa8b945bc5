"""One page of the models with weights: curves, priors by head, a prior to move over a text's attention, sortable tables.

    priorzoo gallery --out gallery.html
    priorzoo gallery --results results --results benchmarks/controls --out gallery.html

The page is one HTML file that asks the network for nothing. Scores with 95% intervals are from folders that `priorzoo evaluate
--out FOLDER` wrote, and from controls (JSON files of `tools/`); without --results from the checkout's benchmarks/ where the
command runs in one, else from the models' cards, which have no intervals. Exit codes: 0 done, 2 it cannot be made.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in recipes/train.py; read when torch is loaded

import torch
import typer
from rich.console import Console

from modalities.contract import find_modality
from recipes.commands import CommandError, call
from recipes.report import measured_by
from zoo.analysis import analyse
from zoo.files import write_text
from zoo.inputs import read_object
from zoo.positions import Positions
from zoo.pretrained import manifest
from zoo.prior_plot import FLOOR, layer_priors, log_prior_curve
from zoo.prior_plot_grid import centre_log_prior
from zoo.priors.ggd import Ggd
from zoo.priors.spectral import Spectral
from zoo.registry import create_model

PAGE = Path(__file__).with_name("gallery_page")
LIVE = "text_ggd_goat_tiny.facts"  # its prior is a GGD, a spectral series and a sink
SENTENCE = (  # Lincoln at Gettysburg, 1863
    "Four score and seven years ago our fathers brought forth on this continent a new nation, conceived in liberty."
)
LENGTH = 1024  # tokens of the priors' curves
ERROR = "_standard_error"
SHARES = ("accuracy", "free_generation", "top1")  # their intervals end at 0 and 1
FACTS = ("position", "steps", "seed", "tokens", "images", "train_context", "image_size", "data", "license")
TOLD = {
    "model": "shipped",
    "seed": "another seed",
    "baseline": "baseline",
    "control": "control",
}
Cell = tuple[float, float | None, float | None]  # a score and the ends of its 95% interval


@dataclass
class ScoreTable:
    """One score of one evaluator: a row for each model, a column for each place.

    Attributes:
        note: how it was measured.
        places: along `axis`: lengths, sizes, names.
        kinds: of the rows, keys of `TOLD`.
    """

    modality: str
    title: str
    score: str
    axis: str
    places: list[Any]
    note: str = ""
    rows: dict[str, dict[Any, Cell]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    @property
    def is_share(self) -> bool:
        return all(0 <= cell[0] <= 1 for row in self.rows.values() for cell in row.values())

    def add(self, label: str, kind: str, place: Any, cell: Cell) -> None:
        self.kinds[label] = kind
        self.rows.setdefault(label, {})[place] = cell
        if place not in self.places:
            self.places.append(place)

    def ordered(self) -> ScoreTable:
        """Itself, with numbers in order, and shipped models before what stands beside them."""
        if all(isinstance(place, int | float) for place in self.places):
            self.places.sort()
        kinds = list(TOLD)
        self.rows = {
            label: self.rows[label] for label in sorted(self.rows, key=lambda label: kinds.index(self.kinds[label]))
        }
        return self


def gallery_command(
    *,
    out: Annotated[Path, typer.Option(help="the HTML file")] = Path("gallery.html"),
    results: Annotated[
        list[Path], typer.Option(help="a folder of results or of controls; default: the checkout's, else the cards'")
    ] = [],  # noqa: B006
) -> None:
    folders = results or sorted(
        path for name in ("text_*", "vision_*", "dna_*", "controls") for path in Path("benchmarks").glob(name)
    )
    tables = stored_scores(folders) if folders else card_scores()
    page = gallery_page(tables, measured=bool(folders))
    write_text(out, page)
    told = f"written: {out}, {len(page.encode()) / 1e3:,.0f} kB, {len(manifest())} models, {len(tables)} tables"
    Console(highlight=False).print(told, markup=False, soft_wrap=True)


# ------------------------------------------------------------------------------------------------ scores


def card_scores() -> list[ScoreTable]:
    """What the cards of shipped weights have, without intervals."""
    found: dict[tuple[str, str], ScoreTable] = {}
    for name, entry in manifest().items():
        modality = _modality(entry)
        for row in entry.get("measured", []):
            axis, *scores = row
            for score in scores:
                table = found.setdefault((modality, score), ScoreTable(modality, modality, score, axis, []))
                table.add(name, "model", row[axis], (row[score], None, None))
    return [table.ordered() for table in found.values()]


def stored_scores(folders: Sequence[Path]) -> list[ScoreTable]:
    """Every score that was stored with its standard error, and the controls that stand beside them.

    Raises:
        CommandError: for a folder without results, or results of one evaluator that were measured in different ways.
    """
    found: dict[tuple[Path, str, str], ScoreTable] = {}
    controls: list[dict[str, Any]] = []
    for folder in folders:
        files = [*sorted(folder.glob("*/*.json")), *sorted(folder.glob("*.json"))]
        stored = [(path, content) for path in files if {"evaluator", "control"} & (content := read_object(path)).keys()]
        if not stored:
            raise CommandError(
                f"{folder} holds no results; expected {folder}/EVALUATOR/MODEL.json of priorzoo evaluate"
            )
        controls += [content for _, content in stored if "control" in content]
        results = [(path, content) for path, content in stored if "evaluator" in content]
        own = _modality_of(content["label"] for _, content in results)
        modality, known = own or folder.name, find_modality(own).evaluators if own else {}
        measured: dict[str, Any] = {}
        for path, content in results:
            how = measured_by(known.get(content["evaluator"]), content)
            if measured.setdefault(content["evaluator"], how) != how:
                raise CommandError(f"{path} was measured otherwise than others of its folder: {how}")
            _add_result(found, folder, modality, content)
    tables = [table.ordered() for table in found.values()]
    for content in controls:
        tables += _control(content, tables)
    for folder in folders:
        for path in sorted(folder.glob("*.paired.csv")):
            tables += _paired(path)
    return tables


def _paired(path: Path) -> list[ScoreTable]:
    """Differences to the model that others were compared with, score by score."""
    found: dict[str, ScoreTable] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        axis = (rows.fieldnames or [])[3]
        for row in rows:
            name, evaluator = row["model"], path.name.partition(".")[0]
            title = f"{evaluator}, difference to {row['against']}"
            note = f"paired over the same {row['units']} samples or documents, each the mean of a model's seeds"
            empty = ScoreTable(name.partition("_")[0], title, row["score"], axis, [], note)
            low, high = (None if math.isnan(float(row[end])) else float(row[end]) for end in ("low", "high"))
            cell = float(row["difference"]), low, high  # one unit alone, a single contig, has no interval
            kind = "model" if name in manifest() else "baseline"
            found.setdefault(row["score"], empty).add(name, kind, _place(row[axis]), cell)
    return [table.ordered() for table in found.values()]


def _place(written: str) -> int | float | str:
    """A place of an axis out of a table: a length, a size, or a name."""
    try:
        number = float(written)
    except ValueError:
        return written
    return int(number) if number.is_integer() else number


def _add_result(
    found: dict[tuple[Path, str, str], ScoreTable], folder: Path, modality: str, content: Mapping[str, Any]
) -> None:
    label, evaluator = content["label"], content["evaluator"]
    kind = "model" if label in manifest() else "seed" if label.startswith(f"{modality}.") else "baseline"
    for row in content.get("rows", []):
        axis = next(iter(row))
        for name, error in row.items():
            if ERROR not in name or error is None:
                continue
            score = name.replace(ERROR, "", 1)
            set_up = f"evaluator's version {content['version']}" + (
                f"; {content['source']}" if content["source"] else ""
            )
            table = found.setdefault(
                (folder, evaluator, score), ScoreTable(modality, evaluator, score, axis, [], set_up)
            )
            low, high = (row[score] + side * 1.96 * error for side in (-1, 1))
            if score.partition(" ")[0] in SHARES:
                low, high = max(low, 0.0), min(high, 1.0)
            table.add(label, kind, row[axis], (row[score], low, high))


def _control(content: Mapping[str, Any], tables: Sequence[ScoreTable]) -> list[ScoreTable]:
    """Put what a control found into the table that it is about, or make one that has models and control."""
    interval = content["settings"].get("interval", "")
    if content["control"] == "reduced":
        for table in (t for t in tables if (t.score, t.axis) == ("top1", "size")):
            table.note += f"; reduced, enlarged and averaged pictures: {interval}"
            for row in content["rows"]:
                if row["read"] != "native":  # the models' own rows
                    cell = row["mean"], row["low"], row["high"]
                    table.add(f"{row['method']}: {row['read']}", "control", row["size"], cell)
    if content["control"] == "context_mixer":
        note = f"windows of {content['settings']['length']:,} bases; {interval}; {content['settings']['repeats']}"
        table = ScoreTable("controls", "beside a context mixer", "bits per base", "contig", [], note)
        for row in content["means"]:
            kind = "control" if any(word in row["of"] for word in ("mixer", "zpaq")) else "model"
            cell = row["mean"], row.get("low"), row.get("high")
            table.add(row["of"], kind, f"{row['contig']}, {row['part']}", cell)
        return [table.ordered()]
    return []


def _modality(entry: Mapping[str, Any]) -> str:
    return entry["recipe"].partition(".")[0]


def _modality_of(labels: Iterable[str]) -> str:
    return next((_modality(manifest()[label]) for label in labels if label in manifest()), "")


# ------------------------------------------------------------------------------------------------ priors


@torch.no_grad()
def prior_curves(model: Any) -> dict[str, Any]:
    """{at, layers[layer][head][n], unit, trained}: K less its maximum, cut below `FLOOR`.

    On a line from the last of `LENGTH` tokens; on a grid from the centre of an image of twice the training side, the mean over
    patches at one distance.

    Raises:
        ValueError: see `zoo.prior_plot.layer_priors`.
    """
    priors = layer_priors(model)
    if model.train_positions().is_grid:
        height, width = model.config.train_size
        positions = model.positions(2 * height, 2 * width)
        rows, columns = positions.shape
        dy, dx = torch.arange(rows)[:, None] - rows // 2, torch.arange(columns) - columns // 2
        at, group = torch.hypot(dy.double(), dx.double()).flatten().unique(return_inverse=True)
        curves = [
            torch.stack([patches.flatten(1)[:, group == n].mean(-1) for n in range(len(at))], dim=-1)
            for patches, _ in (centre_log_prior(prior, positions) for prior in priors)
        ]
        trained, unit = model.config.train_size[0] // (2 * height // rows), "patches"
    else:
        at = torch.logspace(0, math.log2(LENGTH), 81, base=2, dtype=torch.float64).sub(1).round().unique().long()
        curves = [log_prior_curve(prior, LENGTH)[:, at.clamp(max=LENGTH - 1)] for prior in priors]
        trained, unit = model.config.train_context, "tokens"
    layers = [[[round(max(v, FLOOR), 3) for v in head] for head in curve.tolist()] for curve in curves]
    return {"at": [round(v, 3) for v in at.tolist()], "layers": layers, "unit": unit, "trained": trained}


@torch.no_grad()
def live_attention(name: str = LIVE, sentence: str = SENTENCE) -> dict[str, Any]:
    """{model, tokens, chosen, heads[n]}: what `attention(head)` of the page needs to find every head's weights in a sentence.

    Content logits are float64, up to a number for each row, rounded to 1e-6. `chosen` is the head in which both say most:
    that of the largest lesser one of KL(p‖π) and KL(p‖c), means over the queries.
    """
    model: Any = create_model(name).double()
    reading = model.read(sentence)
    count, heads, moved = len(reading.names), [], []
    line = Positions.line(count)
    for analysis, layer in zip(analyse(model, *reading.inputs, full=True), model.layers, strict=True):
        parts = layer.attention.prior.parts()
        [ggd] = [part for part in parts if isinstance(part, Ggd)]
        [series] = [part for part in parts if isinstance(part, Spectral)]
        # The rest is of the key's position alone, the same for every query: the last row has all keys.
        rest = [part for part in parts if part is not ggd and part is not series]
        key = sum(part.log_prior(line, line, causal=True)[0, :, -1].expand(ggd.num_heads, -1) for part in rest)
        assert analysis.content is not None
        for h in range(ggd.num_heads):
            content = analysis.content[0, h].log()
            assert analysis.weights is not None
            p = analysis.weights[0, h]
            beside_content = (torch.xlogy(p, p) - torch.xlogy(p, analysis.content[0, h])).nan_to_num().sum(-1)
            moved.append(min(float(analysis.divergence[0, h].mean()), float(beside_content.mean())))
            heads.append(
                {
                    "layer": analysis.layer,
                    "head": h,
                    "theta_alpha": float(ggd.theta_alpha[h]),
                    "theta_beta": float(ggd.theta_beta[h]),
                    "mu": float(2 * ggd.theta_mu[h].sinh()),
                    "omega": series.omega.tolist(),
                    "alpha": series.alpha[h].tolist(),
                    "beta": series.beta[h].tolist(),
                    "key": [round(v, 7) for v in key[h].tolist()],
                    "content": [[round(v, 6) for v in row[: i + 1].tolist()] for i, row in enumerate(content)],
                }
            )
    return {"model": name, "tokens": list(reading.names), "chosen": moved.index(max(moved)), "heads": heads}


# ------------------------------------------------------------------------------------------------ page


def gallery_page(tables: Sequence[ScoreTable], *, measured: bool) -> str:
    """The HTML of the page, from score tables and the weights that ship."""
    priors: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for name, entry in manifest().items():
        why = ""
        try:
            priors[name] = prior_curves(create_model(name))
        except ValueError as error:
            why = str(error)
        groups.setdefault(_modality(entry), []).append(_card(name, entry, priors.get(name), why, tables))
    data = {
        "tables": [_drawn(table) for table in tables],
        "priors": priors,
        "live": live_attention(),
    }
    parts = {
        "style": (PAGE / "page.css").read_text(encoding="utf-8"),
        "script": "".join((PAGE / name).read_text(encoding="utf-8") for name in ("priors.js", "page.js")),
        "count": str(len(manifest())),
        "models": "\n".join(
            f'<h3 class="group">{escape(kind)}</h3>\n<div class="cards">\n{"".join(cards)}</div>'
            for kind, cards in groups.items()
        ),
        "told": "Under each score its 95% interval, ±1.96 standard errors unless a table says otherwise; where all samples "
        "agree it has no width."
        if measured
        else "The scores are those of the models' cards, which have no intervals.",
        "tables": "\n".join(_table(n, table) for n, table in enumerate(tables)),
        "version": version("priorzoo"),
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
    }
    page = (PAGE / "page.html").read_text(encoding="utf-8")
    before, *marked = page.split("{{")
    return before + "".join(parts[name] + text for name, _, text in (piece.partition("}}") for piece in marked))


def _drawn(table: ScoreTable) -> dict[str, Any]:
    rows = {
        label: [[None if v is None else round(v, 5) for v in row[p]] if p in row else None for p in table.places]
        for label, row in table.rows.items()
        if table.kinds[label] != "control"
    }
    return {"places": table.places, "rows": rows, "share": table.is_share}


def _card(
    name: str, entry: Mapping[str, Any], prior: Mapping[str, Any] | None, why: str, tables: Sequence[ScoreTable]
) -> str:
    facts = "".join(
        f"<div><dt>{escape(fact.replace('_', ' '))}</dt><dd>{_prose(str(entry[fact]))}</dd></div>"
        for fact in FACTS
        if fact in entry
    )
    lines = [f'<article class="card" id="{escape(name)}">', f"<h4>{_breakable(name)}</h4>"]
    of = [n for n, table in enumerate(tables) if name in table.rows]
    if of:
        n = max(of, key=lambda n: len(tables[n].rows[name]))
        table, trained = tables[n], entry.get("train_context") or entry.get("image_size") or 0
        last = table.rows[name][max(table.rows[name], key=table.places.index)]
        what = f"{table.score} of {name} over {table.axis}; the last value is {_number(last[0])}"
        lines += [
            f'<figure><svg viewBox="0 0 340 170" role="img" aria-label="{escape(what)}" data-model="{escape(name)}" '
            f'data-table="{n}" data-trained="{trained}"></svg>',
            f"<figcaption>{escape(table.score)} ({escape(table.title)}) over {escape(table.axis)}</figcaption></figure>",
        ]
    lines.append(f"<dl>{facts}</dl>")
    if prior is None:
        lines.append(f'<p class="soft">{escape(why[0].upper() + why[1:])}.</p>')
    else:
        lines += ["<details><summary>Prior by head</summary>", _legend(len(prior["layers"][0]))]
        for layer in range(len(prior["layers"])):
            lines += [
                f'<figure><svg viewBox="0 0 340 170" role="img" aria-label="Log-prior of the heads of layer {layer} of '
                f'{escape(name)} over distance" data-prior="{escape(name)}" data-layer="{layer}"></svg>',
                f"<figcaption>layer {layer}: K − max K in nats, over the distance in {prior['unit']}"
                f"{', the mean over all patches at it' if prior['unit'] == 'patches' else ''}</figcaption></figure>",
            ]
        lines.append("</details>")
    return "\n".join([*lines, "</article>"])


def _legend(heads: int) -> str:
    line = '<svg viewBox="0 0 32 10" aria-hidden="true"><line class="s{}" x1="0" x2="32" y1="5" y2="5"/></svg>head {}'
    return f'<ul class="legend">{"".join(f"<li>{line.format(h % 4, h)}</li>" for h in range(heads))}</ul>'


def _table(n: int, table: ScoreTable) -> str:
    title = f"{table.modality}: {table.title}, {table.score} over {table.axis}"
    heads = ["model", "kind", *(f"{place:,}" if isinstance(place, int) else str(place) for place in table.places)]
    lines = [
        f'<h3 id="table-{n}">{escape(title)}</h3><p class="soft">{escape(table.note)}</p>',
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="table-{n}"><table aria-labelledby="table-{n}">',
        f"<thead><tr>{''.join(_heading(head) for head in heads)}</tr></thead><tbody>",
    ]
    for label, row in table.rows.items():
        kind = table.kinds[label]
        cells = "".join(_cell(row.get(place)) for place in table.places)
        lines.append(
            f'<tr class="{kind}"><th scope="row">{_breakable(label)}</th><td class="kind">{TOLD[kind]}</td>{cells}</tr>'
        )
    return "\n".join([*lines, "</tbody></table></div>"])


def _breakable(name: str) -> str:
    """A name that may be cut into lines behind its underscores."""
    return escape(name).replace("_", "_<wbr>")


def _prose(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _heading(text: str) -> str:
    return f'<th scope="col"><button type="button">{escape(text)}</button></th>'


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return '<td data-value="">–</td>'
    value, low, high = cell
    shown = f"<small>{_number(low)} to {_number(high)}</small>" if low is not None and high is not None else ""
    return f'<td data-value="{value:.6g}">{_number(value)}{shown}</td>'


def _number(value: float) -> str:
    return f"{value:.3f}"


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/gallery.py") -> int:
    return call(gallery_command, argv, prog=prog)


if __name__ == "__main__":
    sys.exit(main())
