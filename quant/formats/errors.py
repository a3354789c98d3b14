"""
What can be wrong with a model's files: one error, whose message is one line for a person and names the way out.
"""


class ModelError(Exception):
    """These files cannot be used: missing, broken, unsupported."""
