"""A bench report as tables: by rich on a terminal, aligned plain text in a pipe or a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        from rich.table import Table
        from rich.text import Text

        made = Table(title=Text(self.title), title_justify="left")
        for index, name in enumerate(self.columns):
            made.add_column(name, justify="left" if index in self.left else "right", overflow="fold")
        for row in self.rows:
            made.add_row(*map(Text, row))
        return made


def grids(report: dict[str, Any]) -> list[Grid]:
    """The tables of a report (its JSON form): speed; state and promise; sweep and stages where measured."""
    results: list[Result] = report["results"]
    made = [speed_grid(report, results), state_grid(results)]
    if any(result["sweep"] for result in results):
        made.append(sweep_grid(results))
    if any(result["stages"] for result in results):
        made.append(stage_grid(results))
    return made


def heading(report: dict[str, Any]) -> str:
    """Two lines: what ran, and on what."""
    machine = report["machine"]
    bandwidth = report["bandwidth_gb_per_s"]
    read = "not measured" if bandwidth is None else f"{bandwidth:.1f} GB/s"
    others = report["other_cores"]
    noise = f"; NOISY: other processes kept {others:.1f} cores busy" if others and others > 0.1 else ""
    return (
        f"{report['model']} ({report['dtype']}, K/V {report['facts'].get('kv_dtype', '?')}): prompt of "
        f"{report['prompt_tokens']} tokens, {report['tokens']} steps after {report['warmup']} of warm-up, "
        f"{report['repeats']} repeats, engines in turns\n"
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, commit "
        f"{machine['commit'] or 'none'}; memory reads at {read}{noise}"
    )


def speed_grid(report: dict[str, Any], results: Sequence[Result]) -> Grid:
    columns = [
        *("engine", "path", "prefill ms", "tok/s", "decode tok/s", "range", "mean ms", "p50", "p99"),
        *("GB/s", "of roof", "note"),
    ]
    grid = Grid("Speed: whole tokens (step, head and choice)", columns, left=frozenset({0, 1, 11}))
    for result in results:
        ms = result["ms_per_tok"] or {}
        span = result["tok_per_s_range"]
        grid.rows.append(
            [
                *(result["engine"], result["backend"] or "-"),
                *(_number(result["prefill_ms"]), _number(result["prefill_tok_per_s"])),
                *(_number(result["tok_per_s"]), f"{span[0]:.1f}-{span[1]:.1f}" if span else "-"),
                *(_number(ms.get(key), 2) for key in ("mean", "p50", "p99")),
                *(_number(result["gb_per_s"]), _shown(result["bandwidth_share"], "{:.0%}".format)),
                remark(result),
            ]
        )
    return grid


def remark(result: Result) -> str:
    """A row's note; of a failed row its error, labelled by kind and by what a harness should do."""
    error = result["error"]
    if error is None:
        return result["note"]
    label = "skipped" if error["recoverable"] else "FAILED"
    return f"{label}: {error['kind']}: {error['message']}"


def state_grid(results: Sequence[Result]) -> Grid:
    columns = [
        *("engine", "canonical", "derivative", "workspace", "live", "allocated", "of K/V"),
        *("contract", "verdict", "max KL", "ids", "as standard", "rerun/step"),
    ]
    grid = Grid(
        "State after the last step, and the promise (of K/V: live bytes against standard's K/V, with "
        "sliding layers at their window)",
        columns,
        left=frozenset({0, 7, 8, 10, 11}),
    )
    for result in results:
        memory = result["memory"] or {}
        contract = result["contract"] or {}
        roles = memory.get("roles", {})
        ids = result["ids"]
        grid.rows.append(
            [
                result["engine"],
                *(_bytes(roles.get(role)) for role in ("canonical", "derivative", "workspace")),
                *(_bytes(memory.get("live")), _bytes(memory.get("capacity"))),
                _shown(result["kv_ratio"], "{:.2f}x".format),
                *(result["policy"].get("contract", "-"), contract.get("verdict", "-")),
                _shown(contract.get("max_kl"), "{:.1e}".format),
                *(ids["hash"] or "-", _shown(ids["equals_standard"], lambda same: "yes" if same else "NO")),
                _number(result["recomputed_tokens_per_step"], 0),
            ]
        )
    return grid


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
    profiled = [result for result in results if result["stages"]]
    stages = list(profiled[0]["stages"])
    grid = Grid("Microseconds per step by stage (share of the total)", ["engine", *stages])
    for result in profiled:
        total = result["stages"]["total"]
        grid.rows.append(
            [result["engine"], *(f"{spent:.0f} ({spent / total:.0%})" for spent in result["stages"].values())]
        )
    return grid


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _bytes(count: float | None) -> str:
    """Decimal units, as bandwidth is counted."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.5 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
