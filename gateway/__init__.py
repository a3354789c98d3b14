"""
The gateway: text and HTTP on one side, token ids and frames on the other.

It owns the OpenAI wire format, the chat template, the tokenizer, stop strings and server-sent events.  It never loads
torch; of the engine it knows `engine.api` alone.
"""
