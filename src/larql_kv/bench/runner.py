"""The bench protocol: engines take turns, whole tokens are timed, pages are warm before the first number.

Order: every engine once untimed (weights touched, kernels compiled, refusals found); then `repeats` times,
with the order rotated by one each time: a timed prefill of each engine, its warm-up steps, and the timed
steps in groups, one group an engine in turn. So a machine that slows down for a second slows all of them.
A token's time ends when the host knows the id, and begins when it knew the one before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from larql_kv.bench.checks import contract_of, stages_of
from larql_kv.bench.machine import OtherLoad, device_facts, machine_facts
from larql_kv.bench.plan import RECOMPUTE_STEPS, RECOMPUTE_WARMUP, Failure, Plan, Progress, Report, Row
from larql_kv.bench.stats import round_robin, same_beginning
from larql_kv.bench.steps import next_id, next_ids
from larql_kv.bench.sweep import run_sweep
from larql_kv.engine import build_engine
from larql_kv.errors import EngineError, ModelError, SpecError
from larql_kv.ffn.base import DenseFfn, FfnBackend, path_table
from larql_kv.policy import StateKind

if TYPE_CHECKING:
    from larql_kv.engine import KvEngine
    from larql_kv.model.model import Model
    from larql_kv.spec import EngineSpec


MakeFfn = Callable[[], FfnBackend]


class Contestant:
    """One engine's place in the bench: its row, and the engine of the current repeat."""

    def __init__(
        self,
        spec: EngineSpec,
        model: Model,
        plan: Plan,
        mask: str | None = None,
        make_ffn: MakeFfn | None = None,
    ) -> None:
        self.spec, self.model, self.plan, self.mask = spec, model, plan, mask
        self.make_ffn = make_ffn  # a new one an engine: what its caches saw is no other engine's
        self.name = spec.text if mask is None else f"{spec.text} (mask {mask})"
        self.row = Row(spec.text, policy=spec.policy.to_dict())
        self.engine: KvEngine | None = None
        policy = spec.policy  # ids alone and nothing to go faster: every step runs the whole text
        self.recomputes = (policy.canonical, policy.derivative) == (StateKind.TOKEN_IDS, StateKind.NOTHING)
        self.tokens, self.warmup = plan.tokens, plan.warmup
        if self.recomputes and plan.tokens > RECOMPUTE_STEPS:
            self.tokens, self.warmup = RECOMPUTE_STEPS, min(plan.warmup, RECOMPUTE_WARMUP)
            self.row.notes.append(
                f"{self.tokens} of {plan.tokens} tokens: every step runs the whole text again, O(n^2)"
            )

    @property
    def alive(self) -> bool:
        return self.row.failure is None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn an engine's own errors (and a refused model) into this row's failure."""
        try:
            yield
        except (EngineError, ModelError) as error:
            recoverable = isinstance(error, EngineError) and error.is_recoverable
            self.row.failure = Failure(type(error).__name__, str(error), recoverable)
            self.engine = None

    def build(self) -> KvEngine:
        engine = _built(self.spec, self.model, self.make_ffn)
        if self.mask is not None:
            engine.set_capture(self.mask)
        return engine

    def warm(self) -> None:
        """One prefill and two steps, untimed."""
        engine = self.build()
        self.row.backend, self.row.capture = engine.info.backend, engine.info.capture
        if engine.info.note and self.mask is None:
            self.row.notes.append(engine.info.note)
        token = next_id(self.model, engine.prefill(self.plan.prompt_ids))
        for _ in next_ids(engine, token, 1 if self.recomputes else 2):
            pass
        self.row.backend = engine.info.backend

    def prefill(self) -> None:
        """A new engine, its timed prefill (up to the first id), then its warm-up steps."""
        engine = self.engine = self.build()
        begin = time.perf_counter()
        token = next_id(self.model, engine.prefill(self.plan.prompt_ids))
        self.row.prefill_seconds.append(time.perf_counter() - begin)
        self._ids = [token, *next_ids(engine, token, self.warmup)]
        self._seconds: list[float] = []
        self._kv_before = live_kv_bytes(engine)

    def steps(self, count: int) -> None:
        """Run and time up to `count` more tokens: step, head and choice inside the clock."""
        engine = self.engine
        assert engine is not None
        last = time.perf_counter()
        for token in next_ids(engine, self._ids[-1], min(count, self.tokens - len(self._seconds))):
            now = time.perf_counter()
            self._seconds.append(now - last)
            self._ids.append(token)
            self.row.recomputed.append(engine.recomputed_tokens)
            last = now

    @property
    def unfinished(self) -> bool:
        return self.alive and len(self._seconds) < self.tokens

    def finish(self) -> None:
        """Book this repeat's steps, ids and bytes; let the engine go."""
        engine, row = self.engine, self.row
        assert engine is not None
        row.step_seconds.append(self._seconds)
        row.backend = engine.info.backend
        if not row.ids:
            row.ids = self._ids
        row.same_in_every_repeat &= row.ids == self._ids
        saved = sum(map(engine.ffn.saved_bytes, range(self.model.config.layer_count)))
        row.weight_bytes = int(self.model.decoder.facts()["bytes_per_step"]) - saved
        if not self.recomputes:
            row.state_bytes_read = (self._kv_before + live_kv_bytes(engine)) / 2
        row.ledger = engine.ledger().to_dict() | {"tokens": engine.length}
        row.kv_bytes_of_standard = standard_kv_bytes(self.model, engine.length)
        self.engine = None


