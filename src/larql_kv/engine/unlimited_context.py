"""unlimited-context: one window of K/V rows; of closed ones a checkpoint, and the ids to run them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from larql_kv.engine.kv_forms import coding_of, nats_of
from larql_kv.errors import SpecError
from larql_kv.model.model import Model
from larql_kv.policy import BoundedKL, Contract, ExactWithinWindow, StateKind, StatePolicy, TaskLevel
from larql_kv.spec import EngineSpec, engine, key
from larql_kv.state.pages import BLOCK
from larql_kv.state.windows import WindowState


@engine("unlimited-context", aliases=("unlimited", "unlimited_context"))
@dataclass(frozen=True)
class UnlimitedContext(EngineSpec):
    """K/V rows of one window at a time; older windows are token ids, which a query may bring back as K/V."""

    window: int = key(512, "tokens of a window", minimum=1)
    replay: int | None = key(
        None, "archived windows that a query brings back (none or 0: none)", minimum=0, maximum=64
    )
    score: Literal["both", "tokens", "keys"] = key(
        "both", "what chooses them: shared tokens, summaries of their keys, or both"
    )
    kv: Literal["full", "turbo4", "turbo3", "turbo2"] = key(
        "full", "K/V in the window: full precision, or codes as turbo-quant has them"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.score != "both" and self.replay is None:
            raise SpecError(
                f"score={self.score} chooses the windows that a query brings back: give replay=N too"
            )
        coding = coding_of(self.kv)
        if coding is None:
            return
        if self.replay is not None:
            raise SpecError(
                f"replay={self.replay} attends archived windows in full precision, and kv={self.kv} promises "
                f"codes: give one of the two"
            )
        if self.window <= coding.recent + BLOCK:
            raise SpecError(
                f"a window of {self.window} tokens holds nothing to code: kv={self.kv} needs window > "
                f"{coding.recent + BLOCK} (the latest {coding.recent} rows stay in full precision)"
            )

    @property
    def policy(self) -> StatePolicy:
        """With `replay`, what a query sees is more than any window, and chosen by its words: no promise about
        logits, though the rows brought back are exact."""
        coding = coding_of(self.kv)
        contract: Contract = ExactWithinWindow(self.window, tumbling=True)
        if coding is not None:
            contract = BoundedKL(nats_of(coding), tumbling=self.window)
        if self.replay is not None:
            contract = TaskLevel()
        derivative = StateKind.NOTHING if self.replay is None else StateKind.KV
        return StatePolicy(StateKind.KV_WINDOW, derivative, contract)

    def build_state(self, model: Model) -> WindowState:
        return WindowState(model, self.window, self.replay, self.score, coding_of(self.kv))
