"""
What outlives a process, in a server that speaks Redis's protocol: limits, API keys, the prefix index.

`connection` reaches the server and knows when it cannot; `embedded` is the server that we bring along; everything that
must be atomic is a Lua script.  Nothing here loads torch or litestar, and nothing here starts a process.
"""
