"""`--ffn`: which FFN each layer goes through.

    dense | weight | weights                        the model's own FFN
    walk[:k=N|none][,l1=features|exact|off]         on the strongest N features of each row
    remote-walk:endpoint=URL[,wire=..][,k=..][,timeout=..]   in another process; a bare URL means this, too
    null | off                                      none: zeros
    {walk:k=100}@layers=14-27;{dense}@otherwise     by layer: @all, @layers=0-3,7 (inclusive), @otherwise

Everything that is not exactly so is a SpecError; what depends on the model (gaps, overlaps, layers that it
lacks) when the policy meets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from larql_kv.errors import SpecError
from larql_kv.spec import _nearest

if TYPE_CHECKING:
    from larql_kv.ffn.base import FfnBackend
    from larql_kv.model.model import Model
    from larql_kv.vindex.index import VectorIndex

_ALIASES = {"weight": "dense", "weights": "dense", "off": "null"}
_WIRES = ("best", "f32", "f16", "i8")
_L1 = ("features", "exact", "off")
_MAX_K = 1 << 31


@dataclass(frozen=True)
class FfnKind:
    """One FFN with its settings: dense, walk, remote-walk or null. Settings left out have their defaults."""

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def text(self) -> str:
        given = [f"{name}={'none' if value is None else value}" for name, value in self.settings]
        return self.kind + (":" + ",".join(given) if given else "")

    def get(self, name: str, default: Any = None) -> Any:
        return dict(self.settings).get(name, default)


@dataclass(frozen=True)
class FfnRule:
    """An FFN for some layers: inclusive ranges, or `all`, or `otherwise` (all that no other rule names)."""

    ffn: FfnKind
    where: str = "all"  # all, otherwise, layers
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def text(self) -> str:
        spans = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in self.ranges)
        return f"{{{self.ffn.text}}}@{f'layers={spans}' if self.where == 'layers' else self.where}"


@dataclass(frozen=True)
class FfnPolicy:
    """What `--ffn` says; `parse_ffn(policy.text) == policy`."""

    rules: tuple[FfnRule, ...] = field(default=(FfnRule(FfnKind("dense")),))

    @property
    def text(self) -> str:
        if len(self.rules) == 1 and self.rules[0].where == "all":
            return self.rules[0].ffn.text
        return ";".join(rule.text for rule in self.rules)

    def by_layer(self, layer_count: int) -> list[FfnKind]:
        """The FFN of each layer. Raises SpecError for a layer that the model lacks, that two rules name, or
        that none does."""
        chosen: list[FfnKind | None] = [None] * layer_count
        for rule in self.rules:
            for layer in _layers_of(rule, layer_count):
                if chosen[layer] is not None:
                    raise SpecError(f"two rules of ffn {self.text!r} name layer {layer}")
                chosen[layer] = rule.ffn
        rest = [rule.ffn for rule in self.rules if rule.where == "otherwise"]
        missing = [layer for layer, ffn in enumerate(chosen) if ffn is None]
        if missing and not rest:
            raise SpecError(
                f"no rule of ffn {self.text!r} names layers {_spans(missing)}: add ;{{dense}}@otherwise"
            )
        return [rest[0] if ffn is None else ffn for ffn in chosen]


def parse_ffn(text: str) -> FfnPolicy:
    """The policy that `text` says; see the module's docstring. Raises SpecError naming the bad part."""
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"an FFN is a text such as 'dense' or 'walk:k=100', got {text!r}")
    text = text.strip()
    if not text.startswith("{"):
        if ";" in text or "@" in text.partition(":")[0]:
            raise SpecError(
                f"ffn {text!r}: by layer each FFN stands in braces, as in "
                "{walk:k=100}@layers=0-3;{dense}@otherwise"
            )
        return FfnPolicy((FfnRule(_parse_kind(text)),))
    rules = tuple(_parse_rule(piece.strip(), text) for piece in _split_rules(text))
    wheres = [rule.where for rule in rules]
    if "all" in wheres and len(rules) > 1:
        raise SpecError(f"ffn {text!r}: @all names every layer, so it stands alone")
    if wheres.count("otherwise") > 1:
        raise SpecError(f"ffn {text!r}: @otherwise is given twice")
    return FfnPolicy(rules)


