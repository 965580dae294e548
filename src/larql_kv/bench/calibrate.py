"""Calibration: how fragile is each layer under each codec, and which mix of them stays in a budget.

One layer at a time, one codec at a time, everything else as bf16, past the window, against `standard`: the
fragility table, from the first excerpt. From it a greedy ladder of moves, most bytes saved per nat first. KL
does not add up, so the ladder is climbed by running whole policies: the longest beginning of it that stays in
the budget on every second excerpt, then as many moves fewer as the others ask for, held out until then, and
with them a text that is not the corpus at all: the bench's own. Largest KLs differ from text to text.

A pass over a whole excerpt gives the logits that single steps give (what is coded for a query depends on its
position alone), so nothing here decodes token by token. A codec on layer l changes nothing below it: its run
starts at layer l, from the residual rows of the run in bf16.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from larql_kv import __version__
from larql_kv.bench.plan import Progress
from larql_kv.bench.stats import percentile
from larql_kv.bench.text import text_ids
from larql_kv.codec.rows import row_codec
from larql_kv.engine.base import PREFILL_ROWS
from larql_kv.engine.calibration import CalibrationRecord, Fragility, Measured, TokenBytes, policy_of
from larql_kv.engine.preconditions import require_residual_sufficiency
from larql_kv.errors import ModelError, SpecError
from larql_kv.ffn.base import DenseFfn
from larql_kv.state.base import State
from larql_kv.state.coded_rows import CodedRows
from larql_kv.state.kv import KVState
from larql_kv.state.pages import BLOCK
from larql_kv.state.residual import ResidualState
from larql_kv.vindex.store import model_print

if TYPE_CHECKING:
    from larql_kv.model.model import Model

BASE = "bf16"
HEADROOM = 2.0  # a record's bound over the largest KL that was measured: other texts have larger ones
LEAST_NATS = 1e-6  # bounds and budgets below this are below what float32 logits resolve
WORTHWHILE = 0.15  # a policy that saves less says why
_MAX_CORPUS = 64 << 20
_LETTERS_A_TOKEN = 16  # more than any tokenizer needs on running text
_WIDTH = 1024  # of the row that codecs are compared on before a model is there
_KL_ROWS = 8  # so many rows of logits in float64 stay in the cache


@dataclass(frozen=True)
class Settings:
    """What to calibrate for. Every second excerpt and the bench's text are held out, to judge the policy."""

    budget_nats: float
    codecs: tuple[str, ...] = (BASE, "int8", "int4")
    window: int = 64
    tokens: int = 1024  # of an excerpt
    samples: int = 8  # excerpts

    def __post_init__(self) -> None:
        if not LEAST_NATS <= self.budget_nats < math.inf:
            raise SpecError(f"a budget of {self.budget_nats:g} nats: give at least {LEAST_NATS:g}")
        if self.window < 1 or self.samples < 2:
            raise SpecError(
                f"window={self.window}, samples={self.samples}: calibration needs a window of at least 1 row "
                "and 2 excerpts, one of them held out"
            )
        if self.tokens <= self.window + BLOCK:
            raise SpecError(
                f"excerpts of {self.tokens} tokens never read a coded row: give more than window + {BLOCK} = "
                f"{self.window + BLOCK}"
            )
        base, *sizes = (row_codec(name).bytes_per_row(_WIDTH) for name in (BASE, *self.candidates))
        for name, size in zip(self.candidates, sizes, strict=True):
            if size >= base:
                raise SpecError(f"codec {name!r} saves nothing against {BASE}: leave it out")
        if not self.candidates:
            raise SpecError(f"no codec but {BASE} is given: there is nothing to choose from")

    @property
    def candidates(self) -> tuple[str, ...]:
        """The codecs but bf16, by their own names, each once. Raises SpecError for an unknown one."""
        names = dict.fromkeys(row_codec(name).name for name in self.codecs)
        return tuple(name for name in names if name != BASE)


