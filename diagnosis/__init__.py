"""
Why it was slow, in plain words: records in, causes out.

    split     a quantity of one request (its life, its first token, its longest gap) into causes, exactly
    why       one request: ranked causes, against what is usual here
    doctor    all requests of a stretch of time: which cause carries the slow ones, and what to change
    causes    what there is to find, its words, and the setting that helps

Pure: no clock, no files, no network but in `sources` and `command`, which bring records here from wherever they are.
"""
