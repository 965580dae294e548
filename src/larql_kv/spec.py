"""Engine specs: `name:key=value,key=value` <-> one frozen dataclass per engine, and their registry.

An engine registers itself with `@engine(...)`; the CLI, the bench, the docs and the contract tests
read the registry, so a new engine needs no other edit.
"""

from __future__ import annotations

import contextlib
import difflib
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

from larql_kv.errors import SpecError
from larql_kv.policy import StatePolicy

if TYPE_CHECKING:
    from larql_kv.model.model import Model
    from larql_kv.state.base import State


@dataclass(frozen=True)
class Alias:
    """Another name of an engine: `preset` fills keys, `requires` names keys that must be given."""

    name: str
    preset: Mapping[str, Any] = field(default_factory=dict)
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class KeyInfo:
    """One key of an engine spec, as `larql engines` and the docs show it."""

    name: str
    type: str
    default: Any
    help: str


@dataclass(frozen=True)
class EngineEntry:
    """One registered engine."""

    name: str
    aliases: tuple[Alias, ...]
    kind: Literal["kv", "retrieval"]
    description: str
    keys: tuple[KeyInfo, ...]
    policy: StatePolicy
    spec_class: type[EngineSpec]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "aliases": [alias.name for alias in self.aliases],
            "kind": self.kind,
            "description": self.description,
            "keys": {
                key.name: {"type": key.type, "default": key.default, "help": key.help} for key in self.keys
            },
            "policy": self.policy.to_dict(),
        }


@dataclass(frozen=True)
class EngineSpec:
    """Base of every engine's frozen dataclass: its fields are the spec's keys."""

    engine_name: ClassVar[str] = ""
    kind: ClassVar[Literal["kv", "retrieval"]] = "kv"

    def __post_init__(self) -> None:
        """Bounds hold however a spec is made; 0 means none where a key may be none."""
        hints = typing.get_type_hints(type(self))
        for spec_field in fields(self):
            name, hint = _key_name(spec_field), hints[spec_field.name]
            value = getattr(self, spec_field.name)
            options = _options(hint)
            if type(value) not in options and not any(
                value == option and type(value) is type(option) for option in options
            ):
                raise SpecError(f"{name}={value!r} is not {_wanted(options)}")
            if type(value) in (int, float):
                _check_bounds(spec_field, name, value)
                if value == 0 and hint == int | None:
                    object.__setattr__(self, spec_field.name, None)

    @property
    def policy(self) -> StatePolicy:
        raise NotImplementedError

    @property
    def is_reference(self) -> bool:
        """Whether this engine is the one that `Exact` names."""
        return False

    def build_state(self, model: Model) -> State:
        """The state this engine keeps, empty. May refuse a model with ModelError, giving the reason."""
        raise NotImplementedError

    def cost_note(self, model: Model) -> str:
        """What a user should know of this state's size on `model`, in one line; empty for nothing."""
        return ""

    @property
    def text(self) -> str:
        """The spec in its canonical text form; `parse_spec(spec.text) == spec`."""
        given = [
            f"{_key_name(key)}={_show(getattr(self, key.name))}"
            for key in fields(self)
            if getattr(self, key.name) != key.default
        ]
        return self.engine_name + (":" + ",".join(given) if given else "")


MAX_COUNT = 1 << 40  # rows, tokens: more than any memory holds, and safe in 64-bit address arithmetic


