"""Train a model of the zoo by recipe. One flat file for every modality.

    deepspeed --num_gpus N recipes/train.py text.ggd_ssmax_tiny [--set train.steps=200 ...]
    torchrun --nproc-per-node N recipes/train.py text.ggd_ssmax_tiny
    python recipes/train.py text.ggd_ssmax_tiny
    python recipes/train.py my_recipe.py[:function]         a recipe of your own, in a file that may register priors

The run folder (recipes/runs.py) holds the resolved recipe, metrics, checkpoints and the final weights. Exit codes:
0 done, 1 training failed (loss or gradient not finite), 2 the recipe cannot be run as written, 128 + n stopped by
signal n after saving a checkpoint.

SIGTERM or Ctrl-C asks the ranks to finish a step, save and stop; `--resume auto` continues from there. Ctrl-C in a terminal
reaches every process. SIGTERM to the outer `deepspeed` command alone does not: it exits, its ranks continue, and
nothing is saved. Send it to the whole process group (`kill -TERM -- -PGID`), to the `deepspeed.launcher.launch` process
below it, or to `torchrun`, which all pass it on; processes still running 30 seconds later are killed. `deepspeed` itself
then exits with 1, whatever its ranks returned.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

if __name__ == "__main__":  # import `recipes` from this checkout, and none of this folder's files as top-level modules
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    # Spinning threads slow each other where cores are shared. The variable is read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from recipes.commands import call
from recipes.config import ConfigError, Recipe, apply_overrides, load_deepspeed_json, resolve
from recipes.registry import list_recipes, recipe_named
from recipes.samples import sample_page
from recipes.step import Step, TrainingFailure, take_step
from recipes.trackers import find_trackers, open_trackers
from zoo.cli import Import
from zoo.outside import import_named

CALIBRATION_STEPS = 5


@contextmanager
def stop_signals():
    """A list that SIGTERM and Ctrl-C append to; after a step the ranks agree to stop, and the loop saves."""
    received = []

    def handle(number, _):
        received.append(number)
        if len(received) > 3:  # a launcher passes Ctrl-C on as two or three signals; a fourth signal aborts immediately
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_command(
    recipe: Annotated[str, typer.Argument(help="such as text.ggd_ssmax_tiny, see --list; or FILE.py[:function]")] = "",
    *,
    list_: Annotated[bool, typer.Option("--list", help="name every recipe and stop")] = False,
    set_: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="change a recipe value")] = [],  # noqa: B006
    import_: Import = [],  # noqa: B006
    deepspeed_config: Annotated[
        str | None,
        typer.Option(
            "--deepspeed_config",
            "--deepspeed-config",
            metavar="JSON",
            help="your DeepSpeed file, merged into the recipe's",
        ),
    ] = None,
    run_dir: Annotated[str | None, typer.Option(metavar="DIR", help="default: runs/<recipe>/<time>")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="auto|DIR", help="auto: continue from the newest complete checkpoint, if any")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print what would run; touch neither data nor disk")
    ] = False,
    world: Annotated[int | None, typer.Option(metavar="N", help="with --dry-run: plan for N ranks")] = None,
    calibrate: Annotated[
        int | None,
        typer.Option(
            metavar="[STEPS]",
            min=1,
            help=f"a dry run with so many real steps, {CALIBRATION_STEPS} unless told: speed, memory and time to the end",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="let DeepSpeed log, and show the trace of an error")
    ] = False,
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,  # of launchers
) -> int:
    import_named(import_)
    if list_:
        print("\n".join(list_recipes()))
        return 0
    if not recipe:
        raise ConfigError("name a recipe, such as text.ggd_ssmax_tiny (--list names all)")
    changed, overridden_keys = apply_overrides(recipe_named(recipe), set_)
    user_config = load_deepspeed_json(deepspeed_config) if deepspeed_config else {}
    find_trackers(changed.train.report_to)
    if calibrate and world is not None:
        raise ConfigError("--calibrate measures the ranks there are; expected it without --world")
    if calibrate or not dry_run:
        from recipes.plain import require_packages

        require_packages(changed, user_config)
    words = [recipe, *(word for setting in set_ for word in ("--set", setting))]
    words += [word for name in import_ for word in ("--import", name)]
    words += ["--deepspeed_config", deepspeed_config] if deepspeed_config else []
    try:
        if dry_run or calibrate:
            from recipes.estimate import print_plan

            return print_plan(
                changed, user_config, overridden_keys, world=world, calibrate=calibrate or 0, verbose=verbose
            )
        with stop_signals() as signals, ExitStack() as held:
            return train(
                changed,
                signals,
                held,
                words=words,
                overridden_keys=overridden_keys,
                user_config=user_config,
                run_dir=run_dir,
                resume=resume,
                verbose=verbose,
            )
    except TrainingFailure as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once per machine
            print(f"training failed: {error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None, *, prog: str = "recipes/train.py") -> int:
    return call(train_command, launcher_words(sys.argv[1:] if argv is None else argv), prog=prog)


def launcher_words(words: Sequence[str]) -> list[str]:
    """The options as this command has them: `--deepspeed FILE.json`, as Hugging Face's Trainer writes it, is
    `--deepspeed_config FILE.json`, the flag of DeepSpeed's own parser says nothing, and `--calibrate` has a number."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--deepspeed":
            found += ["--deepspeed_config"] * following.endswith(".json")
        elif word == "--calibrate" and not following.isdigit():
            found += [word, str(CALIBRATION_STEPS)]
        else:
            found.append(word.replace("--deepspeed=", "--deepspeed_config=", 1))
    return found


