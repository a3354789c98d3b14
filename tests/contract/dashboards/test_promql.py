"""Expressions are held against the catalogue: what it does not have is an error, whoever wrote the string."""

import pytest

from dashboards.promql import PromqlError, Scope, check, labels_of, share
from telemetry.catalogue import CATALOGUE
from telemetry.vocabulary import ROUTES

FIVE = Scope("5m", 'instance=~"$instance"', kept=("job",))
STATES = "pellucid_request_state_seconds_total"
FIRST = "pellucid_request_time_to_first_token_seconds"


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_every_row_of_the_catalogue_can_be_asked_for(metric: object) -> None:
    name, kind, labels = (getattr(metric, field) for field in ("name", "kind", "labels"))
    expression = FIVE.quantile(0.5, name, *labels) if kind == "histogram" else FIVE.rate(name, *labels)
    assert check(expression) == {name}
    assert labels_of(expression) == {"job", *labels}


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("pellucid_requests", "no metric of the catalogue has the series pellucid_requests"),
        ("sum(rate(pelucid_requests_total[5m]))", "pelucid_requests_total"),
        ("rate(pellucid_requests_total_count[5m])", "pellucid_requests_total_count"),
        (f"rate({FIRST}[5m])", f"has the series {FIRST}"),
        (f'rate({STATES}{{stage="decode"}}[5m])', "has no label stage"),
        (f'rate({STATES}{{state="decoding"}}[5m])', "state='decoding' is no value"),
        (f'rate({STATES}{{state=~"decode|prefil"}}[5m])', "state='prefil' is no value"),
        (f'rate({STATES}{{state!="decoding"}}[5m])', "state='decoding' is no value"),
        (f'rate({FIRST}_bucket{{le="2"}}[5m])', "le='2' is no value"),
        (f'rate({FIRST}_bucket{{le="1.9"}}[5m])', "le='1.9' is no value"),
        (
            'rate(pellucid_requests_total{route=~"/metrics|/v1/models/{name}"}[5m])',
            "route='/v1/models/{name}' is no value",
        ),
        (f"sum by (tenant) (rate({STATES}[5m]))", "nothing has the label tenant"),
        (f"{STATES} / ignoring (stat) group_left () pellucid_engine_up", "nothing has the label stat"),
        ("pellucid:slo_burn:rate5m", "pellucid:slo_burn:rate5m"),
        (f"rate({STATES}{{state~'decode'}}[5m])", "is no selector"),
        ("up + upp", "upp"),
    ],
)
def test_what_the_catalogue_does_not_have_is_refused(expression: str, words: str) -> None:
    with pytest.raises(PromqlError) as refused:
        check(expression, {"pellucid:slo_burn:rate1h": ("slo",)})
    assert words in str(refused.value)


def test_recorded_series_have_the_labels_of_their_rules() -> None:
    recorded = {"a:b:c": ("slo",)}
    assert check('max by (slo, job) (a:b:c{slo="errors"}) > 1 and up == 0', recorded) == frozenset()
    with pytest.raises(PromqlError, match="no label replica"):
        check('a:b:c{replica="0"}', recorded)


def test_a_value_may_have_braces() -> None:
    assert check(FIVE.rate("pellucid_requests_total", route=ROUTES)) == {"pellucid_requests_total"}


def test_what_the_helpers_build() -> None:
    assert FIVE.rate(STATES, "state", state=("decode", "prefill")) == (
        f'sum by (job, state) (rate({STATES}{{instance=~"$instance", state=~"decode|prefill"}}[5m]))'
    )
    plain = Scope("1h")
    assert plain.rate(STATES, state="!decode") == f'sum(rate({STATES}{{state!="decode"}}[1h]))'
    assert plain.now("pellucid_engine_up", "replica", how="min") == "min by (replica) (pellucid_engine_up)"
    assert plain.within(FIRST, 2.0) == f'sum(rate({FIRST}_bucket{{le="2.0"}}[1h])) / (sum(rate({FIRST}_count[1h])) > 0)'
    assert share("a", "b", each="state") == "a / ignoring (state) group_left () (b > 0)"
