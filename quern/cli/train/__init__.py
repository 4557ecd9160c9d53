"""``quern train``: shards → steps → checkpoints."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quern.cli.config.init import TRAIN_CASES, init_command
from quern.cli.config.keys import keys_command
from quern.cli.default_command import with_default
from quern.cli.output import JSON, columns, err_console, json_stdout, out_console, plain, reports_errors, say
from quern.cli.plan import plan_config
from quern.cli.plan.shown import print_planned
from quern.cli.train import debug, fork, report
from quern.cli.train.ranks import supervise
from quern.config import dump_yaml
from quern.errors import InputError
from quern.train.config import TrainConfig
from quern.train.init_from import load_run_config
from quern.words import counted, size

__all__ = ["app", "train"]

#: Of the model, what a summary shows in a line; the YAML above it and ``--json`` have the rest.
_SIZES = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "vocab_size")


app = typer.Typer(
    cls=with_default("run"),
    no_args_is_help=True,
    subcommand_metavar="CONFIG [key=value]... | COMMAND",
    help="Train CONFIG: shards → steps → checkpoints. quern train CONFIG is quern train run CONFIG.",
)


@app.command("run")
@reports_errors
def train(
    config: Annotated[str, typer.Argument(help="A YAML file; configs/ has ready ones.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: model.preset=125M")] = None,
    nproc: Annotated[
        int,
        typer.Option("--nproc", help="Ranks: as many processes on this machine; planned alone by --dry-run."),
    ] = 1,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            help="Start the ranks again after a failure, so many times; not if it is the same step twice in a row.",
        ),
    ] = 0,
    min_nproc: Annotated[
        int | None,
        typer.Option(
            "--min-nproc",
            min=1,
            help="With --max-restarts: leave out a rank that was the first to fail twice in a row, down to so many.",
        ),
    ] = None,
    spares: Annotated[
        int,
        typer.Option(
            "--spares",
            help="With --max-restarts: GPUs beyond --nproc that take over from failed ones; processes wait for it.",
        ),
    ] = 0,
    replace_slow: Annotated[
        bool,
        typer.Option("--replace-slow", help="With --spares: at a restart, ranks that were named as slow get them too."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print sizes, layout, memory, traffic and order; start nothing.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--config", help="With --dry-run: print the whole config to stdout, the rest to stderr.")
    ] = False,
    assume_tokens: Annotated[
        float | None,
        typer.Option(min=1, help="With --dry-run: plan without the data, as if each source had so many tokens (15e9)."),
    ] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="With --assume-tokens: ids of the encoding.")] = 128_256,
    gpu: Annotated[
        str | None, typer.Option(help="With --dry-run: plan a step's time and memory on a profile, as h100, or a file.")
    ] = None,
    json: bool = JSON,
) -> None:
    """Train CONFIG, or resume it. Exit code 3: ended by a signal, after a checkpoint."""
    if json and not dry_run:
        raise InputError("--json: expected together with --dry-run; a run's figures are in RUN/metrics.jsonl")
    if not dry_run and (show_config or assume_tokens is not None or gpu is not None):
        raise InputError("--config, --assume-tokens and --gpu: expected together with --dry-run")
    if min_nproc is not None and (not max_restarts or min_nproc > nproc):
        raise InputError(f"--min-nproc: expected at most --nproc ({nproc}), with --max-restarts, got {min_nproc}")
    if spares and (spares < 0 or not max_restarts or "RANK" in os.environ):
        why = "0 or more, with --max-restarts, and 0 where another launcher has started the ranks"
        raise InputError(f"--spares: expected {why}, got {spares}")
    if replace_slow and not spares:
        raise InputError("--replace-slow: expected together with --spares")
    resolved = load_run_config(config, overrides or ())
    if replace_slow and (nproc < 3 or resolved.parallel.pp > 1):
        raise InputError("--replace-slow: expected 3 ranks or more and parallel.pp=1: else none can be told to be slow")
    from quern.train.setup import check, check_settings  # torch takes seconds that a bad config need not wait for

    if dry_run:
        with json_stdout(json) as emit:
            summary = _plan(resolved, nproc, assume_tokens, vocab_size)
            if gpu is not None:
                summary["planned"] = plan_config(resolved, nproc, summary["model"]["vocab_size"], gpu)
            emit(summary)
            if not json:
                if show_config:
                    print(dump_yaml(resolved), end="")
                _print_summary(resolved, summary, err_console() if show_config else out_console())
        return
    checked = check(resolved, nproc)
    for fewer in range(nproc if min_nproc is None else min_nproc, nproc):
        try:
            check_settings(resolved, fewer, checked.corpus.vocab_size)
        except InputError as error:
            raise InputError(f"--min-nproc: the run must be able to go on with {fewer} ranks: {error}") from None
    if spares:
        _check_gpus(resolved, nproc, spares)
    alone = nproc == 1 and not max_restarts and resolved.on_event is None
    code = _here(resolved) if alone else supervise(
        resolved, config, overrides or (), nproc, max_restarts, min_nproc, spares, replace_slow=replace_slow
    )  # fmt: skip
    if code:
        raise typer.Exit(code)


app.command("fork")(fork.fork)
app.command("debug")(debug.debug)
app.command("report")(report.report)
app.command("keys")(keys_command(TrainConfig))
app.command("init")(init_command(TrainConfig, TRAIN_CASES, "quern train run"))


def _check_gpus(config: TrainConfig, nproc: int, spares: int) -> None:
    import torch

    count = torch.cuda.device_count()
    if (config.device == "cuda" or (config.device == "auto" and count)) and count < nproc + spares:
        most = f"expected at most {max(0, count - nproc)}, as --nproc is {nproc}"
        raise InputError(f"--spares: {most} and there are {counted(count, 'GPU')}, got {spares}")


def _plan(config: TrainConfig, nproc: int, assume_tokens: float | None, vocab_size: int) -> dict[str, Any]:
    """What ``--dry-run`` says, of the data or of what is assumed of it."""
    from quern.train.batches.corpus import AssumedCorpus
    from quern.train.setup import check, check_settings
    from quern.train.summary import summarise

    if assume_tokens is None:
        checked = check(config, nproc)
        return summarise(config, checked.corpus, checked.layout)
    paths = tuple(source.path for source in config.data)
    corpus = AssumedCorpus(paths, config.seq_len, int(assume_tokens), vocab_size)
    return summarise(config, corpus, check_settings(config, nproc, vocab_size))


def _here(config: TrainConfig) -> int:
    from quern.train.__main__ import train as run

    return run(config)


def _print_summary(config: TrainConfig, summary: dict[str, Any], console: Console) -> None:
    model, begins = summary["model"], summary["init_from"]
    parameters, memory, order = summary["parameters"], summary["state_memory_gib"], summary["order"]
    rate = summary["learning_rate"]
    layout, checkpoint = summary["layout"], summary["checkpoint"]
    axes = " × ".join(f"{axis} {size}" for axis, size in layout["axes"].items() if size > 1)
    axes += f", of these ep {config.parallel.ep}" if config.parallel.ep > 1 else ""
    rows = [
        ("model", ", ".join(f"{name} {model[name]:,}" for name in _SIZES)),
        *([("experts", f"{moe['num_experts']:,} of width {moe['ffn_dim']:,}, {moe['top_k']} for a token")]
          if (moe := model.get("moe")) else []),
        *([] if begins is None else [("weights", f"a fresh run begins with those of {plain(begins)}")]),
        *([] if (ahead := summary["goes_on"]) is None else [("goes on", _goes_on(config, ahead))]),
        ("parameters", f"{parameters['total']:,} ({parameters['blocks']:,} in blocks)"
                       + (f", {parameters['active']:,} for a token" if "active" in parameters else "")),
        ("layout", counted(layout["ranks"], "rank") + (f": {axes}" if layout["ranks"] > 1 else "")),
        ("model state", f"{_gib(memory['sixteen_bytes'])} at 16 bytes a parameter, "
                        f"{_gib(memory['sixteen_bytes_per_rank'])} a rank; held here: {_gib(memory['rank'])} a rank"),
        ("a checkpoint", f"{size(checkpoint['bytes'])}; to copy it, {_gib(checkpoint['copy_gib_per_rank'])} "
                         "of the host's memory a rank"),
        ("a token costs", f"{summary['flops_per_token']['full']:.3g} FLOP (full attention), "
                          f"{summary['flops_per_token']['causal']:.3g} (causal half)"),
        ("reads", f"{counted(order['samples'], 'sequence')}, {order['planned_tokens']:,} tokens in "
                  f"{counted(order['steps'], 'step')}"),
        *((f"  {row['name']}", f"{row['share']:.2%}, {row['epochs']:.2f} epochs of {row['tokens']:,} tokens")
          for row in order["sources"]),
        ("learning rate", f"{rate['peak']:.4g}, {config.schedule.kind}; {rate['last_step']:.4g} in the last step"),
        ("order", "that of the data, which is assumed" if summary["corpus"]["fingerprint"] is None else order["order"]),
        ("peak memory", _peak(summary["peak_memory"]) + "; quern plan check adds time" * ("planned" not in summary)),
    ]  # fmt: skip

    def insert(before: str, name: str, text: str) -> None:
        rows.insert([name for name, _ in rows].index(before), (name, text))

    if (host := summary["host_state"]) is not None:
        held, moved = (f"{size(host[a])} of {b}" for a, b in (("host", "masters and moments"), ("down", "gradients")))
        back = f"{size(host['up'])} of weights come back"
        told = f"a rank: {held}, {size(host['staging'])} of buffers; a step moves {moved}, {back}"
        insert("a checkpoint", "on the host", told)
    if (fp8 := summary["float8"]) is not None:
        left = f"; in {config.precision} stay {', '.join(fp8['left_out'])} of every block" if fp8["left_out"] else ""
        by = " by torchao" if fp8["implementation"] == "torchao" else ""
        insert("model state", "fp8", f"{fp8['layers']} layers, {fp8['recipe']}{by}{left}")
    for name, text in rows:
        say(f"{name:<14} {text}", console)
    if layout["ranks"] > 1:
        _print_layout(summary, console)
    if "planned" in summary:
        say(f"\nplanned on {summary['planned']['gpus']:,} × {summary['planned']['hardware']}", console)
        print_planned(summary["planned"], config.parallel.pp, console)


def _peak(peak: dict[str, Any]) -> str:
    parts = sorted(peak["components"].items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size(number)}" for name, number in parts[:4])
    left = sum(number for _, number in parts[4:])
    rest = f", the rest {size(left)}" if left else ""
    return f"{size(sum(peak['components'].values()))} of tensors a rank: {named}{rest}"


def _goes_on(config: TrainConfig, ahead: dict[str, Any]) -> str:
    if ahead["step"] == config.steps:
        return f"it is complete at step {config.steps:,}, nothing to do"
    back = "back to" if ahead["kind"] == "rollback" else "from"
    return f"{back} step {ahead['step']:,}, data step {ahead['data_step']:,}: {plain(ahead['checkpoint'])}"


def _print_layout(summary: dict[str, Any], console: Console) -> None:
    """Who is where, which layers are where, and what is sent."""
    axes = [axis for axis, size in summary["layout"]["axes"].items() if size > 1]
    if summary["layout"]["coordinates"] is not None:
        table = columns(">rank", *(f">{axis}" for axis in axes))
        for rank, places in enumerate(summary["layout"]["coordinates"]):
            table.add_row(str(rank), *(str(places[axis]) for axis in axes))
        _print_table(table, console)
    if summary["pipeline"] is not None:
        stages = summary["pipeline"]["stages"]
        table = columns(">stage", ">pp", ">layers", ">cost", ">parameters")
        for row in stages:
            last = row["first_layer"] + row["num_layers"] - 1
            layers = f"{row['first_layer']}" if row["num_layers"] == 1 else f"{row['first_layer']}–{last}"
            table.add_row(
                str(row["stage"]), str(row["pp"]), layers, f"{row['cost_share']:.1%}", f"{row['parameters']:,}"
            )
        _print_table(table, console)
        pipeline = summary["pipeline"]
        said = f"{pipeline['schedule']}, {pipeline['micro_batches']:,} micro-batches a step: ranks wait "
        equal = f"{pipeline['bubble_of_equal_stages']:.1%} if stages were equal"
        say(f"{said}{pipeline['bubble']:.1%} of it, {equal}", console)
    if (sharing := summary["sharing"]) is not None:
        _say_sharing(sharing, console)
    if (experts := summary["expert_ranks"]) is not None:
        _say_experts(experts, console)
    most = max(summary["communication"], key=lambda place: place["sent"])
    table = columns("axis", "what", "collective", ">ranks", ">calls", ">tensors", ">sent")
    for row in most["rows"]:
        table.add_row(
            row["axis"], row["what"], row["collective"].replace("_", "-"), str(row["ranks"]), f"{row['calls']:,}",
            _size(row["payload"]), _size(row["sent"]),
        )  # fmt: skip
    table.add_row("all", "", "", "", "", "", _size(most["sent"]), style="bold")
    _print_table(table, console)
    where = ", of the ranks that send the most: pp " + str(most["pp"]) if len(summary["communication"]) > 1 else ""
    say(f"a step and a rank{where}; sent: by the ring's costs, scalars left out", console)


def _say_sharing(sharing: dict[str, Any], console: Console) -> None:
    heads = f", heads exchanged by {sharing['heads']}" if 1 < sharing["heads"] < sharing["ranks"] else ""
    said = (
        f"cp: {sharing['method']} over {counted(sharing['ranks'], 'rank')}{heads}; {sharing['tokens']:,} tokens a rank"
    )
    say(f"{said}; keys and values of a layer in work: {_size(sharing['key_bytes'])}", console)
    if (work := sharing["work"]) is not None and work["micro_batches"]:
        of = f"of the first {work['micro_batches']:,} micro-batches"
        say(
            f"attention {of}: the busiest rank of cp has {work['mean']:.3f} of the mean, at most "
            f"{work['most']:.3f}",
            console,
        )  # fmt: skip


def _say_experts(experts: dict[str, Any], console: Console) -> None:
    say(f"ep: {counted(experts['experts'], 'expert')} on each of {counted(experts['ranks'], 'rank')}", console)
    for stage in experts["stages"]:
        among = f"{stage['axis']}, {stage['ranks']:,}: a token travels in {stage['rows']:.2f} rows"
        say(f"{among}, {stage['away']:.2f} of them to others; {_size(stage['sent'])} a step", console)
    kept = {name: size(number) for name, number in experts["kept_bytes"].items()}
    say(
        f"experts keep {kept['expected']} of a layer for backward that is not recomputed; as all this, of "
        f"even routing, and at most {kept['most']}, if all tokens went to one rank",
        console,
    )  # fmt: skip


def _print_table(table: Table, console: Console) -> None:
    console.print()
    console.print(table)


def _gib(number: float) -> str:
    return size(round(number * 2**30))


def _size(number: int) -> str:
    """``12.3 GB``, of 10⁹ bytes."""
    value, units = float(number), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"
