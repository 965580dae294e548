"""The bridge to host memory: every row comes home once, the newest wins, nothing is lost on the way."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from larql_kv.state.bridge import CaptureMask, HostBridge, crosses_to_host
from larql_kv.state.ledger import Ledger
from larql_kv.state.pages import PagedRows
from larql_kv.state.transit import PlainLane, Transit
from tests.lanes import LateLane

HIDDEN, KV = 3, 2
RINGS = (None, 5, 70)
_LAYERS = [SimpleNamespace(window=ring) for ring in RINGS]
MODEL: Any = SimpleNamespace(
    config=SimpleNamespace(hidden=HIDDEN, kv_dim=KV, layers=_LAYERS, layer_count=len(RINGS)),
    decoder=SimpleNamespace(),
    kv_dtype=torch.bfloat16,
    device=torch.device("cpu"),
)


def _bridge(mask: str = "full", slots: int = 6, lane: Any = None, home: bool = False) -> HostBridge:
    pages = [PagedRows(lambda rows: torch.zeros(rows, HIDDEN, dtype=torch.bfloat16), ring) for ring in RINGS]
    lane = LateLane() if lane is None else lane
    return HostBridge(MODEL, CaptureMask(mask), pages if home else None, slots, lane)


def _values(layer: int, first: int, count: int, salt: int, width: int) -> torch.Tensor:
    """Small integers, exact in bfloat16, that tell row, layer and writing apart."""
    position = torch.arange(first, first + count)[:, None]
    return ((position * 7 + layer * 31 + salt * 13 + torch.arange(width) * 3) % 251).float()


def _run(bridge: HostBridge, first: int, count: int, salt: int = 0) -> None:
    """A chunk of the forward pass, whose own tensors are overwritten as soon as each call returns."""
    device = bridge.staging.device
    bridge.begin(first, count)
    for layer in range(len(RINGS)):
        rows = _values(layer, first, count, salt, HIDDEN).to(device)
        bridge.take_rows(layer, rows)
        rows.fill_(-1)
        k, v = (_values(layer, first, count, salt + more, KV).to(device) for more in (1, 2))
        k, v = k.view(count, 1, KV), v.view(count, 1, KV)
        bridge.take_kv(layer, k, v)
        k.fill_(-1)
        v.fill_(-1)
    bridge.commit()


def _holds(bridge: HostBridge, salts: list[int], newest: int | None = None) -> None:
    """`salts[p]` is what position p was written with last; a ring holds what `newest` rows left of it."""
    bridge.drain()
    length = len(salts)
    newest = length if newest is None else newest
    for layer, ring in enumerate(RINGS):
        for position in range(0 if ring is None else max(0, newest - ring), length):
            (row,) = bridge.rows[layer].read(position, position + 1).float()
            assert torch.equal(row, _values(layer, position, 1, salts[position], HIDDEN)[0]), position
            if bridge.full:
                (both,) = bridge.kv[layer].read(position, position + 1).float()
                k, v = (_values(layer, position, 1, salts[position] + more, KV)[0] for more in (1, 2))
                assert torch.equal(both, torch.cat((k, v))), position


@pytest.mark.parametrize("mask", ["full", "h_only"])
@given(
    actions=st.lists(
        st.one_of(st.integers(1, 3), st.integers(1, 150), st.sampled_from(["back", "reset", "drop", "fork"])),
        min_size=1,
        max_size=14,
    ),
    patience=st.integers(-1, 3),
    slots=st.sampled_from([2, 3, 6, 9, 40]),
)
@settings(max_examples=80, deadline=None)
@example(actions=[1, 1, 20, 1, 1, 20], patience=-1, slots=40)
def test_every_row_comes_home(mask: str, actions: list[int | str], patience: int, slots: int) -> None:
    bridge = _bridge(mask, slots, PlainLane() if patience < 0 else LateLane(patience))
    salts: list[int] = []
    newest = 0  # one past the last row written: a ring that wrapped goes back one row, not two
    parked: list[tuple[HostBridge, list[int], int]] = []
    for number, action in enumerate(actions):
        if isinstance(action, int):
            _run(bridge, len(salts), action, number)
            salts += [number] * action
            newest = len(salts)
        elif action == "fork":
            bridge.drain()
            parked.append((bridge, list(salts), newest))
            bridge = bridge.fork(None)
        else:
            wrapped = newest > min(ring for ring in RINGS if ring is not None)
            can_go_back = action == "back" and (not wrapped or len(salts) == newest)
            salts = salts[:-1] if can_go_back else []
            newest = newest if can_go_back and wrapped else len(salts)
            if action == "drop":
                before = Ledger(bridge.entries(0)).total(role="derivative", capacity=True)
                assert bridge.drop() >= before
            bridge.trim(len(salts))
    for one in ((bridge, salts, newest), *parked):
        _holds(*one)


@pytest.mark.parametrize("slots", [2, 9, 13, 64])
@pytest.mark.parametrize("patience", [0, 1, 2])
def test_many_steps_pass_through_a_small_ring(slots: int, patience: int) -> None:
    bridge = _bridge(slots=slots, lane=LateLane(patience))
    for position in range(140):
        _run(bridge, position, 1, salt=position)
    _holds(bridge, list(range(140)))


def test_what_was_trimmed_does_not_come_home_and_take_memory() -> None:
    bridge = _bridge(slots=20)
    _run(bridge, 0, 3)
    _run(bridge, 3, 1)
    bridge.trim(2)
    bridge.drain()
    assert {pages.block_count for pages in bridge.rows} == {1}
    _run(bridge, 2, 1)
    bridge.trim(0)
    bridge.drain()
    assert {pages.block_count for pages in (*bridge.rows, *bridge.kv)} == {0}


def test_a_row_that_was_taken_back_does_not_come_home_over_the_newer_one() -> None:
    bridge = _bridge()
    _run(bridge, 0, 1)
    _run(bridge, 1, 1)
    bridge.trim(1)
    _run(bridge, 1, 1, salt=9)  # the same half of the staging buffer, the old copy still under way
    _holds(bridge, [0, 9])
    bridge.trim(0)
    _run(bridge, 0, 40, salt=3)
    bridge.trim(39)
    _run(bridge, 39, 1, salt=4)
    _holds(bridge, [3] * 39 + [4])


def test_a_prefill_that_was_cut_comes_home_as_far_as_it_is_wanted() -> None:
    bridge = _bridge()
    _run(bridge, 0, 4)
    bridge.trim(2)
    _run(bridge, 2, 1, salt=5)
    _holds(bridge, [0, 0, 5])


@pytest.mark.parametrize("chunks", [[1] * 5, [7], [30, 1, 1]])
def test_an_interrupted_drain_loses_nothing(chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    bridge, length = _bridge(slots=50), 0
    for count in chunks:
        _run(bridge, length, count)
        length += count
    put, calls = PagedRows.put, 0

    def failing(self: PagedRows, rows: torch.Tensor, first: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 2:
            raise KeyboardInterrupt
        put(self, rows, first)

    with monkeypatch.context() as patch:
        patch.setattr(PagedRows, "put", failing)
        with pytest.raises(KeyboardInterrupt):
            bridge.drain()
    _holds(bridge, [0] * length)


def test_the_host_waits_only_when_the_ring_is_full() -> None:
    lane = LateLane()
    bridge = _bridge(slots=8, lane=lane)
    for position in range(8):
        # A late side stream: the main stream waits for the half that the next step writes, not for more.
        _run(bridge, position, 1)
        assert len(lane.waiting) == min(position + 1, 1)
    lane = LateLane()
    transit = Transit(layers=1, width=2, dtype=torch.float32, device=torch.device("cpu"), slots=4, lane=lane)
    bridge._transit = transit
    lane.hold_main = lambda event: None  # type: ignore[method-assign]
    for position in range(4):
        transit.stage(bridge, position)
    assert len(lane.waiting) == 4
    bridge.receive_steps = lambda first, rows: None  # type: ignore[method-assign]
    transit.stage(bridge, 4)
    assert len(lane.waiting) == 4, "the oldest went home for the new one: the others go on"


def test_a_step_waits_for_its_half_of_the_staging_buffer() -> None:
    """Two forks step to positions of the same parity: the first one's row is not overwritten on its way."""
    left = _bridge(slots=20)
    _run(left, 0, 1)
    left.drain()
    right = left.fork(None)
    _run(left, 1, 1, salt=1)
    _run(right, 1, 1, salt=2)
    _run(left, 2, 1, salt=3)
    _holds(left, [0, 1, 3])
    _holds(right, [0, 2])
    assert left.staging.data_ptr() == right.staging.data_ptr()


