"""A Jinja environment for templates of strangers: no way out, and a bound on time and memory.

Jinja's sandbox keeps a template from reaching Python's internals. It does not keep one from running for
ever or from filling the memory, so here every loop turn, call, operator and filter is counted, and every
value is measured before (where it can be huge) or after it is made.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # loop turns, calls, operators, filters
MAX_VALUE = 4 << 20  # characters (or elements) of one value
MAX_TOTAL = 64 << 20  # characters of all values made; an element of a list counts as eight
MAX_NODES = 200_000  # elements of one nested value
MAX_SECONDS = 2.0
MAX_INT_BITS = 4096

_FILTERS = """abs capitalize count d default dictsort e escape first float int items last length list lower
    map max min reject rejectattr reverse safe select selectattr sort striptags title trim unique upper"""
_STR_METHODS = """capitalize count endswith find format index isalnum isalpha isdigit islower isnumeric
    isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"""
_STR_METHOD_SET = frozenset(_STR_METHODS.split())
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
_WIDE_FORMAT = re.compile(r"\{[^{}]*(\d{4}|\{)")


class LimitError(Exception):
    """A template ran into one of the bounds."""


class Budget:
    """What one rendering may still spend."""

    def __init__(self, value_limit: int = MAX_VALUE, seconds: float = MAX_SECONDS) -> None:
        self.steps = MAX_STEPS
        self.total = max(MAX_TOTAL, 8 * value_limit)
        self.value_limit = value_limit
        self.deadline = time.monotonic() + seconds
        self.seconds = seconds

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise LimitError(f"more than {MAX_STEPS} steps")
        # The clock costs more than the rest of a step, and single steps are bounded.
        if self.steps & 15 == 0:
            self.clock()

    def clock(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError(f"more than {self.seconds:g} seconds")

    def size(self, count: int) -> None:
        """Refuse a value of `count` characters or elements before it is made."""
        if count > self.value_limit:
            raise LimitError(f"a value of {count} characters or elements, the limit is {self.value_limit}")
        self.total -= count
        if self.total < 0:
            raise LimitError("too many characters in all values together")

    def made(self, value: Any) -> Any:
        """Account for a value that was just made."""
        self.step()
        if isinstance(value, str | bytes):
            self.size(len(value))
        elif isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise LimitError(f"an integer of {value.bit_length()} bits, the limit is {MAX_INT_BITS}")
        elif isinstance(value, list | tuple | dict | set | frozenset):
            self.size(8 * len(value))
            self.weigh(value)
        return value

    def weigh(self, value: Any) -> int:
        """About how long a value's text is; refused when huge (references to one list double per level)."""
        if isinstance(value, str | bytes):
            return len(value)
        self.clock()
        characters, nodes = 0, 1
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str | bytes):
                characters += len(item)
            elif isinstance(item, Mapping):
                nodes += 2 * len(item)
                if nodes <= MAX_NODES:
                    stack.extend(item.keys())
                    stack.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                nodes += len(item)
                if nodes <= MAX_NODES:
                    stack.extend(item)
            if nodes > MAX_NODES or characters > self.value_limit:
                raise LimitError(
                    f"a nested value of more than {MAX_NODES} elements or {self.value_limit} characters"
                )
        return characters + 8 * nodes


class _Namespace(Namespace):
    """Prints as a constant: namespaces that hold each other would print without end."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(ext.Extension):
    """`{% generation %}` marks what the assistant wrote; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
            line
        )


