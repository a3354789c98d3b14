"""
`pellucid serve`: check what can be checked before anything is started, then start it and say how to use it.

The order of the checks is by cost: an address that may not be used is refused before a model is fetched for it.
"""

import asyncio
import importlib.util
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cache.errors import Misconfigured
from engine.config import EngineOptions
from gateway.config import REDIS_URL_VARIABLE, GatewayOptions
from gateway.upstream_key import read_key
from launch.address import bound, check_host, reachable
from launch.admin import admin_banner, admin_file, admin_key, admin_listener
from launch.errors import UserError
from launch.fleet import all_engines, all_workers, engine_children, engine_socket, worker_children
from launch.options import RANKS_MAX, REPLICAS_MAX, ServeOptions
from launch.probe import first_look, until_any_exists, until_ready
from launch.run_dir import run_dir
from launch.secret import engine_secret
from launch.sizes import KV_BYTES_MIN, available_bytes, format_bytes
from launch.store import FLIGHT, Model, Store, data_dir
from launch.supervise import ChildSpec, Say, Supervisor
from launch.valkey import embedded_valkey, pepper_file

PACKED = "packed"  # in the data directory: weights in the order in which the native kernels read them


def serve(options: ServeOptions, environ: dict[str, str], out: Callable[[str], None]) -> int:
    """Serve until a signal; the exit code.  `out` gets what the person asked for.  Raises UserError."""
    started_s = time.monotonic()
    say = speaker(options.log_format)
    refuse_optimized()
    check_host(options.host, allowed=lambda: options.insecure_open or keys_exist(options, environ))
    check_ranks(options)
    secret = check_engines(options, environ)
    check_upstream_keys(options, environ)
    with ExitStack() as listeners:
        listener = listeners.enter_context(bound(options.host, options.port, "--port (make serve PORT=...)"))
        admin = listeners.enter_context(admin_listener(options, listener.getsockname()[1]))
        data = data_dir(options.data_dir, environ)
        secrets = secret | admin_key(options, data, environ)
        has_engines = bool(options.replicas or options.engine)  # else upstreams serve all models
        model, draft = models_of(options, data) if has_engines else (None, None)
        kv_bytes = check_memory(options, model, draft, replicas=options.replicas) if model is not None else 0
        with run_dir(data) as folder:
            engines = []
            if model is not None:
                engines = all_engines(engine_options(options, model, data, kv_bytes, draft), options, folder)
            redis_url, companions = key_server(options, data, folder)
            addresses = (*(engine.listen for engine in engines), *options.engine)
            gateway = gateway_options(options, model, listener, addresses, data, admin)
            supervisor = Supervisor(
                engines=engine_children(engines),
                gateways=worker_children(all_workers(gateway, options, folder)),
                companions=companions,
                environ=child_environ(environ) | secrets | {REDIS_URL_VARIABLE: redis_url},  # it may hold a password
                say=say,
                on_drained=listeners.close,  # nobody takes what comes now
            )
            memory = f", with {format_bytes(kv_bytes)} for keys and values" if engines else ""
            named = gateway.model_name or options.upstreams[0].model
            out(f"Starting {named}{f' from {model.path}' if model is not None else ', behind upstreams'}{memory}.")

            async def listening() -> None:
                if engines and not options.engine:  # else one may be there already
                    await until_any_exists([engine_socket(folder, engine.replica) for engine in engines], say)

            async def ready() -> None:
                host = reachable(options.host)
                await until_ready(host, gateway.port, say)
                start_s = time.monotonic() - started_s
                serving, cold, keys = await first_look(host, gateway.port)
                few = missing(serving, len(addresses))
                out(banner(named, host, gateway.port, start_s, cold, few, keys=keys))
                if admin is not None:
                    out(admin_banner(options, admin_file(options, data, environ)))

            return asyncio.run(supervisor.run(listening, ready))


def speaker(log_format: str) -> Say:
    """What the launcher has to say, in the format of the logs around it."""

    def say(message: str) -> None:
        line = f"pellucid: {message}"
        if log_format == "json":
            line = json.dumps({"event": message, "level": "info", "logger": "pellucid"})
        print(line, file=sys.stderr, flush=True)

    return say


def refuse_optimized() -> None:
    """Asserts guard our own bugs and stay on in production.  Raises UserError under `python -O`."""
    if sys.flags.optimize:
        raise UserError("refusing to run under python -O (or PYTHONOPTIMIZE): it takes the assertions out")


