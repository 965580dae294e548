"""The bench's arithmetic, on numbers done by hand."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest

from larql_kv.bench.machine import OtherLoad, cpu_model, git_commit, machine_facts
from larql_kv.bench.stats import (
    Spread,
    fit_line,
    gigabytes_per_second,
    id_hash,
    is_increasing,
    percentile,
    round_robin,
    same_beginning,
)


@pytest.mark.parametrize("count", [1, 2, 7, 100])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99, 1.0])
def test_percentile_is_numpys(count: int, share: float) -> None:
    values = np.random.default_rng(count).random(count).tolist()
    assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_spread_is_in_milliseconds() -> None:
    spread = Spread.of([0.001, 0.002, 0.009])
    assert (spread.mean, spread.p50) == (pytest.approx(4.0), pytest.approx(2.0))
    assert spread.p99 == pytest.approx(8.86)


def test_the_line_through_points_of_a_line_is_that_line() -> None:
    line = fit_line([(x, 5.0 + 0.0083 * x) for x in (128, 512, 2048)])
    assert line is not None
    assert (line.slope, line.intercept) == (pytest.approx(0.0083), pytest.approx(5.0))
    assert line.r2 == pytest.approx(1.0)


def test_the_line_through_scattered_points_is_numpys() -> None:
    random = np.random.default_rng(1)
    x = random.random(20) * 100
    y = 3 * x + random.normal(0, 20, 20)
    line = fit_line(list(zip(x.tolist(), y.tolist(), strict=True)))
    assert line is not None
    assert (line.slope, line.intercept) == pytest.approx(tuple(np.polyfit(x, y, 1)))
    assert line.r2 == pytest.approx(np.corrcoef(x, y)[0, 1] ** 2)


def test_one_length_makes_no_line_and_a_flat_one_has_no_r2() -> None:
    assert fit_line([(128, 1.0), (128, 2.0)]) is None
    assert fit_line([]) is None
    flat = fit_line([(1, 2.0), (2, 2.0)])
    assert flat is not None
    assert (flat.slope, flat.r2) == (0.0, None)


def test_id_hash_is_sha256_of_the_decimal_ids() -> None:
    assert id_hash([1, 20, 3]) == hashlib.sha256(b"1,20,3").hexdigest()[:12]
    assert id_hash([12, 3]) != id_hash([1, 23])


def test_ids_are_compared_as_far_as_both_go() -> None:
    assert same_beginning([1, 2], [1, 2, 3])
    assert not same_beginning([1, 9], [1, 2, 3])


def test_everybody_is_first_once() -> None:
    names = ["a", "b", "c"]
    orders = [round_robin(names, repeat) for repeat in range(3)]
    assert [order[0] for order in orders] == names
    assert all(sorted(order) == names for order in orders)
    assert round_robin([], 4) == []


def test_bytes_moved() -> None:
    assert gigabytes_per_second(90_000_000, 10_000_000.0, 0.01) == pytest.approx(10.0)


def test_is_increasing() -> None:
    assert is_increasing([1, 2, 5])
    assert not is_increasing([1, 1])


def test_machine_facts_name_the_machine() -> None:
    facts = machine_facts()
    assert facts["cpu"] == cpu_model() != ""
    assert facts["cores"] >= 1
    assert facts["torch"].startswith("2.")


def test_no_checkout_is_no_commit(tmp_path) -> None:
    assert git_commit(tmp_path) is None


def test_other_load_is_a_number_of_cores() -> None:
    others = OtherLoad()
    time.sleep(0.05)
    cores = others.cores()
    assert cores is None or cores >= 0
