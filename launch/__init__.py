"""
The launcher: from one command line to a served model.

`options` is the table of settings, `store` finds or fetches the model, `supervise` starts the processes, watches them
and takes them down again.  It loads neither torch nor litestar: those live in the processes that it starts.
"""
