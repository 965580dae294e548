"""Calibration records: a codec for each layer's cold residual rows, and what it was measured to cost.

A record is one JSON file, made by `larql calibrate` and written whole or not at all:

    format, version    "larql-calibration", 1; library: the version of this package that measured
    model              {source, print}: BLAKE2b of its config and weights
    policy             {revision, codecs[]}: the first 16 digits of that print, and one codec a layer
    fingerprint        "revision|0=bf16,1=int8,..."
    corpus             {sha256, tokens}: of the whole file, and how many of its tokens were run
    window, samples, budget_nats, kl_bound_nats
    chosen_on, held_out   {steps, mean_kl, p99_kl, max_kl, top1_agreement}: the policy end to end, in nats;
                       held out are every second excerpt and the text that comes with this package
    fragility[]        {layer, codec, mean_kl, max_kl}: that codec on that layer alone, the others bf16, on
                       the first excerpt
    bytes              {policy, bf16, kv, kv_dtype}: of one token, all layers together
    saving, reason     against bf16 rows; why it is not more, or null
    blake2b            of all of that
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from larql_kv.codec.rows import row_codec
from larql_kv.errors import SpecError, StoreError
from larql_kv.model.model import Model
from larql_kv.vindex.store import model_print, write_whole

FORMAT, VERSION = "larql-calibration", 1
MAX_BYTES = 1 << 20
MAX_LAYERS = 1024
_LARGEST = 1 << 50
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_REVISION_DIGITS = 16
Part = TypeVar("Part")


@dataclass(frozen=True)
class LayerPolicy:
    """One codec a layer, for one revision of a model."""

    revision: str
    codecs: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        return f"{self.revision}|" + ",".join(f"{layer}={name}" for layer, name in enumerate(self.codecs))

    @property
    def summary(self) -> str:
        """`18 x int8, 12 x bf16`, the most frequent first."""
        counts = sorted({(-self.codecs.count(name), name) for name in self.codecs})
        return ", ".join(f"{-count} x {name}" for count, name in counts)


@dataclass(frozen=True)
class Measured:
    """KL against `standard`, in nats, over teacher-forced steps that read coded rows."""

    steps: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float


@dataclass(frozen=True)
class Fragility:
    """What `codec` on `layer` alone costs, every other layer held as bf16."""

    layer: int
    codec: str
    mean_kl: float
    max_kl: float


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of one token over all layers: its cold rows under the policy, as bf16, and plain K/V."""

    policy: int
    bf16: int
    kv: int
    kv_dtype: str


@dataclass(frozen=True)
class CalibrationRecord:
    """A policy and the measurement that it rests on. See the module's docstring for the file."""

    policy: LayerPolicy
    model_source: str
    model_print: str
    corpus_sha256: str
    corpus_tokens: int
    window: int  # in force when it was measured: a wider one codes fewer rows
    samples: int
    budget_nats: float
    kl_bound_nats: float
    chosen_on: Measured
    held_out: Measured
    fragility: tuple[Fragility, ...]
    bytes: TokenBytes
    reason: str | None
    library: str

    @property
    def saving(self) -> float:
        """Share of the bytes of bf16 rows that the policy saves."""
        return 1 - self.bytes.policy / self.bytes.bf16

    def to_dict(self) -> dict[str, Any]:
        """The object of the file, with its own checksum."""
        value: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "library": self.library,
            "model": {"source": self.model_source, "print": self.model_print},
            "policy": {"revision": self.policy.revision, "codecs": list(self.policy.codecs)},
            "fingerprint": self.policy.fingerprint,
            "corpus": {"sha256": self.corpus_sha256, "tokens": self.corpus_tokens},
            "window": self.window,
            "samples": self.samples,
            "budget_nats": self.budget_nats,
            "kl_bound_nats": self.kl_bound_nats,
            "chosen_on": asdict(self.chosen_on),
            "held_out": asdict(self.held_out),
            "fragility": [asdict(item) for item in self.fragility],
            "bytes": asdict(self.bytes),
            "saving": self.saving,
            "reason": self.reason,
        }
        return value | {"blake2b": _checksum(value)}

    def differences(self, model: Model, window: int | None) -> list[str]:
        """What keeps this record from speaking for `model` under `window`; empty where nothing does."""
        layers, codecs = model.config.layer_count, self.policy.codecs
        if len(codecs) != layers:
            return [f"it has codecs for {len(codecs)} layers, the model has {layers}"]
        found = []
        mine = model_print(model.config, model.tensors)
        if mine != self.model_print:
            found.append(f"it is of a model with print {self.model_print[:16]}, this one's is {mine[:16]}")
        elif policy_of(model, codecs).fingerprint != self.policy.fingerprint:
            found.append(f"its policy is for revision {self.policy.revision!r}, the model's is {mine[:16]!r}")
        try:
            now = sum(row_codec(name).bytes_per_row(model.config.hidden) for name in codecs)
        except SpecError as error:
            return [*found, str(error)]
        if now != self.bytes.policy:
            found.append(f"its codecs took {self.bytes.policy:,} bytes a token when measured, now {now:,}")
        if window is not None and window < self.window:
            found.append(
                f"it was measured with window={self.window}, and window={window} codes rows that were hot"
            )
        return found


