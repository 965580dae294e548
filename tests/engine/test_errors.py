"""The five engine errors, raised where they should be, and an engine that survives them."""

from __future__ import annotations

import dataclasses
import importlib.util

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv import errors
from larql_kv.model.model import Model
from larql_kv.model.shape_models import random_model
from tests import tiny_models
from tests.models import SPECS, tiny

each_engine = pytest.mark.parametrize("spec", SPECS)


def test_exactly_five_kinds_with_the_seeds_recoverability() -> None:
    kinds = {kind.__name__: kind.is_recoverable for kind in errors.EngineError.__subclasses__()}
    assert kinds == {
        "EmptyPrompt": True,
        "BackendUnavailable": True,
        "RetrievalMiss": True,
        "InvariantViolation": False,
        "BackendFailure": False,
    }
    assert lk.RetrievalMiss("no store").reason == "no store"
    assert lk.InvariantViolation("x").what == "x"
    assert lk.BackendFailure("y").details == "y"
    assert lk.EmptyPrompt() == lk.EmptyPrompt()
    assert lk.RetrievalMiss("a") != lk.RetrievalMiss("b")
    assert lk.InvariantViolation("a") != lk.BackendFailure("a")
    assert len({lk.RetrievalMiss("a"), lk.RetrievalMiss("a")}) == 1


@each_engine
def test_empty_prompt(spec: str) -> None:
    engine = lk.build_engine(spec, tiny("llama"))
    with pytest.raises(lk.EmptyPrompt):
        engine.prefill([])
    with pytest.raises(lk.EmptyPrompt):
        next(engine.generate([]))
    assert engine.tokens == []


@each_engine
def test_decode_before_prefill(spec: str) -> None:
    engine = lk.build_engine(spec, tiny("llama"))
    with pytest.raises(lk.InvariantViolation, match="before prefill"):
        engine.decode_step(5)
    engine.prefill([5])
    engine.reset()
    with pytest.raises(lk.InvariantViolation):
        engine.decode_step(5)


@each_engine
@pytest.mark.parametrize("bad", [-1, 128, 10**9])
def test_ids_outside_the_vocabulary(spec: str, bad: int) -> None:
    engine = lk.build_engine(spec, tiny("llama"))
    engine.prefill([5, 6])
    for call in (lambda: engine.prefill([7, bad]), lambda: engine.decode_step(bad)):
        with pytest.raises(lk.ModelError, match=f"{bad} is outside the vocabulary of 128"):
            call()
    assert engine.tokens == [5, 6]


@each_engine
def test_longer_than_the_context_is_refused_before_any_work(spec: str) -> None:
    model = tiny("llama")
    engine = lk.build_engine(spec, model)
    limit = model.config.context
    with pytest.raises(lk.ModelError, match=f"{limit + 1} tokens do not fit"):
        engine.prefill([5] * (limit + 1))
    assert engine.tokens == []
    assert engine.ledger().total(role="canonical") == 0
    engine.prefill([5] * limit)
    with pytest.raises(lk.ModelError, match="do not fit"):
        engine.decode_step(5)


class _Breaking(lk.DenseFfn):
    """Fails at its nth call."""

    def __init__(self, model: Model, error: BaseException, at: int) -> None:
        super().__init__(model)
        self.error, self.left = error, at

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return super().forward(layer, x)


@each_engine
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), MemoryError(), KeyboardInterrupt(), lk.RemoteError("gone")]
)
def test_a_failed_or_interrupted_call_leaves_the_engine_as_it_was(
    spec: str, family: str, error: BaseException
) -> None:
    model = tiny(family)
    ids = tiny_models.sample_ids(30, model.config.vocab)
    witness = lk.build_engine(spec, model)
    witness.prefill(ids[:20])
    broken = _Breaking(model, error, at=10**9)
    engine = lk.build_engine(spec, model, ffn=broken)
    engine.prefill(ids[:20])
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else lk.BackendFailure
    for call in (lambda: engine.decode_step(7), lambda: engine.prefill(ids[:9])):
        broken.left = 3  # dies in the third layer: two have written their rows
        with pytest.raises(expected):
            call()
        assert engine.tokens == ids[:20]
    for token in ids[20:]:
        assert torch.equal(engine.decode_step(token), witness.decode_step(token))


