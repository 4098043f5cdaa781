"""Everstep keeps a training job stepping while its servers die.

``everstep.torch`` is what a PyTorch program uses; ``everstep.Session`` is the same for any framework;
``python -m everstep.run`` starts an unchanged script, as torchrun does. See docs/pytorch.md.
"""

from everstep.errors import EverstepError, GenerationOver, JobEnded, NotFiniteError, UsageError
from everstep.session import Communicator, Membership, Outcome, Restore, Session

__version__ = "0.1.0"
__all__ = ["Session", "Membership", "Outcome", "Restore", "Communicator", "EverstepError", "GenerationOver", "JobEnded",
           "NotFiniteError", "UsageError"]
