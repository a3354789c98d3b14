"""
Names of KV blocks: chained hashes, so that equal names mean equal tokens from the very first one.

    root = H(tenant);  name_0 = F + H(root, tokens of block 0);  name_i = F + H(name_(i-1), tokens of block i)

The tenant is in the root: no tenant can find, and so by timing learn of, what another one has sent.
F, the family, is the beginning of H(root, tokens of block 0): all that starts with the same block is of one family, so
an index that is spread over many servers can keep a whole chain on one of them (cache.prefix_index).

An index outside the engine is told of every so many-th name only, and asked for these: each stands for all blocks up
to its own.  Both sides choose them here.
"""

from array import array
from collections.abc import Sequence as Many
from hashlib import blake2b

FAMILY_BYTES = 2
HASH_BYTES = 16  # 128 bits: two of 2**40 blocks collide with a chance of 2**-49
NAME_BYTES = FAMILY_BYTES + HASH_BYTES
INDEXED_TOKENS_MIN = 64
"""An indexed name stands for at least so many tokens more than the one before it."""
INDEXED_NAMES_MAX = 256
"""Of one chain: what follows is not indexed."""


def root(tenant: str) -> bytes:
    """What stands before the first block of anything that `tenant` sends; of no family yet."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"pellucid-root").digest()


def chain(before: bytes, tokens: Many[int]) -> bytes:
    """The name of a block that holds `tokens` and follows the block named `before`, or that root."""
    return _chain(before, array("q", tokens).tobytes())


def stride(block_slots: int) -> int:
    """Every so many-th block's name is indexed."""
    return -(-INDEXED_TOKENS_MIN // block_slots)


def indexed_tokens(block_slots: int) -> int:
    """By how many tokens more an indexed name stands for than the one before it."""
    return stride(block_slots) * block_slots


def is_indexed(index: int, block_slots: int) -> bool:
    """Whether the name of block `index` of a chain is one that an index knows."""
    number, rest = divmod(index + 1, stride(block_slots))
    return rest == 0 and number <= INDEXED_NAMES_MAX


def indexed_names(tenant: str, tokens: Many[int], block_slots: int) -> list[bytes]:
    """The names by which an index may know a beginning of `tokens`; at least one token follows the last of them."""
    every = stride(block_slots)
    count = min((len(tokens) - 1) // block_slots // every, INDEXED_NAMES_MAX) if tokens else 0
    data = array("q", tokens[: count * every * block_slots])
    size = block_slots * data.itemsize
    view = memoryview(data.tobytes())
    name, names = root(tenant), []
    for index in range(count * every):
        name = _chain(name, view[index * size : (index + 1) * size])
        if (index + 1) % every == 0:
            names.append(name)
    return names


def _chain(before: bytes, tokens: bytes | memoryview) -> bytes:
    hashed = blake2b(before, digest_size=HASH_BYTES)
    hashed.update(tokens)
    digest = hashed.digest()
    return (before[:FAMILY_BYTES] if len(before) == NAME_BYTES else digest[:FAMILY_BYTES]) + digest
