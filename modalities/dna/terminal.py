"""Results of DNA evaluators in a terminal: what was written, letter by letter, and the entries of a file that matter most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from modalities.evaluation import ModelResult, batches

MATCH, MISMATCH = "bold blue", "dark_orange"  # and upper against lower case, for eyes that tell no colours apart
MOST_MODELS = 12
NOTHING_SHARED = "no text is shown: these models wrote after prompts of different lengths; choose them with --lengths"
LABEL = 22  # letters of a model's name


@dataclass(frozen=True)
class Example:
    """One true continuation and what models wrote in its place; `written` holds (model, text)."""

    place: str
    length: int
    truth: str
    written: tuple[tuple[str, str], ...]


def examples(results: Sequence[ModelResult], count: int) -> list[Example]:
    """The first continuations that models share, after prompts of the shared length next to that of training, of one model
    of each group of seeds. Models whose longest prompts differ continue other places and share none: there are no examples."""
    shown = {result.group or result.label: result for result in reversed(results)}
    models = list(reversed(shown.values()))[:MOST_MODELS]
    lengths = set.intersection(*({cell["length"] for cell in result.cells.values()} for result in models))
    if not lengths:
        return []
    length = min(lengths, key=lambda n: abs(math.log(n / models[0].trained_at)))
    texts = [_texts(result, length) for result in models]
    places = [place for place in texts[0] if all(place in others for others in texts)]
    names = [short_name(result, models) for result in models]
    return [
        Example(*place, texts[0][place][0], tuple((n, t[place][1]) for n, t in zip(names, texts, strict=True)))
        for place in places[:count]
    ]


def _texts(result: ModelResult, length: int) -> dict[tuple[str, int], tuple[str, str]]:
    return {
        (place, length): (truth, written)
        for cell in result.cells.values()
        if cell["length"] == length
        for place, truth, written in zip(cell["places"], cell["truth"], cell["written"], strict=True)
    }


def short_name(result: ModelResult, among: Sequence[ModelResult]) -> str:
    """The method where that tells models apart, else the label."""
    methods = {other.method for other in among}
    return result.method if result.method and len(methods) == len(among) else result.label


def by_agreement(truth: str, written: str) -> tuple[str, str]:
    """`written` twice, with blanks elsewhere: bases that agree in upper case, bases that do not in lower case."""
    pairs = list(zip(truth, written, strict=True))
    return "".join(w if w == t else " " for t, w in pairs), "".join(" " if w == t else w.lower() for t, w in pairs)


def agreement(truth: str, written: str) -> float:
    return sum(t == w for t, w in zip(truth, written, strict=True)) / len(truth)


def lines_of(example: Example, width: int) -> Iterator[list[tuple[str, str, str]]]:
    """For each `width` bases: (name, bases that agree, bases that do not), the truth first."""
    for start in range(0, len(example.truth), width):
        part = slice(start, start + width)
        truth = example.truth[part]
        yield [
            ("truth", truth, " " * len(truth)),
            *((name, *by_agreement(truth, text[part])) for name, text in example.written),
        ]


def show_completions(results: Sequence[ModelResult], console: Console, count: int = 1) -> None:
    """The truth above what each model wrote."""
    shown = examples(results, count)
    if not shown:
        console.print(NOTHING_SHARED)
    for example in shown:
        console.print(f"{example.place} after {example.length} tokens; AGREES in upper case, differs in lower case")
        share = {name: agreement(example.truth, text) for name, text in example.written}
        for rows in lines_of(example, max(20, min(100, console.width - LABEL - 6))):
            for name, same, other in rows:
                line = Text(f"{name[:LABEL]:<{LABEL}}", style="dim")
                line.append(f"{share[name]:4.0%} " if name in share else "     ")
                for match, mismatch in zip(same, other, strict=True):
                    style = "bold" if name == "truth" else MATCH if match != " " else MISMATCH
                    line.append(match if match != " " else mismatch, style=style)
                console.print(line, no_wrap=True, overflow="crop")
            console.print()


def show_records(results: Sequence[ModelResult], console: Console, count: int = 20) -> None:
    """The first records of the file and the totals: bits per base, a column a model, as many as the terminal has room for."""
    for part in batches(len(results), max(1, (console.width - 46) // 12)):
        console.print(_records(results[part], [short_name(result, results) for result in results[part]], count))
    if (more := len(results[0].rows) - count) > 0:
        console.print(f"{more:,} more records in the files")


def _records(results: Sequence[ModelResult], names: Sequence[str], count: int) -> Table:
    first = results[0].rows
    table = _table("score: bits per base of every record", ["record"], ["length", "unknown", "GC", *names])
    table.columns[0].min_width = 14
    for n, row in enumerate(first[:count]):
        bits = (_number(result.rows[n]["bits_per_base"]) for result in results)
        table.add_row(row["name"], f"{row['length']:,}", f"{row['unknown']:,}", _number(row["gc"], ".1%"), *bits)
    table.add_section()
    bits = (_number(total_bits_per_base(result)) for result in results)
    length, unknown = (sum(row[name] for row in first) for name in ("length", "unknown"))
    table.add_row(f"all {len(first):,} records", f"{length:,}", f"{unknown:,}", "", *bits, style="bold")
    return table


def total_bits_per_base(result: ModelResult) -> float:
    """Over all counted bases of all records."""
    bits = sum(row["bits_per_base"] * row["bases"] for row in result.rows if row["bases"])
    bases = sum(row["bases"] for row in result.rows)
    return bits / bases if bases else math.nan


def show_variants(results: Sequence[ModelResult], console: Console, count: int = 10) -> None:
    """Each model's most disfavoured alternative alleles, and what could not be scored."""
    for result in results:
        scored = sorted((row for row in result.rows if not row["reason"]), key=lambda row: row["llr_nats"])
        title = (
            f"variants: {short_name(result, results)}, {len(scored):,} scored; the alternatives it finds least likely"
        )
        table = _table(title, ["place", "id", "change", "kind"], ["log p(alt) − log p(ref), nats", "bits"])
        for row in scored[:count]:
            change = f"{_cut(row['ref'])}→{_cut(row['alt'])}"
            numbers = (f"{row[name]:+.3f}" for name in ("llr_nats", "llr_bits"))
            table.add_row(f"{row['chrom']}:{row['pos']}", row["id"], change, row["kind"], *numbers)
        console.print(table)
    reasons = Counter(row["reason"].split(":")[0] for row in results[0].rows if row["reason"])
    for reason, times in reasons.most_common():
        console.print(f"not scored: {times:,} with {reason}")


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", overflow="fold", min_width=6)
    return table


def _number(value: float, how: str = ".4f") -> str:
    return "–" if math.isnan(value) else format(value, how)


def _cut(allele: str, most: int = 12) -> str:
    return allele if len(allele) <= most else f"{allele[: most - 1]}…"
