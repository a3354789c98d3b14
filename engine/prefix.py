"""
Names of KV blocks: chained hashes, so that equal names mean equal tokens from the very first one.

    root = H(tenant);  name_0 = H(root, tokens of block 0);  name_i = H(name_(i-1), tokens of block i)

The tenant is in the root: no tenant can find, and so by timing learn of, what another one has sent.
"""

from array import array
from collections.abc import Sequence as Many
from hashlib import blake2b

NAME_BYTES = 16  # 128 bits: two of 2**40 blocks collide with a chance of 2**-49


def root(tenant: str) -> bytes:
    """The name before the first block of anything that `tenant` sends."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, person=b"pellucid-root").digest()


def chain(before: bytes, tokens: Many[int]) -> bytes:
    """The name of a block that holds `tokens` and follows the block named `before`."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=NAME_BYTES).digest()
