"""The error of this room."""


class CollectError(ValueError):
    """Preferences cannot be collected, or a choice not be kept; the message says what to do."""
