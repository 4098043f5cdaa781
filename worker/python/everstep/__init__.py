"""Everstep keeps a training job stepping while its servers die.

``everstep.torch`` is what a PyTorch program uses; ``everstep.Session`` is the same for any framework;
``python -m everstep.run`` starts an unchanged script, as torchrun does. See docs/pytorch.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everstep.errors import EverstepError, GenerationOver, JobEnded, NotFiniteError, UsageError
    from everstep.session import Communicator, Membership, Outcome, Restore, Session

__version__ = "0.1.0"
__all__ = ["Session", "Membership", "Outcome", "Restore", "Communicator", "EverstepError", "GenerationOver", "JobEnded",
           "NotFiniteError", "UsageError"]


def __getattr__(name: str) -> Any:
    # On demand: everstep.launch starts once for each rank of each restart, and needs none of it.
    if name in ("Session", "Membership", "Outcome", "Restore", "Communicator"):
        from everstep import session
        return getattr(session, name)
    if name in __all__:
        from everstep import errors
        return getattr(errors, name)
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")
