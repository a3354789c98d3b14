"""
OpenVINO GenAI behind the few lines of HTTP that tests/bench/peers/client.py speaks; it has no server of its own.

    .peers/openvino/bin/python tests/bench/peers/openvino_front.py --model FILE.gguf --port 8001

Continuous batching as its makers mean it: requests join the running batch between steps, in `step`, on a thread of its
own.  The front costs less than a gateway: the `text` of an event is the token's number, so nothing is detokenized, and
there is no validation, template, limit or account.  What it shows is an upper bound of what a server around it can do.
"""

import argparse
import asyncio
import itertools
import json
import threading
from collections.abc import Mapping

import numpy as np
import openvino
import openvino_genai
from openvino_genai.py_openvino_genai import GenerationHandle as Handle
from openvino_genai.py_openvino_genai import GenerationStatus

Tokens = asyncio.Queue[list[int] | None]
BODY_BYTES_MAX = 8 << 20


class Engine:
    """One pipeline, and the thread that steps it."""

    def __init__(self, model: str, threads: int, cache_gb: int) -> None:
        config = openvino_genai.SchedulerConfig()
        config.cache_size = cache_gb
        config.max_num_seqs = 64
        config.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._arrived: list[tuple[list[int], int, Tokens]] = []
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, daemon=True).start()

    def generate(self, prompt: list[int], tokens_max: int) -> Tokens:
        """The tokens of one greedy request, as they come, then None."""
        tokens: Tokens = asyncio.Queue()
        with self._changed:
            self._arrived.append((prompt, tokens_max, tokens))
            self._changed.notify()
        return tokens

    def _run(self) -> None:
        live: list[tuple[Handle, Tokens]] = []
        while True:
            with self._changed:
                while not self._arrived and not live:
                    self._changed.wait()
                arrived, self._arrived = self._arrived, []
            live += [(self._add(prompt, tokens_max), tokens) for prompt, tokens_max, tokens in arrived]
            self._pipeline.step()
            news: list[tuple[Tokens, list[int] | None]] = []
            for handle, tokens in live:
                if handle.can_read():
                    news += [(tokens, list(output.generated_ids)) for output in handle.read().values()]
            running = GenerationStatus.RUNNING
            ended = [pair for pair in live if pair[0].get_status() != running and not pair[0].can_read()]
            live = [pair for pair in live if pair not in ended]
            news += [(tokens, None) for _, tokens in ended]
            if news:
                self._loop.call_soon_threadsafe(_tell, news)

    def _add(self, prompt: list[int], tokens_max: int) -> Handle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens_max
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(next(self._numbers), ids, config)


def _tell(news: list[tuple[Tokens, list[int] | None]]) -> None:
    for tokens, ids in news:
        tokens.put_nowait(ids)


async def answer(engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers: Mapping[str, str] = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        length = int(headers.get("content-length", "0"))
        if length > BODY_BYTES_MAX:
            writer.write(b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n\r\n")
        elif head[0].startswith("GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        elif head[0].startswith("POST /v1/completions"):
            await _stream(engine, json.loads(await reader.readexactly(length)), writer)
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n")
        await writer.drain()
    finally:
        writer.close()


async def _stream(engine: Engine, request: dict[str, object], writer: asyncio.StreamWriter) -> None:
    prompt, tokens_max = request["prompt"], request["max_tokens"]
    assert isinstance(prompt, list) and isinstance(tokens_max, int), "the client sends no other"
    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n")
    tokens = engine.generate(prompt, tokens_max)
    count = 0
    while (ids := await tokens.get()) is not None:
        count += len(ids)
        choice = {"index": 0, "text": "".join(f" {token}" for token in ids), "finish_reason": None}
        writer.write(b"data: " + json.dumps({"object": "text_completion", "choices": [choice]}).encode() + b"\n\n")
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    writer.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")


async def serve(arguments: argparse.Namespace) -> None:
    """Load, then listen; it runs until it is killed."""
    engine = Engine(arguments.model, arguments.threads, arguments.cache_gb)
    server = await asyncio.start_server(
        lambda reader, writer: answer(engine, reader, writer), "127.0.0.1", arguments.port, limit=1 << 20
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--cache-gb", type=int, default=2)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