def test_forks_share_buffers_and_copies_and_a_dropped_one_receives_nothing() -> None:
    bridge = _bridge(slots=64)
    _run(bridge, 0, 66)
    bridge.drain()
    twin = bridge.fork(None)
    alone, both = Ledger(bridge.entries(66)), Ledger([*bridge.entries(66), *twin.entries(66)])
    tables = 8 * 8 * 2 * len(RINGS)
    assert both.capacity == alone.capacity + tables, "tables are each one's own, everything else is shared"
    _run(twin, 66, 1, salt=5)
    address = bridge.rows[0].block(1).data_ptr()
    del twin
    gc.collect()
    _run(bridge, 66, 1, salt=6)
    _holds(bridge, [0] * 66 + [6])
    assert bridge.rows[0].block(1).data_ptr() == address, "nobody shares the block any more"


def test_rows_that_live_on_the_host_stay_when_copies_are_dropped() -> None:
    bridge = _bridge("full", home=True)
    _run(bridge, 0, 30)
    _run(bridge, 30, 1)
    lines = Ledger(bridge.entries(31))
    assert {item.name for item in lines} == {
        *("capture staging", "capture ring", "K/V rows (host copy)", "block tables")
    }
    assert bridge.drop() > 0
    assert bridge.kv[0].block_count == 0
    bridge.full = False
    _holds(bridge, [0] * 31)
    bridge.full = True
    for layer in range(len(RINGS)):
        k, v = _values(layer, 26, 5, 1, KV), _values(layer, 26, 5, 2, KV)
        bridge.refill(layer, 26, torch.full((5, HIDDEN), -1.0), k.view(5, 1, KV), v.view(5, 1, KV))
    bridge.drain()
    assert torch.equal(bridge.kv[1].read(26, 31)[:, :KV].float(), _values(1, 26, 5, 1, KV)), (
        "the copy is back"
    )
    bridge.full = False
    _holds(bridge, [0] * 31)  # and the rows were not touched