def build_ffn(policy: FfnPolicy | str, model: Model, index: VectorIndex | None = None) -> FfnBackend:
    """The FFN backend of a policy on `model`. `index` is what walks walk on (default: the model's own
    tensors); remote ones are connected.

    Raises SpecError for what does not fit the model, ModelError and BackendUnavailable as `WalkFfn`,
    RemoteError for a server that cannot serve it.
    """
    from larql_kv.ffn.base import LayerFfn

    policy = parse_ffn(policy) if isinstance(policy, str) else policy
    chosen = policy.by_layer(model.config.layer_count)
    index = walk_index(policy, model) if index is None else index
    made: dict[FfnKind, FfnBackend] = {}
    for kind in dict.fromkeys(chosen):
        layers = [layer for layer, ffn in enumerate(chosen) if ffn == kind]
        made[kind] = _build(kind, model, index, layers)
    if len(made) == 1:
        return made[chosen[0]]
    return LayerFfn([made[kind] for kind in chosen], policy.text)


def walk_index(policy: FfnPolicy, model: Model) -> VectorIndex | None:
    """The index over the model's own tensors, for several FFNs to share; None where nothing walks."""
    if all(rule.ffn.kind != "walk" for rule in policy.rules):
        return None
    from larql_kv.vindex.index import VectorIndex

    return VectorIndex.of_model(model)


def _build(kind: FfnKind, model: Model, index: VectorIndex | None, layers: list[int]) -> FfnBackend:
    from larql_kv.ffn.base import DenseFfn, NullFfn

    if kind.kind == "dense":
        return DenseFfn(model)
    if kind.kind == "null":
        return NullFfn()
    if kind.kind == "walk":
        from larql_kv.ffn.walk import WalkFfn

        assert index is not None
        walk = WalkFfn(model, index, kind.get("k"))
        l1 = kind.get("l1", "off")
        return walk if l1 == "off" else walk.with_l1_cache(mode=l1)
    from larql_kv.ffn.remote import remote_backend

    settings: dict[str, Any] = dict(kind.settings)
    if "k" in settings:
        settings["top_k"] = settings.pop("k")
    return remote_backend(model, layers=layers, **settings)


def _parse_kind(text: str) -> FfnKind:
    if re.match(r"https?://|\d+(-\d+)?=https?://", text):
        text = f"remote-walk:endpoint={text}"
    name, colon, tail = text.partition(":")
    name = name.strip().lower()
    name = _ALIASES.get(name, name)
    if name not in _KEYS:
        known = (*_KEYS, *_ALIASES)
        raise SpecError(f"unknown FFN {name!r}{_nearest(name, known)} (one of: {', '.join(known)})")
    if colon and not tail.strip():
        raise SpecError(f"ffn {text!r} ends after its colon: give key=value, or leave the colon out")
    given: dict[str, Any] = {}
    for piece in _pieces(tail):
        key, equals, raw = (part.strip() for part in piece.partition("="))
        readers = _KEYS[name]
        if key not in readers:
            keys = ", ".join(readers) or "none"
            raise SpecError(f"ffn {name!r} has no key {key!r}{_nearest(key, readers)} (keys: {keys})")
        if not equals or not raw:
            raise SpecError(f"{piece!r} in ffn {text!r} is not of the form key=value")
        if key in given:
            raise SpecError(f"key {key!r} is given twice in ffn {text!r}")
        given[key] = readers[key](key, raw)
    if name == "remote-walk" and "endpoint" not in given:
        raise SpecError(f"ffn {text!r} needs endpoint=URL, e.g. remote-walk:endpoint=http://127.0.0.1:8080")
    return FfnKind(name, tuple(given.items()))


