"""
`python -m gateway.rendering FD CPU_S`: the chat template in a process of its own, with bounds on its time and memory.

A template comes with a model and is not trusted, and what it does with a conversation may be quadratic in it.  Nothing
inside of a process bounds that: `10 ** 10 ** 8` is one instruction.  So the kernel does, and what happens to this
process happens to nobody else.  It has no secrets in its environment, and writes no files.

It is started by gateway.renderer, with which it shares a socket; when that is gone, so is this.
"""

import resource
import signal
import socket
import sys
from collections.abc import Iterator

import jinja2
import msgspec

from gateway.template import ChatTemplate, TemplateError
from gateway.wire import ChatMessage

MEMORY_BYTES_MAX = 1 << 30
FILES_MAX = 16
FRAME_BYTES_MAX = 256 * 1024 * 1024
LENGTH_BYTES = 4
EXIT_MEMORY = 3


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The first message."""

    source: str
    special_tokens: dict[str, str]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation."""

    messages: list[ChatMessage]
    add_generation_prompt: bool
    extra: dict[str, object]


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to each message."""

    prompt: str = ""
    error: str = ""
    """Words for the client, or for the operator where there is no template."""


def main(descriptor: int, cpu_s: float) -> None:
    """
    Answer until nobody asks.

    Each answer may take `cpu_s` of the processor's time: on a busy machine a good template must not fail.
    """
    with socket.socket(fileno=descriptor) as link:
        bound()
        template: ChatTemplate | None = None
        for frame in read_frames(link):
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            try:
                if template is None:
                    setup = msgspec.msgpack.decode(frame, type=Setup)
                    template = ChatTemplate(setup.source, setup.special_tokens)
                    done = Done()
                else:
                    done = render(template, msgspec.msgpack.decode(frame, type=Job))
                data = framed(msgspec.msgpack.encode(done))
            except (jinja2.TemplateError, TemplateError) as error:
                data = framed(msgspec.msgpack.encode(Done(error=str(error))))
            except MemoryError:
                sys.exit(EXIT_MEMORY)
            signal.setitimer(signal.ITIMER_PROF, 0)
            link.sendall(data)


def render(template: ChatTemplate, job: Job) -> Done:
    """Raises TemplateError."""
    return Done(prompt=template.render(job.messages, add_generation_prompt=job.add_generation_prompt, extra=job.extra))


def bound() -> None:
    """No more than it needs.  At the end of its time the kernel ends it, whatever it is doing."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES_MAX,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: FILES_MAX,
    }
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def framed(data: bytes) -> bytes:
    """With its length in front."""
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frames(link: socket.socket) -> Iterator[bytes]:
    """What the other side sends, until it is gone."""
    with link.makefile("rb") as stream:
        while len(head := stream.read(LENGTH_BYTES)) == LENGTH_BYTES:
            yield stream.read(int.from_bytes(head, "big"))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