def live_kv_bytes(engine: KvEngine) -> int:
    """Bytes of the K/V rows that the next step's attention will read."""
    return sum(item.live for item in engine.ledger() if item.name in ("K/V rows", "K/V codes"))


def standard_kv_bytes(model: Model, tokens: int) -> int:
    """K/V bytes of `standard` for `tokens`: all of them on full layers, the window on sliding ones."""
    row = 2 * model.config.kv_dim * model.kv_dtype.itemsize
    windows = [layer.window for layer in model.config.layers]
    return sum(row * (tokens if window is None else min(tokens, window)) for window in windows)


def run_bench(
    model: Model,
    specs: Sequence[EngineSpec],
    plan: Plan,
    name: str = "",
    bandwidth: float | None = None,
    progress: Progress = lambda label: None,
    make_ffn: MakeFfn | None = None,
) -> Report:
    """Measure every spec on `model`. An engine that fails is a row with its failure, the others go on.

    Every engine gets an FFN from `make_ffn` (None: the model's own dense one).
    `bandwidth` (GB/s) is what shares are of. Raises ModelError when the runs do not fit the model's context.
    """
    plan.check_context(model.config.context)
    model.decoder.prepare()
    field = [Contestant(spec, model, plan, make_ffn=make_ffn) for spec in specs]
    order: list[tuple[int, str, str]] = []
    _warm(field, progress)
    masked = _under_full_mask(field) if plan.masks else []
    _warm(masked, progress)
    others = OtherLoad()
    for repeat in range(plan.repeats):
        _run_repeat(repeat, [*field, *masked], plan, order, progress)
    other_cores = others.cores()
    reference = _standard_ids(model, field, plan, make_ffn)
    for contestant in field:
        _settle(contestant, reference, progress)
    if plan.contexts:
        run_sweep([item for item in field if item.alive], plan, order, progress)
    facts = model.decoder.facts()
    return Report(
        *(int(time.time()), name or model.source, str(facts.get("form", "")), facts, machine_facts()),
        *(plan, bandwidth, [item.row for item in field], order, other_cores, device_facts(model)),
        ffn_facts(DenseFfn(model) if make_ffn is None else make_ffn(), model),
    )


def _built(spec: EngineSpec | str, model: Model, make_ffn: MakeFfn | None) -> KvEngine:
    return build_engine(spec, model) if make_ffn is None else build_engine(spec, model, make_ffn())


