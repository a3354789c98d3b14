"""
Where records are found: a running system, a flight recording, traces, a scrape.  Mistakes are UserErrors.
"""
