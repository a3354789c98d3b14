"""
What holds for every trace: one whole tree, whose children touch and sum.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from telemetry.spans import SPANS_MAX, Link, SpanData
from tests.contract.telemetry.otlp_sink import attributes


class Piece(NamedTuple):
    """One span, wherever it was found."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_server: bool
    started_ns: int
    ended_ns: int
    attributes: Mapping[str, object]
    links: tuple[Link, ...]


def sent(span: SpanData) -> Piece:
    """As it was made."""
    return Piece(
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.is_server,
        span.started_ns,
        span.ended_ns,
        span.attributes,
        span.links,
    )


def received(span: Span) -> Piece:
    """As it has come."""
    return Piece(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind == Span.SPAN_KIND_SERVER,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        attributes(span.attributes),
        tuple(Link(link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def roots(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """The roots of requests by request id, after all trees have been checked."""
    trees: dict[str, list[Piece]] = defaultdict(list)
    children = {piece.span_id: piece for piece in pieces}
    for piece in children.values():
        top = piece
        while top.parent_id in children:
            top = children[top.parent_id]
        trees[top.span_id].append(piece)
    found: dict[str, Piece] = {}
    for tree in trees.values():
        root = check_tree(tree)
        if root.is_server:
            request_id = str(root.attributes["pellucid.request_id"])
            assert request_id not in found, "a request has one root"
            found[request_id] = root
    return found


def check_tree(tree: Sequence[Piece]) -> Piece:
    """One root, no more than SPANS_MAX spans, and children that touch and sum to their parent.  The root."""
    ids = {piece.span_id for piece in tree}
    [root] = [piece for piece in tree if piece.parent_id not in ids]
    assert len(ids) == len(tree) <= SPANS_MAX
    assert {piece.trace_id for piece in tree} == {root.trace_id}
    assert [piece.name for piece in tree if piece.is_server] == ([root.name] if root.is_server else [])
    assert root.is_server != (root.name == "engine step")
    assert "pellucid.sampled_because" in root.attributes
    for parent in tree:
        children = sorted(
            (piece for piece in tree if piece.parent_id == parent.span_id), key=lambda one: one.started_ns
        )
        at_ns = parent.started_ns
        for child in children:
            assert child.started_ns == at_ns, f"{child.name} does not touch what comes before it"
            assert child.ended_ns > child.started_ns or len(children) == 1
            at_ns = child.ended_ns
        assert not children or at_ns == parent.ended_ns, f"the children of {parent.name} do not sum to it"
    return root
