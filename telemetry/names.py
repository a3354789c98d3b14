"""
Names of the OpenTelemetry semantic conventions, as constants of our own.

The GenAI conventions live in open-telemetry/semantic-conventions-genai and are all in development, so the constants
that the Python packages ship are deprecated.  These follow version 0.1.0 of the GenAI conventions and 1.44.0 of the
general ones; a change of either is a change of this file and of its golden test.
"""

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
GEN_AI_VERSION = "0.1.0"
SCOPE = "pellucid"
SERVICE = "pellucid"
"""The instrumentation scope of all that we send."""

PROVIDER = "pellucid"

# General.
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
URL_PATH = "url.path"
SERVICE_NAME = "service.name"
SERVICE_VERSION = "service.version"
SERVICE_INSTANCE_ID = "service.instance.id"

# GenAI: only on the request's own span, because Jaeger makes an unknown GenAI node of any other that carries one.
GEN_AI_OPERATION_NAME = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
GEN_AI_REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
GEN_AI_RESPONSE_ID = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"

REQUEST_PARAMETERS = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    # Without a name in the conventions.
    "min_p": "pellucid.request.min_p",
    "min_tokens": "pellucid.request.min_tokens",
    "repetition_penalty": "pellucid.request.repetition_penalty",
    "logprobs": "pellucid.request.logprobs",
    "ignore_eos": "pellucid.request.ignore_eos",
    "priority": "pellucid.request.priority",
    # What answered it.
    "weights_scheme": "pellucid.quantization.scheme",
    "weights_bits": "pellucid.quantization.bits",
    "weights_group_size": "pellucid.quantization.group_size",
    "weights_origin": "pellucid.model.origin",
}
"""Which parameters of a request become span attributes.  Stop strings do not: they are text of the user's."""

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
"""The operation behind each route that generates."""

OTLP_METRICS = {
    "gen_ai_server_request_duration_seconds": "gen_ai.server.request.duration",
    "gen_ai_server_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "gen_ai_server_time_per_output_token_seconds": "gen_ai.server.time_per_output_token",
}
"""Names that metrics have in OTLP, where those are not the names of `/metrics`."""
OTLP_LABELS = {
    "gen_ai_operation_name": GEN_AI_OPERATION_NAME,
    "gen_ai_provider_name": GEN_AI_PROVIDER_NAME,
    "gen_ai_request_model": GEN_AI_REQUEST_MODEL,
}

# Ours.
REQUEST_ID = "pellucid.request_id"
TENANT = "pellucid.tenant"
OUTCOME = "pellucid.outcome"
SAMPLED_BECAUSE = "pellucid.sampled_because"
"""Why this trace was kept: telemetry.tail, telemetry.step_traces."""
ERROR_CODE = "pellucid.error_code"
UPSTREAM = "pellucid.upstream"
USAGE_ESTIMATED = "pellucid.usage.estimated"
PREEMPTIONS = "pellucid.preemptions"
STEPS = "pellucid.steps"
COMPUTED_TOKENS = "pellucid.tokens.computed"
RECOMPUTED_TOKENS = "pellucid.tokens.recomputed"
DRAFTED_TOKENS = "pellucid.tokens.drafted"
DRAFT_ACCEPTED_TOKENS = "pellucid.tokens.draft_accepted"
DRAFT_REJECTED_TOKENS = "pellucid.tokens.draft_rejected"
KV_BLOCK_SECONDS = "pellucid.kv.block_seconds"
INTERCONNECT_WAIT_NS = "pellucid.interconnect.wait_ns"
INTERCONNECT_TRANSFER_NS = "pellucid.interconnect.transfer_ns"
INTERCONNECT_WAIT_MAX_NS = "pellucid.interconnect.wait_max_ns"
"""In one step."""
KV_UTILIZATION = "pellucid.kv.{when}.utilization"
KV_TOKEN_OCCUPANCY = "pellucid.kv.{when}.token_occupancy"
KV_INTERNAL_FRAGMENTATION = "pellucid.kv.{when}.internal_fragmentation"
"""As the request met the pool: at_admission, worst, at_end."""
ENGINE_NS = "pellucid.engine_ns"
GC_PAUSE_NS = "pellucid.gc_pause_ns"
LOOP_LAG_NS = "pellucid.loop_lag_ns"
STARVED_NS = "pellucid.starved_ns"
UNREAD_NS = "pellucid.unread_ns"
REPEATED_TOKENS = "pellucid.tokens.repeated"
SLOWEST_STEPS = "pellucid.steps.slowest"
"""The slowest that served it, as REPLICA/STEP; slowest first."""
SLOWEST_STEP_NS = "pellucid.steps.slowest_ns"
TOKEN_GAP_MAX_SECONDS = "pellucid.token_gap_max_seconds"
REPLICA = "pellucid.replica"
ROUTING = "pellucid.routing"
PROMISED_TOKENS = "pellucid.tokens.promised"
PHASE = "pellucid.phase"
PHASE_NS = "pellucid.phase.ns"
LAYOUT = "pellucid.phase.layout"
COALESCED = "coalesced"
"""Of a request: all time in a state is laid out as one span, whose length is exact, and its place is not."""

# Of the trace of a step.
ENGINE_STEP = "engine step"
STEP_ID = "pellucid.step.id"
STEP_BEFORE_NS = "pellucid.step.before.{part}_ns"
"""Parts of a step that its spans leave out, because they come before it has anything to do."""
STEP_COUNTS = {
    "tokens": "pellucid.step.tokens",
    "prefill_tokens": "pellucid.step.tokens.prefill",
    "recompute_tokens": "pellucid.step.tokens.recompute",
    "decode_tokens": "pellucid.step.tokens.decode",
    "drafted_tokens": "pellucid.step.tokens.drafted",
    "emitted_tokens": "pellucid.step.tokens.emitted",
    "sequences": "pellucid.step.sequences",
    "running": "pellucid.step.running",
    "waiting": "pellucid.step.waiting",
    "preemptions": "pellucid.step.preemptions",
    "evictions": "pellucid.step.evictions",
    "gc_pause_ns": "pellucid.step.gc_pause_ns",
    "starved_ns": "pellucid.step.starved_ns",
}
"""Fields of a step's record that its root span tells."""
STEP_KV_UTILIZATION = "pellucid.kv.utilization"
STEP_KV_TOKEN_OCCUPANCY = "pellucid.kv.token_occupancy"
STEP_KV_INTERNAL_FRAGMENTATION = "pellucid.kv.internal_fragmentation"
INTERCONNECT_KIND = "pellucid.interconnect.kind"
INTERCONNECT_STRAGGLER = "pellucid.interconnect.straggler"
COMPUTE_NS = "pellucid.compute.{part}_ns"
"""Where `compute` went, on its span."""
