"""How the lab fails."""


class LabError(RuntimeError):
    """A rank failed, hung, or the lab's network broke; the message holds which and why."""


class Unavailable(RuntimeError):
    """This machine cannot have a lab; the message is one line: what is missing, and what to type."""
