"""
Pellucid and its peers on the same machine, the same model, the same load over HTTP; interleaved rounds, one table.

    make bench-peers ARGS='--rounds 5 --out DIR'      or, with .peers made: python -m tests.bench.peers.compare

Every server is up, one at a time is loaded, in an order that turns with each round.  Prompts are windows of this
repository's documents behind random tokens: every stream and round has others, so no prefix cache helps anybody.  All
run at their defaults but for what `servers.py` gives them.  llama.cpp and OpenVINO read the model's GGUF as
llama-quantize makes it q8_0 and q4_0; OpenVINO has no server of its own: `openvino_front.py`.
"""

import argparse
import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.host import busy_s, commit, host
from launch.known import DEFAULT_MODEL
from launch.store import Store, data_dir
from pellucid import VERSION
from quant.text_files import tokenizing
from tests.bench.machine import Machine
from tests.bench.peers.servers import LLAMA_FLAGS, PELLUCID, ROOT, Running, known, llama, started

CLIENT_S_MAX = 1000
RANDOM_TOKENS = 4  # at the start of each prompt
IDLE_S = 1.0
IDLE_CPU_MAX = 0.03  # of a core
FOREIGN_CPU_MAX = 0.1  # of a core: more, and the sample is called disturbed


@dataclass(frozen=True)
class Load:
    """One row of the table."""

    name: str
    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    figure: str = "output_tokens_per_s"  # of client.Sample

    @property
    def lower_is_better(self) -> bool:
        return self.figure.endswith("_ms")


@dataclass(frozen=True)
class Point:
    """One sample with all that explains it."""

    round: int
    load: str
    server: str
    figure: float
    state_before: str
    state_after: str
    server_cpu: float  # cores
    others_cpu: float  # cores that the idle servers took meanwhile
    foreign_cpu: float  # cores that went to what is no part of this
    sample: dict[str, float]


def loads_of(streams: Sequence[int], prompt_tokens: int, output_tokens: int, long_prompt: int) -> list[Load]:
    """A row for each number of streams, and the long prompt."""
    rows = [
        Load(f"{count} stream{'s' * (count > 1)}, tokens/s", count, max(count, 3), prompt_tokens, output_tokens)
        for count in streams
    ]
    return [*rows, Load(f"first token of {long_prompt:,}, ms", 1, 3, long_prompt, 8, "first_token_ms")]


def prompts_of(text: Sequence[int], load: Load, dice: random.Random) -> list[list[int]]:
    """One prompt for each request: a first token that no other has, some random ones, then a window of the text."""
    prompts = []
    for first in dice.sample(sorted(set(text)), load.requests):
        length = load.prompt_tokens - RANDOM_TOKENS
        start = dice.randrange(len(text) - length)
        noise = [dice.choice(text) for _ in range(RANDOM_TOKENS - 1)]
        prompts.append([first, *noise, *text[start : start + length]])
    return prompts