class _Instrument(NodeTransformer):
    """Puts a step into every loop and macro, and a measure around values that no hook sees."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        return call.set_lineno(line).set_environment(self._environment)  # type: ignore[return-value]

    def _stepping(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        step = nodes.ExprStmt(self._call("larql_step", [], node.lineno)).set_lineno(node.lineno)
        node.body.insert(0, step)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_FilterBlock = _stepping

    def _measured(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        return self._call("larql_made", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _measured

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("larql_concat", list(node.nodes), node.lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a `Budget`; `budget` is set anew for each rendering."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # it would evaluate constants while compiling
            finalize=self._printed,
            extensions=[_Generation, ext.loopcontrols],
        )
        self.budget = Budget()
        own = {"join": self._join, "replace": self._replace, "indent": self._indent, "tojson": self._tojson}
        own |= {"round": self._round, "sum": self._sum, "string": self._text}
        kept = {name: self._counted(self.filters[name]) for name in _FILTERS.split()}
        self.filters = {**kept, **own}
        self.tests = {name: self._counted(test) for name, test in self.tests.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": dict,
            "namespace": _Namespace,
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument(self).visit(source), *args, **kwargs)

    def larql_step(self) -> None:
        self.budget.step()

    def larql_made(self, value: Any) -> Any:
        return self.budget.made(value)

    def _printed(self, value: Any) -> Any:
        self.budget.weigh(value)
        return value

    def _text(self, value: Any) -> str:
        self.budget.weigh(value)
        return value if isinstance(value, str) else str(value)

    def larql_concat(self, *parts: Any) -> str:
        texts = [self._text(part) for part in parts]
        self.budget.step()
        self.budget.size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic, measured: `*` and `**` before they are done."""
        if operator == "*":
            for first, second in ((left, right), (right, left)):
                if isinstance(first, str | bytes | list | tuple) and isinstance(second, int):
                    self.budget.size(len(first) * max(int(second), 0))
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_INT_BITS:
                raise LimitError(f"an integer of more than {MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, str | bytes):
            if isinstance(left, bytes) or _WIDE_PERCENT.search(left):
                raise LimitError("a % format with a wide field")
            self.budget.size(len(left) + left.count("%") * self.budget.weigh(right))
        return self.budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls, measured; of a string's methods only those that cannot blow up, or after a look."""
        # The sandbox wraps str.format in a function that remembers it.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name not in _STR_METHOD_SET:
                raise LimitError(f"the string method {name!r} is not available")
            if name == "replace":
                _check_replace(__self.budget, owner, *args[:2])
            elif name == "join" and args:
                args = (__self._joinable(owner, args[0]), *args[1:])
            elif name == "format":
                if _WIDE_FORMAT.search(owner):
                    raise LimitError("a format with a wide field")
                weight = __self.budget.weigh([*args, *kwargs.values()])
                __self.budget.size(len(owner) + owner.count("{") * weight)
        elif isinstance(owner, bytes):
            raise LimitError("methods of bytes are not available")
        result = super().call(__context, __obj, *args, **kwargs)
        return result if owner is __self else __self.budget.made(result)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            return self.budget.made(function(*args, **kwargs))

        # jinja2 marks functions that want the context, the environment or an eval context.
        counted.__dict__.update(getattr(function, "__dict__", {}))
        return counted

    def _joinable(self, separator: str, values: Any) -> list[str]:
        texts: list[str] = []
        for value in values:
            self.budget.step()
            texts.append(self._text(value))
        self.budget.size(sum(map(len, texts)) + len(separator) * len(texts))
        return texts

    def _join(self, value: Any, d: str = "", attribute: Any = None) -> str:
        if attribute is not None:
            value = (self.getitem(item, attribute) for item in value)
        separator = str(d)
        return separator.join(self._joinable(separator, value))

    def _replace(self, s: Any, old: Any, new: Any, count: int = -1) -> str:
        _check_replace(self.budget, str(s), old, new)
        return self.budget.made(str(s).replace(str(old), str(new), -1 if count is None else count))

    def _indent(self, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = str(s)
        pad = width if isinstance(width, str) else " " * min(max(width, 0), 1000)
        self.budget.size(len(text) + len(pad) * (1 + len(text.splitlines())))
        text += "\n"  # jinja2's own rule: the last newline takes part, then goes
        lines = text.splitlines()
        out = [lines[0], *(pad + line if line or blank else line for line in lines[1:])]
        return self.budget.made((pad if first else "") + "\n".join(out))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self.budget.weigh(value)
        if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
            raise LimitError(f"tojson with an indent of {indent!r}, expected 0 to 16")
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return self.budget.made(text)

    def _round(self, value: Any, precision: int = 0, method: str = "common") -> Any:
        if not -20 <= precision <= 20:
            raise LimitError(f"round to {precision} places")
        self.budget.step()
        from jinja2.filters import do_round

        return do_round(value, precision, method)  # type: ignore[arg-type]

    def _sum(self, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
        total = start
        for item in iterable:
            value = item if attribute is None else self.getitem(item, attribute)
            if not isinstance(value, int | float) or not isinstance(total, int | float):
                raise LimitError("sum of anything but numbers")
            total = self.budget.made(total + value)
        return total


def _check_replace(budget: Budget, text: str, old: Any = "", new: Any = "") -> None:
    budget.size(len(text) + text.count(str(old)) * len(str(new)))


def _raise_exception(message: Any) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(str(message)[:2000])


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 200 or re.search(r"%[^a-zA-Z%]*\d", form):
        raise LimitError("strftime_now with a field width")
    return datetime.datetime.now().strftime(form)
