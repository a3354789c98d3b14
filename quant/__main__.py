"""
`python -m quant` is `pellucid quantize`.
"""

import sys

from pellucid import main

if __name__ == "__main__":
    main(["quantize", *sys.argv[1:]])
