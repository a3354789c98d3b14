"""
Ranks: processes that compute the steps of one engine together.

    shard          which heads, channels, vocabulary and layers are whose       weights   that part of a checkpoint
    collective     what they exchange, behind one Protocol                      book      what they waited for
    shared_memory  ranks on one host                                            gloo      ranks anywhere
    clocks         what the stamps of other hosts mean here
    model          rank 0's `Model`, which tells the others what it was told
"""