def train(
    recipe: Recipe,
    signals: list[int],
    held: ExitStack,
    *,
    words: Sequence[str],
    overridden_keys: set[str],
    user_config: dict[str, Any],
    run_dir: str | None,
    resume: str | None,
    verbose: bool,
) -> int:
    """`held`: closed when the run ends; `overridden_keys`: the keys that --set named; `user_config`: the user's DeepSpeed file,
    parsed; others: the options."""
    import torch

    from modalities.contract import find_modality
    from modalities.loading import to_device
    from recipes import engine as backend
    from recipes.checkpoints import prune
    from recipes.console import TrainingDisplay, clock, short
    from recipes.deepspeed_check import check_with_deepspeed
    from recipes.during import Monitors
    from recipes.ownership import own_run
    from recipes.plain import create_engine
    from recipes.runs import load_weights
    from recipes.sequence import check_sequence
    from zoo.files import sync

    # ---- ranks, plan, run folder --------------------------------------------------------------------------------
    ranks = backend.start(verbose=verbose)
    plan = resolve(
        recipe, world=ranks.world, device=ranks.device.type, user_config=user_config, overridden_keys=overridden_keys
    )
    if user_config:
        check_with_deepspeed(plan.deepspeed)
    recipe, settings = plan.recipe, plan.recipe.train
    ranks = replace(ranks, shared=settings.sequence_parallel)
    run, checkpoint = held.enter_context(own_run(plan, ranks, run_dir=run_dir, resume=resume, words=words))
    modality = find_modality(recipe.modality)

    # ---- model, engine, data --------------------------------------------------------------------------------
    torch.manual_seed(settings.seed)
    source, universal = backend.loadable(checkpoint, plan, ranks) if checkpoint else (None, False)
    share: dict[str, Any] = {"rank": ranks.group, "world": ranks.groups, "micro_batch": settings.micro_batch}
    model = modality.build(recipe.model.name, recipe.model.options, recipe.data)
    check_sequence(model, settings.sequence_parallel)
    if source is None and recipe.model.init_from:
        load_weights(model, recipe.model.init_from)
    monitors = Monitors(recipe, modality, model)
    loader = modality.loader(recipe.data, **share)
    samples = recipe.evaluate.samples
    heldout = modality.heldout(recipe.data, samples=samples, **share) if recipe.evaluate.every else None
    engine = create_engine(model, plan, ranks, universal=universal)
    step, seen = 0, 0  # finished steps; targets the loss was taken over
    if source:
        state = engine.load(source)
        step, seen = state["step"], state["seen"]
        loader.load_state_dict(rank_state(state["data"], ranks))
    if ranks.lead:
        if source:  # the number of steps, say, may be another one now
            run.describe(plan)
        run.begin(step, settings.keep)
    trackers = held.enter_context(open_trackers(settings.report_to if ranks.lead else "", run, plan, step))

    def record(values: dict) -> None:
        if ranks.lead:
            run.log(values)
            trackers.log(values)

    def evaluate() -> dict[str, float]:
        """Held-out loss and the modality's further metrics, means over all targets."""
        engine.train(False)
        names, weight = ("loss", *modality.metrics), 0.0
        totals = torch.zeros(len(names), dtype=torch.float64, device=ranks.device)
        with torch.no_grad(), engine.averaged():
            for batch in heldout or ():
                count = modality.weight(batch)[0]
                batch = to_device(batch, ranks.device)
                loss, metrics = modality.loss(engine, batch)  # every rank runs every batch: ZeRO-3 gathers together
                if count:
                    totals += torch.stack([loss, *(metrics[name] for name in modality.metrics)]).double() * count
                weight += count
        engine.train()
        # Every rank of a group has the weight of all its samples, and a share of their losses.
        *sums, weight = engine.sum(*totals, weight / ranks.shared)
        return {f"heldout_{name}": value / weight for name, value in zip(names, sums, strict=True)}

    def save() -> None:
        if ranks.lead:
            sync(run.metrics_path)
        data = engine.gather_groups(loader.state_dict())
        engine.save(run.checkpoint(step), {"step": step, "seen": seen, "data": data})
        if ranks.lead:
            prune(run.checkpoint_root, settings.keep)

    # ---- the loop -----------------------------------------------------------------------------------------------
    unit, begun, saved_at = modality.unit, time.perf_counter(), step if source else None
    show = TrainingDisplay(recipe.name, settings.steps, step, show=ranks.lead, log_every=settings.log_every)
    with show:
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
        show.print(
            f"{recipe.name}: {recipe.model.name}, {short(parameters)} parameters, {settings.precision}, "
            f"ZeRO {settings.zero_stage}, batch {settings.micro_batch} × {settings.accumulation} × {ranks.groups} on "
            f"{ranks.device.type}{f', {ranks.shared} ranks a line' if ranks.shared > 1 else ''}; run folder {run.path}"
        )
        if source:
            show.print(f"resuming after step {step} from {source}")
        batches = iter(loader)
        engine.train()
        done: Step | None = None
        measured: dict[str, float] = {}
        while step < settings.steps:
            tick = time.perf_counter()
            try:
                done = take_step(engine, modality, batches, step + 1, signals)
            except TrainingFailure as error:
                good = run.checkpoints()
                raise TrainingFailure(
                    f"{error}; last good checkpoint: {good[-1] if good else 'none yet'}. A lower optim.lr, a longer "
                    "optim.warmup or train.precision=fp32 may help"
                ) from error
            step, seen = step + 1, seen + round(done.targets)

            seconds = time.perf_counter() - tick
            values: dict[str, Any] = {"step": step, "loss": done.loss, "lr": done.lr, unit: seen}
            values |= {"grad_norm": done.norm} if engine.knows_gradients else {}
            values |= {f"{unit}_per_s": done.targets / seconds, "seconds": round(time.perf_counter() - begun, 3)}
            record(values)
            show.update(values, unit)
            figures = evaluate() if heldout and (step % recipe.evaluate.every == 0 or step == settings.steps) else {}
            found = monitors.measure(engine, step, last=step == settings.steps)
            figures |= found.numbers
            if figures:
                measured |= figures
                record({"step": step, **figures})
                show.print(f"step {step}: " + ", ".join(f"{display_name(k)} {v:.4f}" for k, v in figures.items()))
            if found.samples:
                run.write_samples(step, text := sample_page(found.samples))
                trackers.log_text("samples", text, step)
                show.print(f"step {step} writes: {found.samples[0].line()}")
            for picture in found.pictures:
                path = run.write_picture(step, picture)
                trackers.log_picture("samples", path, step)
                show.print(f"step {step} draws {path}")
            if step == settings.steps or done.stop or (settings.save_every and step % settings.save_every == 0):
                save()
                saved_at = step
            if done.stop and step < settings.steps:
                number = signals[0] if signals else signal.SIGTERM
                show.print(
                    f"stopped by signal {number} after step {step}, saved as {run.checkpoint(step)}. Continue with: "
                    f"{run.continuation()}"
                )
                return 128 + number

    # ---- final weights, loss curve and summary ------------------------------------------------------------------
    if saved_at is None or saved_at < step:
        save()
    engine.export_final(run.path / "model")
    if ranks.lead:
        plot = run.plot()
        rows = {
            "steps": f"{step:,}",
            unit: f"{seen:,}",
            "training loss": f"{done.loss:.4f}" if done else "(nothing left to train)",
            **(
                {display_name(name): f"{value:.4f}" for name, value in measured.items()}
                or {"held-out loss": "not measured"}
            ),
            "time": clock(time.perf_counter() - begun),
            "weights": str(run.path / "model"),
            "loss curve": str(plot),
        }
        if report := str(getattr(loader, "report", "")):
            rows["data"] = report  # of this rank: what was converted, skipped or replaced
        show.table(f"{recipe.name} finished", rows)
    return 0


def display_name(name: str) -> str:
    """heldout_loss -> held-out loss."""
    return name.replace("heldout_", "held-out ").replace("_", " ")


def rank_state(states: list, ranks):
    """This rank's data state: the common one, or its own where the source streams."""
    if len(states) not in (1, ranks.groups):
        each = "ranks" if ranks.shared == 1 else f"groups of {ranks.shared} ranks"
        raise ConfigError(
            f"the data streams and its position was saved for {len(states)} readers; this run has {ranks.groups} {each}. "
            f"Resume with {len(states)}, or tokenise the data first"
        )
    return states[0] if len(states) == 1 else states[ranks.group]


def run(argv: Sequence[str] | None = None, **named: str) -> int:
    """`main` as a whole process: leaves the process group, and ends without Python's finalisation (see `engine.leave`)."""
    code = main(argv, **named)
    if "recipes.engine" in sys.modules:
        from recipes.engine import leave, stop

        if code in (0, 128 + signal.SIGTERM, 128 + signal.SIGINT):
            stop()  # only where every rank comes here: after a failure it could wait for one that does not
        leave(code)
    return code


if __name__ == "__main__":
    sys.exit(run())
