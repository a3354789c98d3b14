"""
`pellucid bench`, as click sees it.

Nothing heavy is loaded here: `--help` answers at once, and a mistake is found before anything is started.
"""

import os
import sys

import click

from launch.errors import UserError
from launch.flags import flags, options_of
from launch.options import RANKS_MAX
from launch.parse import whole


@click.group()
def bench() -> None:
    """Measure this machine."""


@bench.command(epilog="Behind `--` may stand options of `pellucid serve` that hold for all: -- --quantization none")
@flags("model", "data_dir", "threads")
@click.option("--ranks", default="1,2,3", show_default=True, metavar="N,N,...", help="Counts of ranks to compare.")
@click.option(
    "--replicas/--no-replicas", default=True, show_default=True, help="Also as many replicas in place of ranks."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Of all, in turns.")
@click.option("--streams", type=click.IntRange(1, 256), default=8, show_default=True, help="Clients at the same time.")
@click.option("--requests", type=click.IntRange(1, 1000), default=2, show_default=True, help="Of each client in a run.")
@click.option("--prompt-words", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Of each request.")
@click.option(
    "--output-tokens", type=click.IntRange(2, 100_000), default=64, show_default=True, help="Of each request, exactly."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the prompts.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED)
def scaling(  # one argument for each option
    ranks: str,
    replicas: bool,
    rounds: int,
    streams: int,
    requests: int,
    prompt_words: int,
    output_tokens: int,
    seed: int,
    as_json: bool,
    serve_options: tuple[str, ...],
    **given: str | bool | tuple[str, ...] | None,
) -> None:
    """
    Compare one model on one rank with the same on several, and with several replicas, and say what limits it.

    Each is a `pellucid serve` of its own with the same load; all have the same processors to share.
    """
    options = options_of(given)
    counts = _counts(ranks)
    from bench.load import Load  # noqa: PLC0415 - lazily
    from bench.scaling import Settings, run  # noqa: PLC0415 - lazily

    load = Load(
        streams=streams, requests=requests, prompt_words=prompt_words, output_tokens=output_tokens, seed=seed
    )  # fmt: skip
    settings = Settings(
        model=options.model,
        ranks=counts,
        replicas=replicas,
        threads=options.threads,
        rounds=rounds,
        load=load,
        serve_options=serve_options,
    )
    sys.exit(run(settings, options.data_dir, dict(os.environ), as_json=as_json))


def _counts(text: str) -> tuple[int, ...]:
    """`1,2,3`, each once.  Raises UserError."""
    try:
        counts = [whole(least=1, most=RANKS_MAX)(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--ranks: {error}; counts with commas between them are expected, such as 1,2,3") from error
    return tuple(dict.fromkeys(counts))
