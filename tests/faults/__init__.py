"""
The fault matrix: what makes an appliance slow is put into one that runs, one cause at a time, and the doctor is asked.

    python -m tests.faults [--causes a,b] [--strengths 1,2,3] [--seeds 3] [--json FILE]

The appliance is the real one, with the default model.  What cannot be done to it from outside is done by its own
processes: `wrapped_serve` starts them through `wrapped_engine` and `wrapped_gateway`, which turn up what the dials say.
"""