def run_client(running: Running, prompts: list[list[int]], load: Load) -> dict[str, float]:
    """The client in a process of its own; what it says."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(prompts, file)
        file.flush()
        command = [sys.executable, "-m", "tests.bench.peers.client", "--url", running.url, "--prompts", file.name]
        command += ["--model", running.server.model, "--streams", str(load.streams)]
        command += ["--output-tokens", str(load.output_tokens)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CLIENT_S_MAX, check=False)
    if done.returncode:
        sys.exit(f"{running.server.name}, {load.name}: {done.stderr.strip()}")
    sample: dict[str, float] = json.loads(done.stdout)
    return sample


def measure(
    servers: list[Running], loads: list[Load], text: list[int], machine: Machine, seed: int, rounds: int
) -> list[Point]:
    """All rounds; each sample is told as it comes."""
    points = []
    first = Load("warm-up", max(load.streams for load in loads), max(load.streams for load in loads), 128, 4)
    for running in servers:  # what a server leaves to its first requests is no matter of rates
        run_client(running, prompts_of(text, first, random.Random(f"{seed} warm-up")), first)
    for number in range(rounds):
        turned = servers[number % len(servers) :] + servers[: number % len(servers)]
        for load in loads:
            prompts = prompts_of(text, load, random.Random(f"{seed} {number} {load.name}"))
            for running in turned:
                points.append(point := _point(number, load, running, turned, prompts, machine))
                cpus = (
                    f"server {point.server_cpu:.2f} client {point.sample['client_cpu']:.2f} idle {point.others_cpu:.2f}"
                )
                print(
                    f"round {number + 1}  {load.name:<26}{running.server.name:<24}{point.figure:9.1f}"
                    f"   {point.state_before} -> {point.state_after}   cores: {cpus}",
                    flush=True,
                )
    return points


def _point(
    number: int, load: Load, running: Running, servers: list[Running], prompts: list[list[int]], machine: Machine
) -> Point:
    state = machine.state()
    others = [other for other in servers if other is not running]
    began = time.monotonic()
    spent_before = (running.cpu_s(), sum(other.cpu_s() for other in others), _clients_s(), busy_s())
    sample = run_client(running, prompts, load)
    wall_s = time.monotonic() - began
    spent_after = (running.cpu_s(), sum(other.cpu_s() for other in others), _clients_s(), busy_s())
    mine, theirs, client, busy = (after - before for before, after in zip(spent_before, spent_after, strict=True))
    return Point(
        round=number + 1,
        load=load.name,
        server=running.server.name,
        figure=sample[load.figure],
        state_before=str(state),
        state_after=str(machine.state()),
        server_cpu=mine / sample["wall_s"],
        others_cpu=theirs / wall_s,
        foreign_cpu=max(busy - mine - theirs - client, 0.0) / wall_s,
        sample=sample,
    )


def _clients_s() -> float:
    """Processor seconds of all clients that have ended, their starts included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def ratios(points: list[Point], load: Load, ours: str, peer: str) -> list[float]:
    """How many times better ours is, one for each round: both sides of a ratio are minutes apart at most."""
    by_round = {(point.round, point.server): point.figure for point in points if point.load == load.name}
    rounds = sorted({number for number, server in by_round if server == ours})
    pairs = [(by_round[number, ours], by_round[number, peer]) for number in rounds if (number, peer) in by_round]
    return [theirs / mine if load.lower_is_better else mine / theirs for mine, theirs in pairs]


def table(points: list[Point], loads: list[Load], names: list[str]) -> str:
    """Markdown: medians with the range, and the median of the ratios of each round."""
    peers = [name for name in names if name != PELLUCID] if PELLUCID in names else []
    heads = ["", *names, *(f"against {name}" for name in peers), "states"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for load in loads:
        cells = [load.name]
        for name in names:
            figures = [point.figure for point in points if point.load == load.name and point.server == name]
            cells.append(f"{statistics.median(figures):,.0f} ({min(figures):,.0f}-{max(figures):,.0f})")
        cells += [f"{statistics.median(ratios(points, load, PELLUCID, name)):.2f}x" for name in peers]
        cells.append(_states([point for point in points if point.load == load.name]))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _states(points: list[Point]) -> str:
    seen: dict[str, int] = {}
    for point in points:
        before, after = point.state_before.partition(" (")[0], point.state_after.partition(" (")[0]
        name = before if before == after else "changed"
        seen[name] = seen.get(name, 0) + 1
    if disturbed := sum(point.foreign_cpu > FOREIGN_CPU_MAX for point in points):
        seen[f"of {len(points)} disturbed"] = disturbed
    return ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))


def quantize(peers: Path, model: Path, name: str) -> Path:
    """The model in another form, made once for each state of the original."""
    out = peers / "models" / f"{model.stem}.{name}.gguf"
    if out.exists() and out.stat().st_mtime > model.stat().st_mtime:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    command = [str(peers / "llama.cpp/bin/llama-quantize"), "--allow-requantize", str(model), str(part), name.upper()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CLIENT_S_MAX)
    if done.returncode:
        sys.exit(f"llama-quantize: {done.stderr[-500:]}")
    part.replace(out)
    return out


def documents(model: Path) -> list[int]:
    """The repository's documents as tokens."""
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    text = "\n".join(file.read_text() for file in [*files, *sorted((ROOT / "docs").glob("*.md"))])
    with tokenizing(model) as encode:
        return encode(text)


