"""
The model objects: of the model that is served here, and of those that upstreams serve.
"""

import time
from collections.abc import Mapping

from gateway import errors
from gateway.backend import Backend
from gateway.config import GatewayOptions
from gateway.upstream import Pool
from gateway.wire import Json


class Models:
    """What is served, by name."""

    def __init__(self, options: GatewayOptions, backend: Backend, pools: Mapping[str, Pool]) -> None:
        self._own = options.model_name if options.engines else None
        self._backend = backend
        self._pools = pools
        self._started_s = int(time.time())

    def all(self) -> list[Json]:
        """Ours first."""
        own = [self._own] if self._own is not None else []
        return [self.named(name) for name in (*own, *self._pools)]

    def named(self, name: str) -> dict[str, Json]:
        """The model object.  Raises ApiError: there is none of that name."""
        if name == self._own:
            context_max = min((hello.context_max for hello in self._backend.hellos()), default=None)
            return self._object(name, "pellucid") | {"max_model_len": context_max, "quantization": self._quantization()}
        if name not in self._pools:
            raise errors.model_not_found(name)
        return self._object(name, "upstream") | {"max_model_len": None, "quantization": None}

    def _object(self, name: str, owner: str) -> dict[str, Json]:
        return {"id": name, "object": "model", "created": self._started_s, "owned_by": owner}

    def _quantization(self) -> Json:
        """In which numbers the weights are held; null while no engine has said so."""
        weights = next((hello.weights for hello in self._backend.hellos()), None)
        if weights is None:
            return None
        return {
            "scheme": weights.label,
            "method": weights.method,
            "bits": weights.bits or None,
            "group_size": weights.group_size if weights.group_size > 0 else None,
            "origin": weights.origin,
        }
