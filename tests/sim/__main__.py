"""
`python -m tests.sim --seed N [--fails-at K] [--count M] [--pressure] [--drafts] [--model] [--shares]`: play M worlds.
"""

import argparse

from tests.sim.model import Simulation, explain


def main() -> None:
    """Parse and play."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--fails-at", type=int)
    parser.add_argument("--pressure", action="store_true")
    parser.add_argument("--drafts", action="store_true")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--shares", action="store_true")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        options = {name: getattr(arguments, name) for name in ("fails_at", "pressure", "drafts", "model", "shares")}
        explain(seed, Simulation(seed, **options).run, **options)
    print(f"{arguments.count} worlds, all books closed")


if __name__ == "__main__":
    main()
