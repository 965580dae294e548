"""A bench report as tables: by rich on a terminal, aligned plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from larql_kv.bench.stats import format_bytes

Cell = str
Result = dict[str, Any]  # one entry of the JSON report's `results`


@dataclass
class Grid:
    """A titled table of text cells; columns listed in `left` are left-aligned, the others right."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    left: frozenset[int] = frozenset({0})

    def plain(self) -> str:
        """Aligned by spaces, two between columns, no trailing blanks."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.columns))]
        text = [self.title]
        for line in lines:
            cells = [
                cell.ljust(width) if index in self.left else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  ".join(cells).rstrip())
        return "\n".join(text)

    def rich(self) -> Any:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        made = Table(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index, name in enumerate(self.columns):
            justify = "left" if index in self.left else "right"
            made.add_column(name, justify=justify, overflow="fold", no_wrap=index > 0)
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


def grids(report: dict[str, Any]) -> list[Grid]:
    """The tables of a report (its JSON form): speed, state, promise; sweep and stages where measured.

    Each fits a terminal of 80 columns; what is longer than a cell stands in `remarks`.
    """
    results: list[Result] = report["results"]
    made = [speed_grid(results), state_grid(results), promise_grid(results)]
    if any(result["masks"] for result in results):
        made.append(mask_grid(results))
    if any(result["sweep"] for result in results):
        made.append(sweep_grid(results))
    if any(result["stages"] for result in results):
        made.append(stage_grid(results))
    return made


def heading(report: dict[str, Any]) -> str:
    """Two lines: what ran, and on what."""
    machine = report["machine"]
    ffn = report["ffn"].get("name", "dense")
    bandwidth = report["bandwidth_gb_per_s"]
    read = "not measured" if bandwidth is None else f"{bandwidth:.1f} GB/s"
    others = report["other_cores"]
    noise = f"; NOISY: other processes kept {others:.1f} cores busy" if others and others > 0.1 else ""
    return (
        f"{report['model']} ({report['dtype']}, K/V {report['facts'].get('kv_dtype', '?')}"
        f"{'' if ffn == 'dense' else f', ffn {ffn}'}): prompt of "
        f"{report['prompt_tokens']} tokens, {report['tokens']} steps after {report['warmup']} of warm-up, "
        f"{report['repeats']} repeats, engines in turns\n"
        f"{report['card'] or machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, commit "
        f"{machine['commit'] or 'none'}; memory reads at {read}{noise}"
    )


def speed_grid(results: Sequence[Result]) -> Grid:
    """A failed engine's row says so where the others name the path that ran."""
    columns = ["engine", "path", "prefill ms", "tok/s", "decode tok/s", "mean/p50/p99", "GB/s (roof)"]
    grid = Grid("Speed: whole tokens (step, head and choice); times in ms", columns, left=frozenset({0, 1}))
    for result in results:
        ms, error = result["ms_per_tok"], result["error"]
        grid.rows.append(
            [
                *(result["engine"], (result["backend"] or "-") if error is None else label(error)),
                *(_number(result["prefill_ms"]), _number(result["prefill_tok_per_s"], 0)),
                _number(result["tok_per_s"]),
                "-" if ms is None else "/".join(_three(ms[key]) for key in ("mean", "p50", "p99")),
                _moved(result["gb_per_s"], result["bandwidth_share"]),
            ]
        )
    return grid


def label(error: dict[str, Any]) -> str:
    """What became of a failed engine: `skipped` where a harness may go on, `FAILED` where it should not."""
    return f"{'skipped' if error['recoverable'] else 'FAILED'}: {error['kind']}"


def remarks(report: dict[str, Any]) -> list[str]:
    """A line for each engine that failed or whose figures need an explanation."""
    lines = []
    for result in report["results"]:
        if result["error"] is not None:
            lines.append(f"{result['engine']}: {label(result['error'])}: {result['error']['message']}")
        elif result["note"]:
            lines.append(f"{result['engine']}: {result['note']}")
    return lines