@each_engine
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("at", [2, 5, 9, 14])
def test_an_interrupted_trim_leaves_no_wrong_rows(
    spec: str, family: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trim that runs ids again, in several chunks, and dies on the way: what follows equals a fresh run."""
    from larql_kv.engine import base

    monkeypatch.setattr(base, "PREFILL_ROWS", 16)
    model = tiny(family)
    ids = tiny_models.sample_ids(60, model.config.vocab)
    breaking = _Breaking(model, KeyboardInterrupt(), at=10**9)
    engine = lk.build_engine(spec, model, ffn=breaking)
    engine.prefill(ids)
    breaking.left = at
    interrupted = False
    try:
        engine.trim(50)
    except KeyboardInterrupt:
        interrupted = True
    breaking.left = 10**9
    assert engine.tokens == ids[:50]
    fresh = lk.build_engine(spec, model)
    fresh.prefill(ids[:50])
    assert torch.equal(engine.decode_step(9), fresh.decode_step(9)), interrupted


def test_a_remote_failure_while_trimming_is_a_backend_failure() -> None:
    model = tiny("gemma3")
    breaking = _Breaking(model, lk.RemoteError("gone"), at=10**9)
    engine = lk.build_engine("standard", model, ffn=breaking)
    engine.prefill(tiny_models.sample_ids(60, model.config.vocab))
    breaking.left = 2
    with pytest.raises(lk.BackendFailure) as caught:
        engine.trim(50)
    assert isinstance(caught.value.__cause__, lk.RemoteError)


def test_an_ffn_of_the_wrong_shape_is_a_backend_failure() -> None:
    model = tiny("llama")

    class Short(lk.DenseFfn):
        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            return super().forward(layer, x)[:, :-1].contiguous()

    with pytest.raises(lk.BackendFailure):
        lk.build_engine("standard", model, ffn=Short(model)).prefill([5, 6])


def test_no_memory_for_a_block_is_a_backend_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from larql_kv.state import pages

    model = tiny("llama")
    engine, witness = lk.build_engine("standard", model), lk.build_engine("standard", model)
    ids = tiny_models.sample_ids(70, model.config.vocab)
    for side in (engine, witness):
        side.prefill(ids[:64])

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(pages.mmap, "mmap", refuse)
        with pytest.raises(lk.BackendFailure, match="no memory for a state block"):
            engine.decode_step(5)
    assert engine.tokens == ids[:64]
    assert torch.equal(engine.decode_step(6), witness.decode_step(6))


@each_engine
def test_weights_that_give_no_numbers_are_a_backend_failure(spec: str) -> None:
    model = tiny("llama")

    class Corrupt(lk.DenseFfn):
        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            return super().forward(layer, x) * float("nan")

    with pytest.raises(lk.BackendFailure, match="not finite"):
        lk.build_engine(spec, model, ffn=Corrupt(model)).prefill([5, 6])


def test_residual_engines_check_their_preconditions_when_built() -> None:
    model = tiny("llama")
    strange = dataclasses.replace(
        model.config, kv_inputs=frozenset({"residual", "position", "layer 3's K/V"})
    )
    doctored = dataclasses.replace(model, config=strange)
    with pytest.raises(lk.ModelError, match="layer 3's K/V"):
        lk.build_engine("markov-rs", doctored)
    lk.build_engine("standard", doctored)


def test_rows_made_under_another_ffn_are_not_continued() -> None:
    model = tiny("llama")

    class Other(lk.DenseFfn):
        name = "other"

        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = object.__hash__

    engine = lk.build_engine("standard", model)
    engine.prefill([5, 6, 7])
    with pytest.raises(lk.InvariantViolation, match="reset"):
        lk.generate_with_engine(engine, Other(model), [5, 6, 7, 8], 3)
    assert engine.tokens == [5, 6, 7]
    with pytest.raises(lk.InvariantViolation, match="reset"):
        lk.generate_with_engine(engine, Other(model), [5, 6, 20], 3)
    assert engine.tokens == [5, 6, 7], "what cannot be continued must not be cut either"
    same = lk.generate_with_engine(
        engine, lk.DenseFfn(model), [5, 6, 7, 8], 3
    )  # equal, not identical: goes on
    assert len(same) == 3
    engine.reset()
    assert lk.generate_with_engine(engine, Other(model), [5, 6, 7, 8], 3) == same


@pytest.mark.parametrize("device", ["mps", "toaster", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cudas", ""])
def test_a_device_without_a_backend(device: str) -> None:
    with pytest.raises(lk.BackendUnavailable, match=f"no backend for device '{device}'"):
        lk.load_model(tiny_models.model_dir("llama"), device=device)


def _cards(monkeypatch: pytest.MonkeyPatch, count: int, capability: tuple[int, int] = (9, 0)) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def test_a_card_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    load, path = lk.load_model, tiny_models.model_dir("llama")
    _cards(monkeypatch, 0)
    with pytest.raises(lk.BackendUnavailable, match=r"'cuda' was asked for, but torch .* finds no CUDA card"):
        load(path, device="cuda")
    _cards(monkeypatch, 2)
    with pytest.raises(lk.BackendUnavailable, match="'cuda:7' was asked for, but only 2"):
        load(path, device="cuda:7")
    _cards(monkeypatch, 1, (8, 0))
    with pytest.raises(lk.BackendUnavailable, match=r"compute capability 8\.x; the kernels need 9\.0"):
        load(path, device="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(lk.BackendUnavailable, match="only 1 can be had"):
        load(path, device="cuda:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(lk.BackendUnavailable, match="needs the package triton"):
        load(path, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a card")
def test_the_interpreter_stands_in_for_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    model = lk.load_model(tiny_models.model_dir("llama"), device="cuda")
    assert (model.decoder.name, model.device.type) == ("cuda", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda", "dtype": "float32"}, "device 'cuda' has no float32 form"),
        ({"device": "cuda", "dtype": torch.float32}, "device 'cuda' has no float32 form"),
        ({"device": "cuda", "activations": "int9"}, "'int9' are not offered on cuda; offered: int8, mixed"),
        ({"activations": "int8"}, "'int8' is a setting of device 'cuda'; on 'cpu' leave it out"),
    ],
)
def test_a_form_that_the_device_does_not_have(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], message: str
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(lk.BackendUnavailable, match=message):
        lk.load_model(tiny_models.model_dir("llama"), **options)  # type: ignore[arg-type]
    with pytest.raises(lk.BackendUnavailable, match=message):
        random_model("gemma3-270m", **options)  # type: ignore[arg-type]


def test_an_unknown_dtype() -> None:
    with pytest.raises(lk.ModelError, match="int3"):
        lk.load_model(tiny_models.model_dir("llama"), dtype="int3")


@each_engine
@pytest.mark.parametrize(
    "bad", ["345", b"abc", ["3", "4"], [3.7, 4.2], [True, False], {3: 4}, {3, 4}, 5, [[1, 2]], None]
)
def test_what_is_no_list_of_ids_is_refused(spec: str, bad: object) -> None:
    engine = lk.build_engine(spec, tiny("llama"))
    engine.prefill([5, 6])
    with pytest.raises(lk.ModelError, match="token ids must be a sequence of integers"):
        engine.prefill(bad)  # type: ignore[arg-type]
    if not isinstance(bad, str):
        with pytest.raises(lk.ModelError, match="token ids must be a sequence of integers"):
            engine.generate(bad)  # type: ignore[arg-type]
    for token in (3.9, "7", None):
        with pytest.raises(lk.ModelError):
            engine.decode_step(token)  # type: ignore[arg-type]
    assert engine.tokens == [5, 6]


def test_ids_of_other_integer_types() -> None:
    model = tiny("llama")
    expected = lk.build_engine("standard", model).prefill([5, 6, 7])
    for ids in (
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
        (5, 6, 7),
        range(5, 8),
        [np.int32(5), 6, np.int64(7)],
    ):
        assert torch.equal(lk.build_engine("standard", model).prefill(ids), expected)
    engine = lk.build_engine("standard", model)
    engine.prefill([5, 6])
    assert torch.equal(engine.decode_step(np.int64(7)), expected)


@each_engine
def test_a_trim_that_makes_no_sense_changes_nothing(spec: str) -> None:
    engine = lk.build_engine(spec, tiny("gemma3"))
    engine.prefill([5, 6, 7, 8])
    with pytest.raises(TypeError):
        engine.trim(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=">= 0"):
        engine.trim(-1)
    assert engine.tokens == [5, 6, 7, 8]
    engine.decode_step(9)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_gives_no_numbers_is_a_backend_failure(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    logits = type(model).logits

    def poisoned(self: Model, hidden: torch.Tensor) -> torch.Tensor:
        out = logits(self, hidden)
        out[0, 7] = value
        return out

    monkeypatch.setattr(type(model), "logits", poisoned)
    for options in ({}, {"temperature": 1.0}):
        with pytest.raises(lk.BackendFailure, match="logits are not finite"):
            list(lk.build_engine("standard", model).generate([5, 6], 3, **options))


def test_an_ffn_that_is_none() -> None:
    with pytest.raises(TypeError, match="FfnBackend"):
        lk.build_engine("standard", tiny("llama"), ffn="dense")  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [None, [1.0], torch.zeros(2, 3), torch.zeros(2, 64, dtype=torch.float64)])
def test_an_ffn_that_answers_nonsense(answer: object) -> None:
    model = tiny("llama")

    class Odd(lk.DenseFfn):
        def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
            return answer  # type: ignore[return-value]

    with pytest.raises(lk.BackendFailure, match=r"the FFN gave .* for layer 0, expected float32 \(2, 64\)"):
        lk.build_engine("standard", model, ffn=Odd(model)).prefill([5, 6])