@pytest.mark.parametrize("slots", [2, 5, 64])
def test_rows_go_back_to_the_device_in_pieces(slots: int) -> None:
    bridge = _bridge("h_only", slots, home=True)
    _run(bridge, 0, 200)
    _run(bridge, 200, 1, salt=8)
    got = bridge.upload(0, 3, 201).float()
    assert torch.equal(got, torch.cat((_values(0, 3, 197, 0, HIDDEN), _values(0, 200, 1, 8, HIDDEN))))
    expected = torch.cat((_values(2, 131, 69, 0, HIDDEN), _values(2, 200, 1, 8, HIDDEN)))
    assert torch.equal(bridge.upload(2, 131, 201).float(), expected)
    _run(bridge, 201, 1, salt=9)
    _run(bridge, 202, 1, salt=10)  # still under way when the rows are asked for
    assert torch.equal(bridge.upload(1, 202, 203).float(), _values(1, 202, 1, 10, HIDDEN))
    _holds(bridge, [0] * 200 + [8, 9, 10])


def test_buffers_are_made_when_first_used_and_counted() -> None:
    bridge = _bridge("h_only", slots=4, lane=PlainLane())
    assert {item.name for item in bridge.entries(0)} == {"block tables"}
    _run(bridge, 0, 1)
    bridge.drain()
    sizes = {item.name: item.capacity for item in bridge.entries(1)}
    row = len(RINGS) * HIDDEN * 2
    assert sizes["capture staging"] == 2 * row
    assert sizes["capture ring"] == 4 * row
    assert bridge.staging.shape == (2, len(RINGS), HIDDEN)
    with pytest.raises(ValueError, match="at least 2 slots"):
        _bridge(slots=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("mask", ["full", "h_only"])
@pytest.mark.parametrize("slots", [5, 64])
def test_on_a_card(mask: str, slots: int) -> None:
    card = SimpleNamespace(**{**vars(MODEL), "device": torch.device("cuda")})
    bridge = HostBridge(card, CaptureMask(mask), None, slots)
    salts: list[int] = []
    for number, count in enumerate([300, *[1] * 100, 40, *[1] * 7]):
        if count == 1 and number % 9 == 0:  # taken back while it may still be under way
            bridge.trim(len(salts) - 1)
            salts.pop()
        _run(bridge, len(salts), count, number)
        salts += [number] * count
    _holds(bridge, salts)
    for layer, ring in enumerate(RINGS):
        first = 0 if ring is None else len(salts) - ring
        back = bridge.upload(layer, first, len(salts))
        assert back.device.type == "cuda"
        assert torch.equal(back.cpu(), bridge.rows[layer].read(first, len(salts)))
    assert {item.place for item in bridge.entries(len(salts)) if item.name == "capture staging"} == {"device"}
    assert bridge._transit.ring.is_pinned()


def test_what_crosses_to_the_host() -> None:
    def decoder(device: str, **traits: bool) -> Any:
        return SimpleNamespace(device=torch.device(device), **traits)

    assert not crosses_to_host(decoder("cpu"))
    assert crosses_to_host(decoder("cpu", masked_capture=True))
    assert crosses_to_host(decoder("meta"))
    assert [mask.reach for mask in CaptureMask] == [2, 1, 0]
