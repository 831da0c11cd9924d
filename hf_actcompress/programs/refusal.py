"""Why a layer is not run as programs."""


class NotStraight(Exception):
    """The layer's code is no straight-line code of known operations; the message says what was found instead."""