def key_server(options: ServeOptions, data: Path, folder: Path) -> tuple[str, list[ChildSpec]]:
    """The URL of the server for keys and limits, and what must run for it.  Raises UserError."""
    if options.redis_url:
        return options.redis_url, []
    url, child = embedded_valkey(data, folder)
    return url, [child]


def keys_exist(options: ServeOptions, environ: dict[str, str]) -> bool:
    """Whether requests will need a key.  Raises UserError where nobody can say."""
    from launch.keystore import any_keys  # noqa: PLC0415 - it is seldom needed

    return any_keys(options, environ)


def check_engines(options: ServeOptions, environ: dict[str, str]) -> dict[str, str]:
    """That there are any, and not too many; what the processes' environment must have for them.  Raises UserError."""
    if not options.replicas and not options.engine and not options.upstreams:
        raise UserError(
            "--replicas 0 leaves no engine: name one with --engine, start one here, "
            "or put [[upstream]] tables into the file of --config"
        )
    if options.replicas + len(options.engine) > REPLICAS_MAX:
        raise UserError(f"--replicas and --engine: more than {REPLICAS_MAX} engines are not supported")
    return engine_secret(options, environ) if options.engine else {}


def check_ranks(options: ServeOptions) -> None:
    """That there are engines to have them, and not too many.  Raises UserError; what the model says is the engine's."""
    flags = {"--tensor-parallel": options.tensor_parallel, "--pipeline-parallel": options.pipeline_parallel}
    several = [f"{flag} {count}" for flag, count in flags.items() if count > 1]
    if several and not options.replicas:
        raise UserError(
            f"{several[0]}: --replicas 0 starts no engine here; say it to `pellucid engine` on the other machine"
        )
    if options.ranks > RANKS_MAX:
        raise UserError(f"{' and '.join(several)} are {options.ranks} ranks: more than {RANKS_MAX} are not supported")


def models_of(options: ServeOptions, data: Path) -> tuple[Model, Model | None]:
    """The model, and the one that guesses for it; they are fetched if need be.  Raises UserError."""
    check_draft_model(options)
    store = Store(data)
    return store.pull(options.model), store.pull(options.draft_model) if options.draft_model else None


def check_draft_model(options: ServeOptions) -> None:
    """A draft model guesses ahead, so that must not be turned off.  Raises UserError."""
    if options.draft_model and not options.speculative:
        raise UserError("--draft-model guesses ahead, and --speculative off forbids it: leave one of them out")


def check_upstream_keys(options: ServeOptions, environ: dict[str, str]) -> None:
    """That the keys are where the file says; the gateway reads them.  Raises UserError."""
    for upstream in options.upstreams:
        try:
            read_key(upstream, environ)
        except Misconfigured as error:
            raise UserError(str(error)) from error


def check_memory(options: ServeOptions, model: Model, draft: Model | None = None, *, replicas: int = 1) -> int:
    """
    Bytes for the KV pools of all replicas.  Raises UserError if they cannot be had.

    The weights take at least the size of their file, in each replica, whose ranks share them; the engine, which knows
    in what precision it will hold them, looks again.
    """
    available = available_bytes()
    if available is None:  # no way to tell on this system: a share of it means nothing
        if not options.kv_memory.size_bytes:
            raise UserError(
                "--kv-memory: this system does not say how much memory is available; give a size, not a share"
            )
        return options.kv_memory.size_bytes
    kv_bytes = options.kv_memory.resolve_bytes(available)
    if kv_bytes < KV_BYTES_MIN * replicas:
        raise UserError(
            f"--kv-memory: {format_bytes(kv_bytes)} for {replicas} replicas is less than "
            f"{format_bytes(KV_BYTES_MIN)} for each"
        )
    weights_bytes = replicas * (model.size_bytes + (draft.size_bytes if draft is not None else 0))
    if replicas and kv_bytes + weights_bytes > available:
        several = f" of {replicas} replicas" if replicas > 1 else ""
        raise UserError(
            f"too little memory: {format_bytes(kv_bytes)} for keys and values and at least "
            f"{format_bytes(weights_bytes)} for the weights{several}, but {format_bytes(available)} are available; "
            f"lower --kv-memory{' or --replicas' if several else ''}"
        )
    return kv_bytes


def child_environ(environ: dict[str, str]) -> dict[str, str]:
    """The environment of the children: ours, and the way to our packages from wherever the person stands."""
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return environ | {"PYTHONPATH": os.pathsep.join(paths)}