def versions(peers: Path) -> dict[str, str]:
    """Of everything that takes part."""
    import torch  # takes seconds

    stamp = peers / "llama.stamp"
    code = "from importlib.metadata import version; print(version('openvino-genai'))"
    openvino = subprocess.run(
        [str(peers / "openvino/bin/python"), "-c", code], capture_output=True, text=True, check=False
    )
    return {
        PELLUCID: VERSION,
        "llama.cpp": stamp.read_text().strip() if stamp.exists() else "of unknown origin",
        "OpenVINO GenAI": openvino.stdout.strip(),
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
    }


def warn_about_idle(servers: list[Running]) -> None:
    """Say which server does not rest when nobody asks it anything."""
    before = [running.cpu_s() for running in servers]
    time.sleep(IDLE_S)
    for running, spent in zip(servers, before, strict=True):
        cpu = (running.cpu_s() - spent) / IDLE_S
        if cpu > IDLE_CPU_MAX:
            print(f"warning: {running.server.name} takes {cpu:.0%} of a core while it has nothing to do")


def arguments_of(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF; default: the default model, pulled if need be")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--long-prompt", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the peers; ours takes its default")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="only those whose name contains one of these")
    parser.add_argument("--llama-flags", default=LLAMA_FLAGS, help=f"default: {LLAMA_FLAGS}")
    parser.add_argument("--try-flags", action="append", default=[], help="one more llama.cpp q8_0, with these flags")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where the peers are built")
    parser.add_argument("--out", type=Path, help="where the results go; default: PEERS/results")
    return parser.parse_args(argv)


def main() -> None:
    """Start all, measure, print and save."""
    arguments = arguments_of()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # through all `finally`: no server is left behind
    peers = arguments.peers.absolute()
    out: Path = arguments.out or peers / "results"
    out.mkdir(parents=True, exist_ok=True)
    model = arguments.model or Store(data_dir("", dict(os.environ))).pull(DEFAULT_MODEL).path
    quantized = {name: quantize(peers, model, name) for name in ("q8_0", "q4_0")}
    servers = known(peers, model, quantized, threads=arguments.threads, llama_flags=arguments.llama_flags)
    servers += [
        llama(peers, f"q8_0 [{flags}]", quantized["q8_0"], flags, threads=arguments.threads)
        for flags in arguments.try_flags
    ]
    if arguments.servers:
        servers = [one for one in servers if any(part.lower() in one.name.lower() for part in arguments.servers)]
    loads = loads_of(arguments.streams, arguments.prompt_tokens, arguments.output_tokens, arguments.long_prompt)
    with ExitStack() as stack:
        running = [stack.enter_context(started(server, out)) for server in servers]
        warn_about_idle(running)
        points = measure(running, loads, documents(model), Machine(), seed=arguments.seed, rounds=arguments.rounds)
        memory = {one.server.name: one.resident_bytes() for one in running}
    facts = {
        "commit": commit(),
        "host": host(),
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "seed": arguments.seed,
        "rounds": arguments.rounds,
        "model": model.name,
        "workload": f"prompts of {arguments.prompt_tokens} tokens, {arguments.output_tokens} output tokens, greedy",
        "versions": versions(peers),
        "resident_mib": {name: size >> 20 for name, size in memory.items()},
        "commands": {server.name: " ".join(server.command[1:]) for server in servers},
    }
    save(out, facts, points, table(points, loads, [server.name for server in servers]))


def save(out: Path, facts: dict[str, object], points: list[Point], text: str) -> None:
    """Print the table with its facts, and write both and all samples."""
    lines = [f"{name}: {json.dumps(value) if isinstance(value, dict) else value}" for name, value in facts.items()]
    whole = "\n".join([*(f"- {line}" for line in lines), "", text, ""])
    stem = out / time.strftime("peers-%Y%m%d-%H%M%S")
    stem.with_suffix(".md").write_text(whole)
    stem.with_suffix(".json").write_text(json.dumps({**facts, "points": [asdict(point) for point in points]}, indent=1))
    print(f"\n{whole}\nsaved: {stem}.md and .json")


if __name__ == "__main__":
    main()