def policy_of(model: Model, codecs: tuple[str, ...]) -> LayerPolicy:
    """The policy of these codecs on this very model. Reads all weights, once a process."""
    return LayerPolicy(model_print(model.config, model.tensors)[:_REVISION_DIGITS], codecs)


def write_record(path: str | os.PathLike[str], record: CalibrationRecord) -> None:
    """Write the file of `record`, whole or not at all. Raises StoreError."""
    text = json.dumps(record.to_dict(), indent=1, allow_nan=False) + "\n"
    write_whole(Path(path).expanduser(), text.encode())


def read_record(path: str | os.PathLike[str]) -> CalibrationRecord:
    """The record at `path`, checked. Raises StoreError naming the path and what is wrong."""
    where = Path(path).expanduser()
    try:
        value = json.loads(_bounded_text(where), parse_constant=_no_number)
        claimed = value.pop("blake2b", None) if isinstance(value, dict) else None
        whole = claimed == _checksum(value)
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{where}: cannot be read as a calibration record: {error}") from error
    if not isinstance(value, dict) or (value.get("format"), value.get("version")) != (FORMAT, VERSION):
        raise StoreError(f"{where}: is no {FORMAT} of version {VERSION}; make one with `larql calibrate`")
    if not whole:
        raise StoreError(f"{where}: its own checksum does not match: the file was changed or damaged")
    try:
        return _record(value)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{where}: malformed: {type(error).__name__}: {str(error)[:200]}") from error


def _bounded_text(path: Path) -> str:
    # Without O_NONBLOCK a pipe at that path would be waited for.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
    return data.decode()


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _checksum(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _record(value: dict[str, Any]) -> CalibrationRecord:
    """The record of a parsed file. Raises KeyError, TypeError or ValueError."""
    codecs = tuple(_text(name, _NAME) for name in _items(value["policy"]["codecs"], MAX_LAYERS))
    fragility = [_part(Fragility, item) for item in _items(value["fragility"], 64 * MAX_LAYERS)]
    record = CalibrationRecord(
        policy=LayerPolicy(_text(value["policy"]["revision"]), codecs),
        model_source=str(value["model"]["source"])[:1000],
        model_print=_text(value["model"]["print"], _DIGEST),
        corpus_sha256=_text(value["corpus"]["sha256"], _DIGEST),
        corpus_tokens=_count(value["corpus"]["tokens"]),
        window=_count(value["window"]),
        samples=_count(value["samples"]),
        budget_nats=_number(value["budget_nats"]),
        kl_bound_nats=_number(value["kl_bound_nats"]),
        chosen_on=_part(Measured, value["chosen_on"]),
        held_out=_part(Measured, value["held_out"]),
        fragility=tuple(fragility),
        bytes=_part(TokenBytes, value["bytes"]),
        reason=None if value["reason"] is None else _text(value["reason"]),
        library=_text(value["library"]),
    )
    if value["fingerprint"] != record.policy.fingerprint:
        raise ValueError("the fingerprint is not that of the policy")
    largest = max(record.chosen_on.max_kl, record.held_out.max_kl)
    if not largest <= record.kl_bound_nats <= record.budget_nats or not record.kl_bound_nats:
        raise ValueError(
            f"a bound of {record.kl_bound_nats:g} nats where {largest:g} were measured and "
            f"{record.budget_nats:g} allowed"
        )
    if not record.bytes.bf16 or not codecs:
        raise ValueError("a record of no layers")
    return record


def _part(kind: type[Part], value: Any) -> Part:
    """One of the flat dataclasses above, every field of its declared type."""
    readers = {"int": _count, "float": _number, "str": _text}
    names = kind.__annotations__
    if not isinstance(value, dict) or set(value) != set(names):
        raise TypeError(f"{str(value)[:80]} has not the fields {', '.join(names)}")
    return kind(**{name: readers[hint](value[name]) for name, hint in names.items()})


def _items(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(f"{str(value)[:80]} is no list of at most {most}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise TypeError(f"{str(value)[:80]} is no count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _LARGEST:
        raise TypeError(f"{str(value)[:80]} is no number >= 0")
    return float(value)


def _text(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    if not isinstance(value, str) or len(value) > 1000 or (pattern and not pattern.fullmatch(value)):
        raise TypeError(f"{str(value)[:80]!r} is no text of the right form")
    return value
