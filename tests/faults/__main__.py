"""
`python -m tests.faults`.
"""

import sys

from tests.faults.matrix import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
