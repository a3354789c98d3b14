"""
`pellucid flight`: what the flight recorder has kept of the last minute, read and replayed.

The recorder itself is in telemetry.flight and telemetry.ring, the journal of an engine in engine.recorder.
"""
