"""The largest tensor of a computation: a mask of all pairs of tokens cannot hide from it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Watches the results of all operators inside."""

    nbytes = 0
    """Size of the largest storage so far."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        sizes = [
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor)
        ]
        self.nbytes = max([self.nbytes, *sizes])
        return result