def _pieces(tail: str) -> list[str]:
    """Parts between commas; `7-9=URL` goes on with the list of shards before it."""
    pieces: list[str] = []
    for part in tail.split(",") if tail.strip() else []:
        if pieces and re.match(r"\s*\d+(-\d+)?\s*=", part):
            pieces[-1] += "," + part
        else:
            pieces.append(part.strip())
    return pieces


def _split_rules(text: str) -> Iterable[str]:
    """Parts between semicolons outside braces. Raises SpecError for braces that do not match."""
    depth, start = 0, 0
    for at, letter in enumerate(text):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise SpecError(f"ffn {text!r}: unexpected {letter!r} at character {at + 1}")
        if letter == ";" and depth == 0:
            yield text[start:at]
            start = at + 1
    if depth:
        raise SpecError(f"ffn {text!r}: a closing brace is missing")
    yield text[start:]


def _parse_rule(piece: str, text: str) -> FfnRule:
    match = re.fullmatch(r"\{([^{}]*)\}\s*@\s*(.+)", piece, re.DOTALL)
    if match is None:
        raise SpecError(
            f"{piece!r} in ffn {text!r} is not of the form {{FFN}}@layers=0-3, {{FFN}}@all or "
            "{FFN}@otherwise"
        )
    ffn, where = _parse_kind(match[1].strip()), match[2].strip()
    if where in ("all", "otherwise"):
        return FfnRule(ffn, where)
    name, equals, spans = (part.strip() for part in where.partition("="))
    if name != "layers" or not equals:
        raise SpecError(
            f"unknown predicate {where!r} in ffn {text!r}{_nearest(name, ('layers', 'all', 'otherwise'))} "
            "(one of: all, otherwise, layers=0-3,7)"
        )
    return FfnRule(ffn, "layers", tuple(_parse_span(span.strip(), text) for span in spans.split(",")))


def _parse_span(span: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", span)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise SpecError(f"{span!r} in ffn {text!r} is no range of layers such as 14-27, or one layer")
    return int(match[1]), int(match[2] or match[1])


def _layers_of(rule: FfnRule, layer_count: int) -> Iterable[int]:
    if rule.where == "otherwise":
        return
    for first, last in rule.ranges if rule.where == "layers" else ((0, layer_count - 1),):
        if last >= layer_count:
            raise SpecError(
                f"rule {rule.text!r} names layer {last}; the model has layers 0-{layer_count - 1}"
            )
        yield from range(first, last + 1)


def _spans(layers: list[int]) -> str:
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][1] == layer - 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def _features(key: str, raw: str) -> int | None:
    if raw.lower() == "none":
        return None
    if not raw.isascii() or not raw.isdigit() or not 0 < int(raw) < _MAX_K:
        raise SpecError(f"{key}={raw!r} is no number of features of at least 1, or none")
    return int(raw)


def _seconds(key: str, raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise SpecError(f"{key}={raw!r} is no positive number of seconds")
    return value


def _one_of(options: tuple[str, ...]) -> Callable[[str, str], str]:
    def read(key: str, raw: str) -> str:
        if raw not in options:
            raise SpecError(f"{key}={raw!r}{_nearest(raw, options)} is not one of {', '.join(options)}")
        return raw

    return read


def _as_is(key: str, raw: str) -> str:
    return raw


_Reader = Callable[[str, str], Any]
_KEYS: dict[str, dict[str, _Reader]] = {
    "dense": {},
    "walk": {"k": _features, "l1": _one_of(_L1)},
    "remote-walk": {
        "endpoint": _as_is,
        "wire": cast(_Reader, _one_of(_WIRES)),
        "k": _features,
        "timeout": _seconds,
    },
    "null": {},
}