def ffn_facts(ffn: FfnBackend, model: Model) -> dict[str, Any]:
    """{name, paths} of an FFN on `model`."""
    return {"name": ffn.name, "paths": path_table(ffn, range(model.config.layer_count))}


def _warm(field: Sequence[Contestant], progress: Progress) -> None:
    for contestant in field:
        progress(f"warm {contestant.name}")
        with contestant.guarded():
            contestant.warm()


def _under_full_mask(field: Sequence[Contestant]) -> list[Contestant]:
    """The engines whose best mask leaves something out, once more under the mask `full`."""
    masked = []
    for contestant in field:
        twin = Contestant(*(contestant.spec, contestant.model, contestant.plan), "full", contestant.make_ffn)
        try:
            twin.build()
        except (SpecError, EngineError, ModelError):  # takes no part in the cascade, or was refused before
            continue
        if contestant.row.capture == "full":
            contestant.row.notes.append(
                "the capture mask is full in any case: there is no other to compare with"
            )
        elif contestant.alive:
            contestant.row.full_mask = twin.row
            masked.append(twin)
    return masked


def _run_repeat(
    repeat: int, field: list[Contestant], plan: Plan, order: list[tuple[int, str, str]], progress: Progress
) -> None:
    by_name = {item.name: item for item in field}
    turns = [by_name[name] for name in round_robin(list(by_name), repeat)]
    for contestant in turns:
        if contestant.alive:
            progress(f"prefill {contestant.name}")
            order.append((repeat, "prefill", contestant.name))
            with contestant.guarded():
                contestant.prefill()
    while any(item.unfinished for item in turns):
        for contestant in turns:
            if contestant.unfinished:
                progress(f"decode {contestant.name}")
                order.append((repeat, "decode", contestant.name))
                with contestant.guarded():
                    contestant.steps(plan.group)
    for contestant in turns:
        if contestant.alive:
            contestant.finish()


def _standard_ids(model: Model, field: list[Contestant], plan: Plan, make_ffn: MakeFfn | None) -> list[int]:
    """What plain `standard` generates; run untimed when it is not among the engines."""
    for contestant in field:
        if contestant.spec.text == "standard" and contestant.alive:
            return contestant.row.ids
    try:
        engine = _built("standard", model, make_ffn)
        first = next_id(model, engine.prefill(plan.prompt_ids))
        ids = [first, *next_ids(engine, first, plan.warmup + plan.tokens)]
    except (EngineError, ModelError):
        return []
    return ids


def _settle(contestant: Contestant, reference: list[int], progress: Progress) -> None:
    """What needs no clock: ids against standard's, the contract, the stage timers."""
    row, plan = contestant.row, contestant.plan
    if contestant.alive and reference:
        row.equals_standard = same_beginning(row.ids, reference)
    if contestant.alive and not row.same_in_every_repeat:
        row.notes.append("the repeats gave different ids")
    if row.full_mask is not None and row.full_mask.failure is not None:
        row.notes.append(f"under the mask full: {row.full_mask.failure.message}")
    if contestant.alive and plan.check:
        progress(f"check {contestant.spec.text}")
        with contestant.guarded():
            row.contract = contract_of(contestant.build(), plan.prompt_ids)
    if contestant.alive and plan.profile:
        progress(f"profile {contestant.spec.text}")
        with contestant.guarded():
            engine = contestant.build()
            row.stages = stages_of(engine, plan.prompt_ids, min(contestant.tokens, 20))
            if engine.info.backend != row.backend:
                row.notes.append(
                    f"stages are of steps run layer by layer ({engine.info.backend}), the device waited for "
                    f"after each; the timed steps ran as {row.backend}"
                )


def median_rate(row: Row) -> float | None:
    """Decode tokens per second: the median repeat."""
    return statistics.median(row.rates) if row.rates else None
