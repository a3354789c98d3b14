"""
The application: all parts put together, and taken apart again.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

import msgspec
from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException

from cache.prefix_index import PrefixIndex
from cache.suspects import Suspects
from gateway.admin import AdminApplication
from gateway.admission import Admission
from gateway.backend import Backend
from gateway.config import GatewayOptions
from gateway.errors import ApiError
from gateway.exchange import Exchange
from gateway.front import Front
from gateway.openapi import Schema, document
from gateway.page import load as load_page
from gateway.planning import SEQUENCES_MAX
from gateway.routes import HANDLERS, on_api_error, on_crash, on_http_error, provide_exchange, provide_gateway, routes
from gateway.service import Gateway
from gateway.siblings import Siblings
from gateway.tokens import ModelText
from gateway.upstreams import Upstreams
from telemetry.flight import open_records
from telemetry.hub import Hub


class Application:
    """A gateway that can be served: `front` is the ASGI application."""

    def __init__(self, options: GatewayOptions, text: ModelText | None, hub: Hub | None = None) -> None:
        """
        `text` is None where all models are those of upstreams.

        Raises ExportConfigError where the settings for traces make no sense, Misconfigured those for keys.
        """
        self.options = options
        self.hub = hub or Hub(
            model=options.model_name,
            version=_version(),
            otlp_endpoint=options.otlp_endpoint,
            otlp_metrics=options.otlp_metrics,
            trace_file=options.export_trace,
            trace_sample=options.trace_sample,
            first=options.worker == 0,
            flight=open_records(
                options.flight_directory,
                f"gateway-{options.worker}",
                ring_bytes=options.flight_memory_bytes,
                start=options.start,
            ),
        )
        self.admission = Admission(options)
        store = self.admission.store
        suspects = Suspects(store) if store is not None else None
        self.backend = Backend(options, self.hub, _index(options, self.admission), suspects)
        self.hub.watch_limits(self.admission.view)
        self.siblings = Siblings(options, self.hub)
        self.hub.push_numbers(self.siblings.numbers)
        self.upstreams = Upstreams(options, os.environ)
        self.hub.watch_upstreams(tuple(self.upstreams.pools), self.upstreams.views)
        self.gateway = Gateway(options, text, self.backend, self.hub, self.admission, self.siblings, self.upstreams)
        self._text = text
        litestar = Litestar(
            route_handlers=list(HANDLERS),
            dependencies={
                "gateway": Provide(provide_gateway, sync_to_thread=False),
                "exchange": Provide(provide_exchange, sync_to_thread=False),
            },
            exception_handlers={ApiError: on_api_error, HTTPException: on_http_error, Exception: on_crash},
            lifespan=[self._lifespan],
            state=State(
                {"gateway": self.gateway, "document": msgspec.json.encode(self.document()), "page": load_page()}
            ),
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,  # Exchange.read_body has the limit.
            debug=False,
            signature_types=[Gateway, Exchange],
        )
        self.front = Front(litestar, options, self.hub, self.backend.knows, on_closed=self.gateway.finished)
        self.fronts = [self.front]
        """This one, and that of the admin interface where there is one."""
        if options.admin_port:
            admin = AdminApplication(options, self.hub, self.front.open.__contains__, version=_version())
            self.fronts.append(admin.front)

    def document(self) -> Schema:
        """What the interface is."""
        return document(routes(), self.options, version=_version(), sequences_max=SEQUENCES_MAX)

    @asynccontextmanager
    async def _lifespan(self, _: Litestar) -> AsyncIterator[None]:
        await self.siblings.start()
        await self.hub.start()
        await self.admission.start()
        await self.backend.start()
        await self.upstreams.start()
        try:
            yield
        finally:
            await self.front.drained()
            await self.upstreams.stop()
            await self.backend.stop()
            await self.admission.stop()
            await self.siblings.stop()
            await self.hub.stop()
            if self._text is not None:
                self._text.close()


def _index(options: GatewayOptions, admission: Admission) -> PrefixIndex | None:
    """Beside keys and limits.  None without a server, or with a single engine: there is nothing to choose."""
    several = len(options.engines) > 1
    return PrefixIndex(admission.store) if several and admission.store is not None else None


def _version() -> str:
    try:
        return version("pellucid")
    except PackageNotFoundError:
        return "0"
