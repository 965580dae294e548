"""`larql calibrate`: choose one codec a layer under a KL budget, and write the record that proves it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from larql_kv.cli.choose import DEVICE_HELP
from larql_kv.cli.console import add_row, console, print_json, table
from larql_kv.errors import SpecError

if TYPE_CHECKING:
    from larql_kv.bench.plan import Progress
    from larql_kv.engine.calibration import CalibrationRecord


def calibrate_command(
    corpus: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, readable=True, help="Text to measure on, UTF-8."),
    ],
    budget_nats: Annotated[
        float, typer.Option(help="Largest KL a step may show; half of it may be measured.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", dir_okay=False, metavar="RECORD", help="Record to write.")
    ],
    model: Annotated[
        str, typer.Argument(help="Short name, GGUF file, directory or hub id.")
    ] = "smollm2-135m",
    codecs: Annotated[
        str, typer.Option(help="Candidates, beside bf16; see docs/codecs.md.")
    ] = "bf16,int8,int4",
    window: Annotated[int, typer.Option(min=1, help="Rows kept hot; runs may have a wider one.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an excerpt.")] = 1024,
    samples: Annotated[int, typer.Option(min=2, help="Excerpts; every second one is held out.")] = 8,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, or auto.", show_default="auto")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as one JSON object.")] = False,
) -> None:
    """Measure how fragile each layer is under each codec of its cold residual rows, and pick a mix.

    The record serves boundary-per-layer:window=N,policy=RECORD. Its bound is twice the largest KL seen, on
    the text that the mix was chosen on and on text held out.
    """
    if set(",;") & set(str(output)):
        raise SpecError(f"-o {output}: , and ; separate the parts of specs, so no policy=... could name it")
    if not output.absolute().parent.is_dir():
        raise SpecError(f"-o {output}: there is no directory {output.absolute().parent}")
    from larql_kv.bench.calibrate import Settings, calibrate
    from larql_kv.engine.calibration import write_record
    from larql_kv.model.load import load_model

    names = tuple(filter(None, (name.strip() for name in codecs.split(","))))
    settings = Settings(budget_nats, names, window, tokens, samples)
    with _progress() as progress:
        progress(f"loading {model}")
        loaded = load_model(model, device=device, dtype=dtype)
        record = calibrate(loaded, corpus, settings, progress)
    write_record(output, record)
    if as_json:
        print_json(record.to_dict())
    else:
        _print(record, output)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """What is measured now, on a terminal's stderr; nothing anywhere else."""
    if not sys.stderr.isatty():
        yield lambda label: None
        return
    with console(stderr=True).status("") as status:
        yield status.update


def _print(record: CalibrationRecord, path: Path) -> None:
    names = list(dict.fromkeys(item.codec for item in record.fragility))
    columns = [f"{name} {what} KL" for name in names for what in ("mean", "max")]
    shown = table("Fragility, nats", ("layer", "codec", *columns), right=("layer", *columns))
    found = {(item.layer, item.codec): item for item in record.fragility}
    for layer, codec in enumerate(record.policy.codecs):
        cells = []
        for name in names:
            item = found.get((layer, name))
            cells += ["", ""] if item is None else [f"{item.mean_kl:.1e}", f"{item.max_kl:.1e}"]
        add_row(shown, str(layer), codec, *cells)
    out = console()
    out.print(shown)
    size = record.bytes
    lines = [f"{record.model_source}: {record.policy.summary}"]
    for what, steps in (("chosen on", record.chosen_on), ("held out", record.held_out)):
        lines.append(
            f"{what}: {steps.steps:,} steps, KL mean {steps.mean_kl:.2g}, p99 {steps.p99_kl:.2g}, max "
            f"{steps.max_kl:.2g} nats; top-1 {steps.top1_agreement:.1%}"
        )
    lines += [
        f"bound {record.kl_bound_nats:.3g} nats (budget {record.budget_nats:g})",
        f"{size.policy:,} bytes a token: {record.saving:.0%} less than bf16 rows ({size.bf16:,}), "
        f"{size.policy / size.kv:.0%} of plain K/V in {size.kv_dtype} ({size.kv:,})",
        *([f"why not more: {record.reason}"] if record.reason else []),
        f"{path}: boundary-per-layer:window={record.window},policy={path}",
    ]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