def state_grid(results: Sequence[Result]) -> Grid:
    columns = ["engine", "canonical", "derivative", "workspace", "live", "capacity", "of K/V"]
    grid = Grid("State after the last step (of K/V: state, against window-aware K/V of standard)", columns)
    for result in results:
        memory = result["memory"] or {}
        roles = memory.get("roles", {})
        grid.rows.append(
            [
                result["engine"],
                *(_bytes(roles.get(role)) for role in ("canonical", "derivative", "workspace")),
                *(_bytes(memory.get("live")), _bytes(memory.get("capacity"))),
                _shown(result["kv_ratio"], "{:.2f}x".format),
            ]
        )
    return grid


def promise_grid(results: Sequence[Result]) -> Grid:
    columns = ["engine", "contract", "verdict", "max KL", "ids", "as standard", "rerun/step"]
    grid = Grid("Promise", columns, left=frozenset({0, 1, 2, 4, 5}))
    for result in results:
        contract, ids = result["contract"] or {}, result["ids"]
        grid.rows.append(
            [
                *(result["engine"], result["policy"].get("contract", "-"), contract.get("verdict", "-")),
                _shown(contract.get("max_kl"), "{:.1e}".format),
                *(ids["hash"] or "-", _shown(ids["equals_standard"], lambda same: "yes" if same else "NO")),
                _number(result["recomputed_tokens_per_step"], 0),
            ]
        )
    return grid


def mask_grid(results: Sequence[Result]) -> Grid:
    """What is staged to the host each step, and what it costs: all of it, against the best mask."""
    columns = ["engine", "best", "tok/s full", "best", "gain", "hot full", "best", "same ids"]
    title = "Capture masks (hot: state bytes on the device + on the host)"
    grid = Grid(title, columns, left=frozenset({0, 1, 7}))
    for result in results:
        if not result["masks"]:
            continue
        full, best = result["masks"]["full"], result["masks"]["best"]
        both = full["tok_per_s"] and best["tok_per_s"]
        grid.rows.append(
            [
                *(result["engine"], best["mask"]),
                *(_number(full["tok_per_s"]), _number(best["tok_per_s"])),
                f"{best['tok_per_s'] / full['tok_per_s'] - 1:+.1%}" if both else "-",
                *(_hot(full["hot_bytes"]), _hot(best["hot_bytes"])),
                _same(full["ids_hash"], best["ids_hash"]),
            ]
        )
    return grid


def _same(left: str | None, right: str | None) -> str:
    return "-" if left is None or right is None else "yes" if left == right else "NO"


def _hot(places: dict[str, int] | None) -> str:
    return "-" if places is None else " + ".join(_bytes(places[place]) for place in ("device", "host"))


def sweep_grid(results: Sequence[Result]) -> Grid:
    swept = [result for result in results if result["sweep"]]
    contexts = [point["context"] for point in max((r["sweep"]["points"] for r in swept), key=len)]
    columns = [
        "engine",
        *(f"{context:.0f}" for context in contexts),
        "us/context token",
        "intercept ms",
        "R2",
    ]
    grid = Grid("Decode ms per token by context length", columns)
    for result in swept:
        sweep = result["sweep"]
        cells = [f"{point['ms_per_token']:.2f}" for point in sweep["points"]]
        cells += ["-"] * (len(contexts) - len(cells))
        line = (_number(sweep["us_per_context_token"], 2), _number(sweep["intercept_ms"], 2))
        grid.rows.append([result["engine"], *cells, *line, _number(sweep["r2"], 3)])
    return grid


def stage_grid(results: Sequence[Result]) -> Grid:
    """Stages as rows: there are more of them than of engines."""
    profiled = [result for result in results if result["stages"]]
    grid = Grid("Microseconds a step by stage", ["stage", *(result["engine"] for result in profiled)])
    for stage in profiled[0]["stages"]:
        spent = [(result["stages"][stage], result["stages"]["total"]) for result in profiled]
        grid.rows.append([stage, *(f"{part:.0f} ({part / total:.0%})" for part, total in spent)])
    return grid


def _moved(speed: float | None, share: float | None) -> str:
    return _number(speed) + ("" if speed is None or share is None else f" ({share:.0%})")


def _three(value: float) -> str:
    """Three digits, as far as they are before or behind the point."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bytes(count: float | None) -> str:
    return "-" if count is None else format_bytes(count)
