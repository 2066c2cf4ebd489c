"""Sends what `export_otlp` made to a collector, with OpenTelemetry's own exporters (the extra `otlp`)."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags

from flowledger.flow.errors import BadInput
from flowledger.show import export_otlp

SPANS, METRICS = 1_000, 200  # of one message
TIMEOUT_S = 10.0
Sent = TypeVar("Sent", export_otlp.Span, export_otlp.Gauge)
SCOPE = InstrumentationScope("flowledger")


def post(
    endpoint: str, about: Mapping[str, str], traces: Iterable[export_otlp.Span], gauges: Iterable[export_otlp.Gauge]
) -> tuple[int, int]:
    """(spans, numbers) that the collector took. Raises BadInput where it takes none any more.

    Headers and certificates are those of the environment: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE.
    """
    resource, said = Resource(dict(about)), _Said()
    spans = numbers = 0
    logger = logging.getLogger("opentelemetry")
    before, logger.propagate = logger.propagate, False
    logger.addHandler(said)
    to_traces = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=TIMEOUT_S)
    to_metrics = OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=TIMEOUT_S)
    try:
        for some in _batches(traces, SPANS):
            if to_traces.export([_span(one, resource) for one in some]) is not SpanExportResult.SUCCESS:
                raise _refused(endpoint, "traces", said, spans, numbers)
            spans += len(some)
        for several in _batches(gauges, METRICS):
            if to_metrics.export(_metrics(several, resource)) is not MetricExportResult.SUCCESS:
                raise _refused(endpoint, "metrics", said, spans, numbers)
            numbers += sum(len(one.points) for one in several)
    finally:
        to_traces.shutdown()
        to_metrics.shutdown()
        logger.removeHandler(said)
        logger.propagate = before
    return spans, numbers


def _batches(rows: Iterable[Sent], size: int) -> Iterator[list[Sent]]:
    left = iter(rows)
    while batch := list(islice(left, size)):
        yield batch


class _Said(logging.Handler):
    """Keeps the exporters' first complaint, the one with the reason, so that it is told once and in one line."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or " ".join(record.getMessage().split())


def _refused(endpoint: str, what: str, said: _Said, spans: int, numbers: int) -> BadInput:
    before = f" ({spans:,} spans and {numbers:,} numbers were taken before)" if spans or numbers else ""
    return BadInput(
        f"{endpoint}/v1/{what} did not take what was sent{before}: {said.text or 'no answer'}; is a collector listening there?"
    )


def _span(one: export_otlp.Span, resource: Resource) -> Any:
    return ReadableSpan(
        name=one.name, context=_context(one.trace, one.span), parent=_context(one.trace, one.parent) if one.parent else None,
        resource=resource, attributes=dict(one.attributes), start_time=one.start_ns, end_time=one.end_ns,
        links=[Link(_context(trace, span), dict(attributes)) for trace, span, attributes in one.links], instrumentation_scope=SCOPE,
    )  # fmt: skip


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _metrics(gauges: Iterable[export_otlp.Gauge], resource: Resource) -> Any:
    made = [
        Metric(
            one.name,
            one.description,
            one.unit,
            Gauge([NumberDataPoint(dict(told), 0, at, value) for at, value, told in one.points]),
        )
        for one in gauges
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, made, "")], "")])
