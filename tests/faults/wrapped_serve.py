"""
`pellucid` whose engines and gateways are the wrapped ones: `python -m tests.faults.wrapped_serve serve ...`.
"""

import msgspec

import launch.fleet
from launch.supervise import python_command
from pellucid import main
from tests.faults.wrapped_engine import WRAPPERS


def wrapped_command(package: str, options: msgspec.Struct) -> tuple[str, ...]:
    """As `python_command`, of the wrapper."""
    return python_command(WRAPPERS[package], options)


if __name__ == "__main__":
    launch.fleet.python_command = wrapped_command  # type: ignore[attr-defined]  # it is there for itself
    main()
