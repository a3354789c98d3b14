"""
The engine: token ids in, token ids out.

Ring 1 is the pure core in this folder (no clock, no randomness, no I/O: see tests/tidy); ring 2, `engine.device`,
owns tensors; ring 3 (`loop`, `server`, `__main__`) is the shell around both.  Others import `engine.api` only.
"""