def engine_options(
    options: ServeOptions, model: Model, data: Path, kv_bytes: int, draft: Model | None = None
) -> EngineOptions:
    """What an engine is told that is the only one, with the data directory; where it listens comes later."""
    return EngineOptions(
        model=str(model.path),
        model_name=options.model_name or model.name,
        listen="",
        dtype=options.dtype,
        quantization=options.quantization,
        kv_dtype=options.kv_dtype,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        rank_timeout_s=options.rank_timeout_s,
        interconnect=options.interconnect,
        packed_directory=str(data / PACKED),
        threads=options.threads,
        context_max=options.max_context,
        kv_memory_bytes=kv_bytes,
        sequences_max=options.max_batch,
        tokens_step_max=options.max_step_tokens,
        waiting_max=options.max_queue,
        prefix_cache=options.prefix_cache,
        drafts_max=options.speculative,
        draft_model=str(draft.path) if draft is not None else "",
        flight_directory=str(data / FLIGHT) if options.flight_memory else "",
        flight_memory_bytes=options.flight_memory,
        log_level=options.log_level,
        log_format=options.log_format,
    )


def gateway_options(
    options: ServeOptions,
    model: Model | None,
    listener: socket.socket,
    engines: tuple[str, ...],
    data: Path,
    admin: socket.socket | None = None,
) -> GatewayOptions:
    """What a gateway is told that is the only one, with the data directory."""
    return GatewayOptions(
        model=str(model.path) if model is not None else "",
        model_name=(options.model_name or model.name) if model is not None else "",
        engines=engines,
        upstreams=options.upstreams,
        routing=options.routing,
        pepper_file=str(pepper_file(options, data)),
        redis_named=bool(options.redis_url),
        price_prompt_micros=options.price_prompt,
        price_output_micros=options.price_output,
        host=options.host,
        port=listener.getsockname()[1],
        listener=listener.fileno(),
        admin_port=options.admin_port,
        admin_host=options.admin_host,
        admin_listener=admin.fileno() if admin is not None else -1,
        otlp_endpoint=options.otlp_endpoint,
        otlp_metrics=options.otlp_metrics,
        export_trace=str(Path(options.export_trace).expanduser().absolute()) if options.export_trace else "",
        trace_sample=options.trace_sample,
        cors_origins=options.cors_origin,
        body_bytes_max=options.max_body,
        request_timeout_s=options.request_timeout,
        resume_deadline_s=options.resume_deadline_s,
        drain_s=options.drain,
        flight_directory=str(data / FLIGHT) if options.flight_memory else "",
        flight_memory_bytes=options.flight_memory,
        log_level=options.log_level,
        log_format=options.log_format,
    )


def missing(serving: int, replicas: int) -> str:
    """What the banner says while not all of them serve."""
    left = replicas - serving
    return f"  So far by {serving} of {replicas} engine replicas." if left > 0 else ""


def banner(
    model_name: str, host: str, port: int, start_s: float, cold: str = "", missing: str = "", *, keys: bool = False
) -> str:
    """What the person sees when it is ready: two lines that work (of `keys`, with one put in), and where to look."""
    base = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    key, how = ("KEY", "Try it, with an API key for KEY") if keys else ("none", "Try it")
    headers = "-H 'authorization: Bearer KEY' " * keys + "-H 'content-type: application/json'"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model_name, "messages": messages, "temperature": 0, "max_tokens": 40}
    curl = f"curl {base}/v1/chat/completions {headers} -d {shlex.quote(json.dumps(body))}"
    call = ", ".join(f"{name}={json.dumps(value)}" for name, value in body.items())  # also Python: nothing is null here
    program = (
        f'from openai import OpenAI; client = OpenAI(base_url="{base}/v1", api_key="{key}"); '
        f"print(client.chat.completions.create({call}).choices[0].message.content)"
    )
    here = importlib.util.find_spec("openai") is not None
    python = shlex.quote(sys.executable) if here else "python3"
    hint = "" if here else "   # needs: pip install openai"
    started = f"{start_s:.1f} s after the start" + (f" ({cold})" if cold else "")
    return (
        f"\n{model_name} is served at {base}/v1, {started}.{missing}  {how}:\n\n"
        f"{curl}\n\n"
        f"{python} -c {shlex.quote(program)}{hint}\n\n"
        f"What is happening now: {base}/\n"
        f"Where the time of each request went: {base}/debug/requests\n"
    )
