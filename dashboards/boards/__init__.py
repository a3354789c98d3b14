"""The dashboards, and which metrics are on none of them."""

from dashboards.boards import kv, latency, limits, overview, speculation, steps

BOARDS = (overview.BOARD, latency.BOARD, kv.BOARD, steps.BOARD, limits.BOARD, speculation.BOARD)

NOT_SHOWN = {
    "gen_ai_server_request_duration_seconds": "pellucid_request_duration_seconds, under OpenTelemetry's name",
    "gen_ai_server_time_to_first_token_seconds": "the same for the time to first token",
    "gen_ai_server_time_per_output_token_seconds": "the same for the time per output token",
}
"""Metrics that are on no panel, and why: they are for other people's dashboards."""
