"""Everstep for PyTorch: ``Job`` keeps a training loop stepping through failures, ``init`` makes the process group that
DistributedDataParallel lives on. See docs/pytorch.md."""

import torch as _torch

if tuple(int(n) for n in _torch.__version__.split("+")[0].split(".")[:2]) < (2, 4):
    raise ImportError(f"everstep.torch needs PyTorch 2.4 or newer, this is {_torch.__version__}")

from everstep.errors import EverstepError, GenerationOver, JobEnded, NotFiniteError, UsageError  # noqa: E402
from everstep.torch.job import Job  # noqa: E402
from everstep.torch.process_group import ProcessGroupEverstep, init, register  # noqa: E402

__all__ = ["Job", "init", "register", "ProcessGroupEverstep", "EverstepError", "GenerationOver", "JobEnded", "NotFiniteError",
           "UsageError"]
