"""
The fault matrix: causes of slowness are put into a running appliance, one at a time, and the doctor is asked what it sees.

    python -m tests.faults [--causes a,b] [--strengths 1,2,3] [--seeds 3] [--json FILE]

The appliance is the real one, with the default model.  What cannot be done to it from outside is done by its own
processes: `wrapped_serve` starts them through `wrapped_engine` and `wrapped_gateway`, which turn up what the dials say.
"""
