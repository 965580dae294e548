"""Prometheus metrics of one application: requests, bytes, and the caches' own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from starlette.types import Scope

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)


class Metrics:
    """Counters in a registry of their own, so that several applications can live in one process."""

    def __init__(self, caches: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "larql_requests", "Requests answered.", ("endpoint", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "larql_request_seconds",
            "Time from a request's head to the end of its answer.",
            ("endpoint",),
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self.bytes = Counter("larql_body_bytes", "Bytes of bodies.", ("direction",), registry=self.registry)
        self.rows = Counter(
            "larql_ffn_rows", "Rows run through a layer's FFN.", ("layer",), registry=self.registry
        )
        self.at_work = Gauge(
            "larql_requests_at_work", "Requests being read, computed or answered.", registry=self.registry
        )
        self.registry.register(_Caches(caches))  # type: ignore[arg-type]

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one request under its route, never under a path that a client made up."""
        endpoint = getattr(scope.get("route"), "path", "none")
        self.requests.labels(endpoint, str(status)).inc()
        self.seconds.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _Caches:
    """Reads the caches' counters when they are asked for."""

    def __init__(self, caches: Callable[[], Mapping[str, Mapping[str, Any]]]) -> None:
        self._caches = caches

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "larql_ffn_cache", "Counters of the activation caches.", labels=["tier", "counter"]
        )
        for tier, counters in self._caches().items():
            for name, value in counters.items():
                if isinstance(value, int | float):
                    family.add_metric([tier, name], float(value))
        yield family
