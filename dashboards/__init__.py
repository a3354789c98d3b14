"""
What to look at and when to be woken: Grafana dashboards and Prometheus rules, rendered from the metric catalogue.

    telemetry.catalogue -> promql (expressions, each held against it) -> boards, objectives, alerts -> files

Nothing of it is written by hand, or kept: `pellucid dashboards render DIR` writes it anew, so it is of the version that
wrote it.
"""
