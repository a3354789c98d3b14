"""
The launcher's errors.

    UserError        something outside of us is wrong: one line on stderr, exit code 2
"""


class UserError(Exception):
    """What the person at the terminal can mend; the message is one line that says how."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