# -- the greedy ladder -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """One layer goes on to a smaller codec: bytes of a row that saves, nats that adds by the table."""

    layer: int
    codec: str
    saved: int
    nats: float

    @property
    def rate(self) -> float:
        return self.saved / self.nats if self.nats else math.inf


def ladder(table: Mapping[int, Mapping[str, float]], row_bytes: Mapping[str, int]) -> list[Move]:
    """The moves from bf16 everywhere to the smallest codecs, most bytes saved per nat first.

    `table` gives nats by layer and codec. Of a layer's codecs only those on its convex hull take part: then
    its own moves come in order, and every beginning of the ladder is a policy.
    """
    rated: list[tuple[float, Move]] = []
    for layer, nats in table.items():
        at, spent, slowest = BASE, 0.0, math.inf
        while True:
            moves = [
                Move(layer, name, row_bytes[at] - row_bytes[name], max(0.0, cost - spent))
                for name, cost in nats.items()
                if row_bytes[name] < row_bytes[at]
            ]
            if not moves:
                break
            best = max(moves, key=lambda move: (move.rate, move.saved))
            slowest = min(slowest, best.rate)  # rounding must not put a layer's second move first
            rated.append((slowest, best))
            at, spent = best.codec, spent + best.nats
    return [move for _, move in sorted(rated, key=lambda item: -item[0])]


def climb(moves: Sequence[Move], budget: float) -> int:
    """How many moves the budget pays for, by the table's sums."""
    spent = 0.0
    for count, move in enumerate(moves):
        spent += move.nats
        if spent > budget:
            return count
    return len(moves)


def longest_fitting(moves: int, start: int, fits: Callable[[int], bool]) -> int | None:
    """The largest count in 0..moves that fits, searched from `start` on; None where not even 0 does."""
    low, high, count = -1, moves + 1, start
    while high - low > 1:
        if fits(count):
            low = count
        else:
            high = count
        count = (low + high) // 2
    return None if low < 0 else low


# -- measuring ---------------------------------------------------------------------------------------


