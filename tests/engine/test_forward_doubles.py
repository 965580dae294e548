"""Two doubles that the forward pass must serve: injection into the middle, and an FFN in another process."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

import larql_kv as lk
from larql_kv.ffn.base import FfnBackend
from larql_kv.state.kv import KVState
from tests import tiny_models
from tests.models import tiny


def test_starts_from_rows_at_a_middle_layer_and_injects_after_one() -> None:
    """What a retrieval engine needs: layers 2.. from given rows, a vector added after layer 2.

    The independent reference is transformers with a forward hook on that layer.
    """
    family = "llama"
    model = tiny(family)
    ids = tiny_models.sample_ids(9, model.config.vocab)
    delta = torch.randn(1, model.config.hidden, generator=torch.Generator().manual_seed(1))
    ffn = lk.DenseFfn(model)

    state = KVState(model)
    state.begin(0, len(ids))
    middle = model.forward(model.embed(ids), 0, state, ffn, layers=range(2))

    def inject(layer: int, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat((rows[:-1], rows[-1:] + delta)) if layer == 2 else rows

    rows = model.forward(middle, 0, state, ffn, layers=range(2, 4), after_layer=inject)
    state.commit(len(ids))

    reference = tiny_models._reference(str(tiny_models.model_dir(family)))

    def hook(_module, _inputs, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden.clone()
        hidden[:, -1] += delta
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = reference.model.layers[2].register_forward_hook(hook)
    try:
        with torch.inference_mode():
            expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        handle.remove()
    np.testing.assert_allclose(model.logits(rows).numpy(), expected.numpy(), atol=2e-4)
    plain = lk.build_engine("standard", model).prefill_rows(ids)
    assert not torch.allclose(rows[-1], plain[-1])


def _serve(family: str, pipe: Connection) -> None:
    model = tiny(family)
    ffn = lk.DenseFfn(model)
    while (request := pipe.recv()) is not None:
        layer, rows = request
        pipe.send(ffn.forward(layer, torch.from_numpy(rows)).numpy())


class PipeFfn(FfnBackend):
    """An FFN that lives in another process."""

    name = "pipe"

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def forward(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        try:
            self.pipe.send((layer, x.numpy()))
            return torch.from_numpy(self.pipe.recv())
        except (EOFError, OSError) as error:
            raise lk.RemoteError(f"FFN process is gone: {error!r}") from error


@pytest.mark.parametrize("spec", ["standard", "markov-rs", "no-cache"])
def test_an_ffn_outside_the_process(spec: str) -> None:
    family = "gemma3"
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(family, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        model = tiny(family)
        ids = tiny_models.sample_ids(12, model.config.vocab)
        remote, local = lk.build_engine(spec, model, ffn=PipeFfn(ours)), lk.build_engine(spec, model)
        assert torch.equal(remote.prefill(ids), local.prefill(ids))
        assert torch.equal(remote.decode_step(5), local.decode_step(5))
        held = remote.tokens
        process.kill()
        process.join()
        with pytest.raises(lk.BackendFailure) as caught:
            remote.decode_step(6)
        assert isinstance(caught.value.__cause__, lk.RemoteError)
        assert remote.tokens == held
        # Nothing is lost: with a working FFN that computes the same, the sequence goes on.
        with (
            pytest.raises(lk.InvariantViolation) if spec != "no-cache" else _nothing(),
            remote.using(lk.DenseFfn(model)),
        ):
            remote.decode_step(6)
    finally:
        process.kill()


def _nothing():
    import contextlib

    return contextlib.nullcontext()