def key(default: Any, help: str, minimum: int | None = None, maximum: int | None = MAX_COUNT) -> Any:
    """A spec key with its default, help text and bounds. Use as a dataclass field."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "maximum": maximum})


_REGISTRY: dict[str, EngineEntry] = {}
_ALIASES: dict[str, tuple[EngineEntry, Alias]] = {}
SpecClass = TypeVar("SpecClass", bound=type[EngineSpec])


def engine(name: str, aliases: tuple[str | Alias, ...] = ()) -> Callable[[SpecClass], SpecClass]:
    """Class decorator: register a frozen `EngineSpec` dataclass under `name` and its aliases.

    Raises ValueError when a name is taken.
    """

    def register(spec_class: SpecClass) -> SpecClass:
        spec_class.engine_name = name
        known = tuple(alias if isinstance(alias, Alias) else Alias(alias) for alias in aliases)
        defaults = cast(EngineSpec, spec_class())
        entry = EngineEntry(
            name=name,
            aliases=known,
            kind=spec_class.kind,
            description=(spec_class.__doc__ or "").strip().splitlines()[0],
            keys=tuple(_key_info(spec_class, spec_field) for spec_field in fields(spec_class)),
            policy=defaults.policy,
            spec_class=spec_class,
        )
        for taken in (name, *(alias.name for alias in known)):
            if taken in _ALIASES:
                raise ValueError(f"engine name {taken!r} is already registered by {_ALIASES[taken][0].name}")
        _REGISTRY[name] = entry
        _ALIASES[name] = (entry, Alias(name))
        _ALIASES.update({alias.name: (entry, alias) for alias in known})
        return spec_class

    return register


def registered() -> list[EngineEntry]:
    """Every registered engine, `standard` first."""
    return sorted(_REGISTRY.values(), key=lambda entry: entry.name != "standard")


def parse_spec(text: str, context_window: int | None = None) -> EngineSpec:
    """`name:key=value,...` -> the engine's frozen dataclass.

    `context_window` serves the legacy windowed names (`sliding`, `bounded`, `markov-bounded`) when the
    text gives no window. Raises SpecError naming the bad part and the nearest right one.
    """
    if not isinstance(text, str):
        raise SpecError(f"an engine spec is a text such as 'standard:window=512', got {text!r}")
    name, _, tail = text.strip().partition(":")
    name = name.strip()
    if name.lower() not in _ALIASES:
        raise SpecError(f"unknown engine {name!r}{_nearest(name, _ALIASES)}; see `larql engines`")
    entry, alias = _ALIASES[name.lower()]
    names = {_key_name(spec_field): spec_field.name for spec_field in fields(entry.spec_class)}
    given: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in tail.split(","))):
        key_name, equals, raw = (piece.strip() for piece in part.partition("="))
        known = {info.name: info for info in entry.keys}
        if not equals:
            raise SpecError(
                f"{part!r} in spec {text!r} is not of the form key=value (a path cannot hold a comma here)"
            )
        if key_name not in known:
            keys = ", ".join(known) or "none"
            raise SpecError(
                f"engine {entry.name!r} has no key {key_name!r}{_nearest(key_name, known)} (keys: {keys})"
            )
        field_name = names[key_name]
        if field_name in given:
            raise SpecError(f"key {key_name!r} is given twice in spec {text!r}")
        given[field_name] = _convert(entry.spec_class, field_name, raw)
    values = {**alias.preset, **given}
    for needed in alias.requires:
        if not values.get(needed) and needed == "window" and context_window:
            values[needed] = context_window
        if not values.get(needed):
            raise SpecError(
                f"engine name {alias.name!r} needs {needed}=N (or --context-window N), "
                f"e.g. {alias.name}:{needed}=512"
            )
    return entry.spec_class(**values)


def kv_cache_spec(kv_cache: str, context_window: int = 0) -> EngineSpec:
    """The engine that a legacy `--kv-cache` value stands for: standard, markov-bounded, none, and aliases."""
    names = {"markov": "markov-bounded"}  # a legacy value that is no engine alias
    accepted = ("standard", "full", "fp32", "markov-bounded", "markov", "bounded", "sliding", "none", "off")
    if kv_cache not in accepted:
        raise SpecError(
            f"unknown --kv-cache {kv_cache!r}{_nearest(kv_cache, accepted)} (one of: {', '.join(accepted)})"
        )
    return parse_spec(names.get(kv_cache, kv_cache), context_window or None)


def split_specs(text: str) -> list[str]:
    """A list of specs on one line: `;` separates if present, else `,` with `key=value` pieces rejoined."""
    if ";" in text:
        return [piece.strip() for piece in text.split(";") if piece.strip()]
    specs: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if specs and "=" in piece and ":" not in piece:
            specs[-1] += "," + piece
        else:
            specs.append(piece)
    return specs


def _options(hint: Any) -> tuple[Any, ...]:
    """What a key takes: types, and the values of its Literals."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    parts = typing.get_args(hint) or (hint,)
    return parts if parts == (hint,) else tuple(option for part in parts for option in _options(part))


def _convert(spec_class: type[EngineSpec], name: str, raw: str) -> Any:
    options = _options(typing.get_type_hints(spec_class)[name])
    if type(None) in options and raw.lower() in ("none", ""):
        return None
    for option in options:
        if option in (int, float, str):
            with contextlib.suppress(ValueError):
                return option(raw)
        elif str(option) == raw:
            return option
    raise SpecError(f"{name.rstrip('_')}={raw!r} is not {_wanted(options)}")


def _wanted(options: tuple[Any, ...]) -> str:
    names = [
        "none" if option is type(None) else option.__name__ if isinstance(option, type) else str(option)
        for option in options
    ]
    return ("a valid " if len(names) <= 2 else "one of ") + (
        " or ".join(names) if len(names) <= 2 else ", ".join(names)
    )


def _check_bounds(spec_field: Field[Any], name: str, value: Any) -> None:
    low, high = spec_field.metadata.get("minimum"), spec_field.metadata.get("maximum")
    if isinstance(value, float) and value != value:
        raise SpecError(f"{name} must be a number, got nan")
    if low is not None and value < low:
        raise SpecError(f"{name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise SpecError(f"{name} must be at most {high}, got {value}")


def _key_name(spec_field: Field[Any]) -> str:
    """The key of a field: its name, without an underscore that keeps it apart from a property."""
    return spec_field.name.rstrip("_")


def _key_info(spec_class: type[EngineSpec], spec_field: Field[Any]) -> KeyInfo:
    hint = typing.get_type_hints(spec_class)[spec_field.name]
    shown = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    default = None if spec_field.default is MISSING else spec_field.default
    return KeyInfo(_key_name(spec_field), shown, default, spec_field.metadata.get("help", ""))


def _nearest(name: str, known: typing.Iterable[str]) -> str:
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _show(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