@dataclass
class Steps:
    """KL of each step that read coded rows, in nats, and whether the best token stayed the best."""

    kl: list[float] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)

    def add(self, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Compare logits (steps, vocab), in float64."""
        for first in range(0, len(logits), _KL_ROWS):
            wanted = torch.log_softmax(reference[first : first + _KL_ROWS].double(), -1)
            got = torch.log_softmax(logits[first : first + _KL_ROWS].double(), -1)
            self.kl += (wanted.exp() * (wanted - got)).sum(-1).clamp_min(0.0).tolist()
            self.agree += (wanted.argmax(-1) == got.argmax(-1)).tolist()

    @property
    def measured(self) -> Measured:
        count = len(self.kl)
        p99 = percentile(self.kl, 0.99)
        return Measured(count, sum(self.kl) / count, p99, max(self.kl), sum(self.agree) / count)


class PolicyRuns:
    """Runs excerpts through a model whose cold residual rows lie in given codecs."""

    def __init__(self, model: Model, window: int) -> None:
        require_residual_sufficiency(model.config, "boundary-per-layer")
        self.model, self.window = model, window
        self.ffn = DenseFfn(model)
        self.first_coded = window + BLOCK  # the first position whose query reads a coded row
        state = self._state([BASE] * model.config.layer_count)
        self.layers = [i for i, pages in enumerate(state.pages) if isinstance(pages, CodedRows)]
        if not self.layers:
            raise ModelError(
                f"no layer of {model.source} keeps more than window + {BLOCK} = {window + BLOCK} rows: "
                "nothing would be coded; give a smaller window"
            )

    def reference(self, ids: Sequence[int]) -> torch.Tensor:
        """Hidden rows of `standard` at the positions that are compared."""
        return self._run(KVState(self.model), ids)[self.first_coded :]

    def policy(self, codecs: Sequence[str], ids: Sequence[int]) -> torch.Tensor:
        """The same under one codec a layer."""
        return self._run(self._state(codecs), ids)[self.first_coded :]

    def alone(self, layer: int, codec: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same with `codec` on `layer` and bf16 elsewhere, from what `rows_in_base` gave."""
        codecs = [BASE] * len(rows)
        codecs[layer] = codec
        return self._run(self._state(codecs), rows[layer], layer)[self.first_coded :]

    def rows_in_base(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The residual rows (n, hidden) that enter each layer when every layer is bf16."""
        count = self.model.config.layer_count
        entering: list[list[torch.Tensor]] = [[] for _ in range(count)]

        def keep(layer: int, rows: torch.Tensor) -> torch.Tensor:
            if layer + 1 < count:
                entering[layer + 1].append(rows.clone())
            return rows

        self._run(self._state([BASE] * count), ids, after_layer=keep)
        return [self.model.embed(list(ids)), *(torch.cat(parts) for parts in entering[1:])]

    def _state(self, codecs: Sequence[str]) -> ResidualState:
        return ResidualState(self.model, self.window, "device", [row_codec(name) for name in codecs])

    def _run(
        self,
        state: State,
        what: Sequence[int] | torch.Tensor,
        layer: int = 0,
        after_layer: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Ids, or rows entering `layer`, through the layers from there on: hidden rows (n, hidden)."""
        layers = range(layer, self.model.config.layer_count)
        rows_at_once = getattr(self.model.decoder, "prefill_rows", PREFILL_ROWS)
        hidden = []
        for first in range(0, len(what), rows_at_once):
            part = what[first : first + rows_at_once]
            rows = part if isinstance(part, torch.Tensor) else self.model.embed(part)
            state.begin(first, len(part))
            hidden.append(self.model.forward(rows, first, state, self.ffn, layers, after_layer))
            state.commit(first + len(part))
        state.end_step()
        return torch.cat(hidden)


# -- calibrating -------------------------------------------------------------------------------------


def calibrate(
    model: Model, corpus: Path, settings: Settings, progress: Progress = lambda label: None
) -> CalibrationRecord:
    """Sweep, choose and check on excerpts of the text file `corpus`.

    Raises SpecError for a budget that not even bf16 rows meet, ModelError for a text that is too short or a
    model that this is not for.
    """
    runs = PolicyRuns(model, settings.window)
    hidden, layers = model.config.hidden, model.config.layer_count
    row_bytes = {name: row_codec(name).bytes_per_row(hidden) for name in (BASE, *settings.candidates)}
    excerpts, digest = read_excerpts(model, corpus, settings.samples, settings.tokens)
    own = text_ids(model, min(settings.tokens + runs.first_coded, model.config.context))
    excerpts = [*excerpts[::2], own, *excerpts[1::2]]
    references = [runs.reference(ids) for ids in excerpts]
    texts = list(zip(excerpts, references, strict=True))
    chosen_on, held_out = texts[: (settings.samples + 1) // 2], texts[(settings.samples + 1) // 2 :]
    table = fragility(runs, *chosen_on[0], settings.candidates, progress)
    nats = {
        layer: {item.codec: item.max_kl for item in table if item.layer == layer} for layer in runs.layers
    }
    moves = ladder(nats, row_bytes)
    limit = settings.budget_nats / HEADROOM

    def codecs(count: int) -> tuple[str, ...]:
        held = dict.fromkeys(range(layers), BASE) | {move.layer: move.codec for move in moves[:count]}
        return tuple(held[layer] for layer in range(layers))

    @cache
    def measured(count: int, on_held_out: bool) -> Measured:
        progress(f"{'held-out' if on_held_out else 'end to end'}: {count} of {len(moves)} moves")
        steps = Steps()
        for ids, reference in held_out if on_held_out else chosen_on:
            steps.add(model.logits(reference), model.logits(runs.policy(codecs(count), ids)))
            if max(steps.kl) > limit:  # by how much exactly, nobody asks
                break
        return steps.measured

    def largest(count: int) -> float:
        return max(measured(count, on_held_out).max_kl for on_held_out in (True, False))

    def fits(count: int) -> bool:
        return measured(count, False).max_kl <= limit

    def fits_both(count: int) -> bool:
        return measured(count, True).max_kl <= limit and fits(count)

    count = longest_fitting(len(moves), climb(moves, limit), fits)
    if count and not fits_both(count):
        count = longest_fitting(count - 1, (count - 1) // 2, fits_both)
    if count is None or not fits_both(count):
        raise SpecError(
            f"a budget of {settings.budget_nats:g} nats is not met by {BASE} rows alone: they are off by "
            f"{largest(0):.2g} and more, and a bound is {HEADROOM:g} times what is measured"
        )
    kv = 2 * model.config.kv_dim * model.kv_dtype.itemsize * layers
    size = TokenBytes(
        sum(row_bytes[name] for name in codecs(count)),
        row_bytes[BASE] * layers,
        kv,
        str(model.kv_dtype).removeprefix("torch."),
    )
    reason = None
    if 1 - size.policy / size.bf16 < WORTHWHILE:
        reason = "every layer has its smallest codec"
        if count < len(moves):
            reason = (
                f"with {moves[count].codec} on layer {moves[count].layer} as well, the largest KL is "
                f"{largest(count + 1):.2g} nats, and the budget allows {limit:.2g} measured ones"
            )
    policy = policy_of(model, codecs(count))
    return CalibrationRecord(
        policy=policy,
        model_source=model.source,
        model_print=model_print(model.config, model.tensors),
        corpus_sha256=digest,
        corpus_tokens=settings.samples * settings.tokens,
        window=settings.window,
        samples=settings.samples,
        budget_nats=settings.budget_nats,
        kl_bound_nats=max(LEAST_NATS, HEADROOM * largest(count)),
        chosen_on=measured(count, False),
        held_out=measured(count, True),
        fragility=tuple(table),
        bytes=size,
        reason=reason,
        library=__version__,
    )


def read_excerpts(model: Model, path: Path, samples: int, tokens: int) -> tuple[list[list[int]], str]:
    """Ids of `samples` excerpts spread evenly over the text file, and the file's sha256.

    Raises ModelError where the file is too large or too short, or the model's context is.
    """
    if tokens > model.config.context:
        raise ModelError(f"excerpts of {tokens} tokens exceed the model's context of {model.config.context}")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CORPUS + 1)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    if len(data) > _MAX_CORPUS:
        raise ModelError(f"{path}: is larger than {_MAX_CORPUS >> 20} MiB; a part of it will do")
    text = data.decode("utf-8", errors="replace")
    share = len(text) // samples
    excerpts = []
    for index in range(samples):
        part = text[index * share : index * share + min(share, _LETTERS_A_TOKEN * tokens)]
        ids = model.tokenizer.encode(part)[:tokens]
        if len(ids) < tokens:
            raise ModelError(
                f"{path}: part {index + 1} of {samples} has {len(ids)} tokens, {tokens} are needed: give a "
                "longer text, or fewer samples or tokens"
            )
        excerpts.append(ids)
    return excerpts, hashlib.sha256(data).hexdigest()


def fragility(
    runs: PolicyRuns,
    ids: Sequence[int],
    reference: torch.Tensor,
    codecs: Sequence[str],
    progress: Progress = lambda label: None,
) -> list[Fragility]:
    """Each codec on each layer alone, over an excerpt and the hidden rows of `standard` on it."""
    logits = runs.model.logits(reference)
    rows = runs.rows_in_base(ids)
    found = []
    for layer, codec in itertools.product(runs.layers, codecs):
        progress(f"{codec} on layer {layer} of {len(rows)}")
        steps = Steps()
        steps.add(logits, runs.model.logits(runs.alone(layer, codec, rows)))
        found.append(Fragility(layer, codec, steps.measured.mean_kl, steps.measured.max_kl))
    return found
