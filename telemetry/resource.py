"""
Who speaks: the resource of all spans and metrics of one process.
"""

import uuid
from collections.abc import Mapping
from urllib.parse import unquote

from telemetry import names


def resource(version: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The attributes.  OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win: the operator knows better."""
    own = {
        names.SERVICE_NAME: names.SERVICE,
        names.SERVICE_VERSION: version or "unknown",
        names.SERVICE_INSTANCE_ID: str(uuid.uuid4()),
    }
    pairs = (pair.partition("=") for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    named = {key.strip(): unquote(value.strip()) for key, is_pair, value in pairs if is_pair and key.strip()}
    if name := environ.get("OTEL_SERVICE_NAME", "").strip():
        named[names.SERVICE_NAME] = name
    return own | named
