"""
`python -m tests.sim --seed N [--fails-at K] [--count M] [--pressure] [--drafts]`: play the worlds N .. N+M-1.
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
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        options = {"fails_at": arguments.fails_at, "pressure": arguments.pressure, "drafts": arguments.drafts}
        explain(seed, Simulation(seed, **options).run, **options)
    print(f"{arguments.count} worlds, all books closed")


if __name__ == "__main__":
    main()
