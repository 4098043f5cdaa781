"""What can go wrong, as exceptions. Each carries the library's sentence; none of them means "try to go on"."""

from __future__ import annotations

__all__ = ["EverstepError", "GenerationOver", "JobEnded", "UsageError", "NotFiniteError", "CODES"]

# Names of es_code, by number (those of gRPC).
CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS",
)


class EverstepError(RuntimeError):
    """The base of all errors here. ``code`` is the name of the library's code, such as ``"INVALID_ARGUMENT"``."""

    def __init__(self, message: str, code: str = "UNKNOWN") -> None:
        super().__init__(message)
        self.code = code


class GenerationOver(EverstepError):
    """The membership changes: what this generation computed is void, and the way on is ``Session.join``.

    Raised out of collectives and ``commit``. ``Job.run`` catches it and calls the training function again; a program
    must let it pass.
    """

    def __init__(self, message: str, code: str = "ABORTED") -> None:
        super().__init__(message, code)


class JobEnded(EverstepError):
    """There is no generation to come: the job was stopped, or a world without a controller lost a rank."""

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION") -> None:
        super().__init__(message, code)


class UsageError(EverstepError):
    """The program uses the library in a way that can't work; the message says what to change."""

    def __init__(self, message: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message, code)


class NotFiniteError(EverstepError):
    """Some rank's loss or gradients were infinite or not a number; no rank applied the step."""

    def __init__(self, message: str, code: str = "FAILED_PRECONDITION") -> None:
        super().__init__(message, code)
