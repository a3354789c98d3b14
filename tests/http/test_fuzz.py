"""
Requests that schemathesis makes from our own document, good ones and bad ones, against a live gateway.

No answer may be a fault of ours, none may break the document, what is bad must be refused, and what is good must be
accepted, unless the model is the reason.  `make fuzz` asks 5,000 times; here it is a few seconds' worth.
"""

import copy
import os
import re
from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.core.transport import Response
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cache.accounts import Limits
from tests.http.asking import Pair
from tests.http.conftest import Custom
from tests.http.guard import Guard, bearer

CASES = int(os.environ.get("PELLUCID_FUZZ_CASES", "120"))
SEED = int(os.environ.get("PELLUCID_FUZZ_SEED", "1"))
CONFORMANCE = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
THE_MODEL_SAYS = re.compile(
    r"outside the vocabulary|is empty|empty prompt|The chat template|maximum context length|times choices"
)
LARGE = 2**31 - 1
SMALL = 300
"""Within the vocabulary and the context of the model in these tests."""

Seen = Counter[tuple[str, str, int]]
Operation = APIOperation[Any, Any, Any, Any]
AnyCase = Case[Any]


def narrowed(document: Any) -> Any:
    """The document for this model: numbers of tokens and their ids are small, so that good requests get further."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    for name in schemas:
        if name.endswith("Request"):
            schemas[name] = _narrowed(schemas[name])
    return document


def _narrowed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: SMALL if (name, one) == ("maximum", LARGE) else _narrowed(one) for name, one in value.items()}
    return [_narrowed(one) for one in value] if isinstance(value, list) else value


class Fuzzer:
    """Asks one server."""

    def __init__(self, url: str, document: Any, *, headers: dict[str, str], also: frozenset[int] = frozenset()) -> None:
        """Statuses of `also` are no faults."""
        self.seen: Seen = Counter()
        self._url, self._document, self._headers, self._also = url, document, headers, also

    def ask(self, cases: int) -> Seen:
        """About so many times.  What was seen, by operation, mode and status."""
        self._ask_all("good", GenerationMode.POSITIVE, self._document, cases // 3)
        self._ask_all("good, small", GenerationMode.POSITIVE, narrowed(self._document), cases // 3)
        self._ask_all("bad", GenerationMode.NEGATIVE, self._document, cases // 3)
        return self.seen

    def _ask_all(self, mode: str, generation: GenerationMode, document: Any, cases: int) -> None:
        results = list(schemathesis.openapi.from_dict(document).get_all_operations())
        found = [result.ok() for result in results if isinstance(result, Ok)]
        assert len(found) == len(results)
        found = [one for one in found if one.path != "/debug/live"]  # a stream without an end
        if generation == GenerationMode.NEGATIVE:
            found = [one for one in found if one.body]  # nothing else can be bad
        weights = [8 if operation.body else 2 if operation.path_parameters else 0 for operation in found]
        for operation, weight in zip(found, weights, strict=True):
            self._ask_one(operation, mode, generation, max(1, cases * weight // sum(weights)))

    def _ask_one(self, operation: Operation, mode: str, generation: GenerationMode, cases: int) -> None:
        phases = (Phase.generate, Phase.shrink)
        quiet = list(HealthCheck)
        session = requests.Session()

        @seed(SEED)
        @settings(max_examples=cases, deadline=None, database=None, phases=phases, suppress_health_check=quiet)
        @given(operation.as_strategy(generation_mode=generation))
        def ask(case: AnyCase) -> None:
            answer = case.call(base_url=self._url, session=session, headers=self._headers)
            self.seen[operation.label, mode, answer.status_code] += 1
            check(case, answer, mode, self._also)

        with session:
            ask()


def check(case: AnyCase, answer: Response, mode: str, also: frozenset[int]) -> None:
    """Raises AssertionError, or schemathesis's failures."""
    assert answer.status_code < 500, answer.text
    assert "traceback" not in answer.text.lower()
    if answer.status_code in also:
        case.validate_response(answer, checks=CONFORMANCE)
        return
    if mode != "bad" and answer.status_code == 400:
        assert THE_MODEL_SAYS.search(answer.json()["error"]["message"]), answer.text
    elif mode != "bad":
        assert answer.status_code in (200, 201) or (answer.status_code == 404 and case.path_parameters), answer.text
    case.validate_response(answer, checks=[*CONFORMANCE, negative_data_rejection])


def show(seen: Seen) -> None:
    """The table, for those who run it by hand."""
    for (label, mode, status), count in sorted(seen.items()):
        print(f"{label:34} {mode:12} {status} {count:6}")
    print(f"{sum(seen.values())} requests, seed {SEED}")


@pytest.mark.timeout(900)
def test_without_keys(fake: Pair) -> None:
    gateway, _ = fake
    seen = Fuzzer(gateway.url, gateway.client.get("/openapi.json").json(), headers={}).ask(CASES)
    show(seen)
    statuses = {(mode, status) for (_, mode, status), _ in seen.items()}
    assert {("good", 200), ("good, small", 200), ("bad", 400)} <= statuses
    assert sum(seen.values()) > CASES / 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", ["good", "limited", "none"])
def test_with_keys(guard: Guard, custom: Custom, key: str) -> None:
    gateway, _ = custom(**guard.options)
    document = gateway.client.get("/openapi.json").json()
    limits = Limits(requests_per_minute=3, tokens_per_minute=2000) if key == "limited" else Limits()
    headers = bearer(guard.create(limits=limits).key)
    expected = {"good": 200, "limited": 429, "none": 401}[key]
    also = frozenset({expected})
    seen = Fuzzer(gateway.url, document, headers={} if key == "none" else headers, also=also).ask(CASES // 4)
    show(seen)
    assert expected in {status for _, _, status in seen}
