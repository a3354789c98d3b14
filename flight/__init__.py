"""
`pellucid flight`: what the flight recorder has kept of the last minutes, read and replayed.

The recorder itself is in telemetry.flight and telemetry.ring, the journal of an engine in engine.recorder.
"""
