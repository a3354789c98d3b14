"""
The leaf: what happened, written down once and read by many.

`records` and `clock` know nothing else of ours and may be imported by the engine's pure core.  Everything else here
turns records into metrics, spans, logs and JSON, far from the path that produced them.
"""
