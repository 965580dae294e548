"""Any sequence of prefill, decode, trim, fork, drop and reset equals a fresh run of the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import larql_kv as lk
from larql_kv.engine.base import KvEngine
from larql_kv.policy import StateKind
from tests.models import CODED_SPECS, SPECS, tiny
from tests.storages import held_storages

MAX_TOKENS = 150  # the tiny models' windows are 8; blocks hold 64 rows
tokens = st.integers(3, 127)
families = ("llama", "gemma3", "gemma2")


class EngineMachine(RuleBasedStateMachine):
    """Holds one engine and the ids it ought to hold; the last hidden is compared with the reference's."""

    spec = "standard"

    @initialize(family=st.sampled_from(families))
    def start(self, family: str) -> None:
        self.model = tiny(family)
        self.engine: KvEngine = lk.build_engine(self.spec, self.model)
        self.ids: list[int] = []
        self.hidden: torch.Tensor | None = None
        self.parked: list[tuple[KvEngine, list[int]]] = []

    @rule(ids=st.lists(tokens, min_size=1, max_size=70))
    def prefill(self, ids: list[int]) -> None:
        ids = ids[: max(1, MAX_TOKENS - len(self.ids))]
        self.hidden = self.engine.prefill(ids)
        self.ids += ids

    @precondition(lambda self: self.ids)
    @rule(token=tokens)
    def decode(self, token: int) -> None:
        self.hidden = self.engine.decode_step(token)
        self.ids.append(token)

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        keep = round(share * len(self.ids))
        self.engine.trim(keep)
        self.ids = self.ids[:keep]
        self.hidden = None

    @rule()
    def drop(self) -> None:
        self.engine.drop_derivative()

    @rule()
    def fork(self) -> None:
        self.parked.append((self.engine, list(self.ids)))
        self.engine = self.engine.fork()

    @precondition(lambda self: self.parked)
    @rule()
    def swap(self) -> None:
        parked = (self.engine, list(self.ids))
        self.engine, self.ids = self.parked.pop()
        self.parked.append(parked)
        self.hidden = None

    @precondition(lambda self: self.parked)
    @rule()
    def let_a_fork_go(self) -> None:
        self.parked.pop(0)

    @rule()
    def reset(self) -> None:
        self.engine.reset()
        self.ids, self.hidden = [], None

    @invariant()
    def holds_its_tokens(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.tokens == self.ids

    @invariant()
    def ledger_is_true(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.ledger().capacity == sum(held_storages(self.engine).values())

    @invariant()
    def last_hidden_is_the_references(self) -> None:
        if getattr(self, "hidden", None) is not None:
            expected = self.engine.reference().prefill(self.ids)
            assert torch.equal(self.hidden, expected)
            self.hidden = None


class CodedMachine(EngineMachine):
    """Codes are no bits of the reference's, but those of a fresh run; a trim may leave rows coded that a
    fresh run would not have coded yet, where codes are canonical."""

    trimmed = False

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        super().trim(share)
        self.trimmed = self.engine.policy.canonical in (StateKind.KV_CODES, StateKind.RESIDUAL_CODES)

    @precondition(lambda self: self.parked)
    @rule()
    def swap(self) -> None:
        super().swap()
        self.trimmed = True  # perhaps: not worth following

    @rule()
    def reset(self) -> None:
        super().reset()
        self.trimmed = False

    @invariant()
    def last_hidden_is_the_references(self) -> None:
        if getattr(self, "hidden", None) is not None:
            assert torch.isfinite(self.hidden).all()
            if not self.trimmed and not self.parked:
                assert torch.equal(self.hidden, self.engine.fresh().prefill(self.ids))
            self.hidden = None


def _run(base: type[EngineMachine], spec: str, examples: int) -> None:
    machine = type("Machine", (base,), {"spec": spec})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )


@pytest.mark.parametrize("spec", SPECS)
def test_any_history_equals_the_reference(spec: str) -> None:
    _run(EngineMachine, spec, 8)


@pytest.mark.parametrize("spec", CODED_SPECS)
def test_any_history_stays_near_the_reference(spec: str) -> None:
    _run(CodedMachine, spec, 6)
