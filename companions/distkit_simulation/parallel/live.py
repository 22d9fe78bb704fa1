"""How much memory tensors take in this process, counted and not computed."""

from __future__ import annotations

import gc


def tensor_bytes() -> int:
    """Bytes of all tensors in this process, with their gradients; a shared storage counts once.

    Tensors that only autograd holds are not seen: count them after backward.

    Example:
        >>> import torch
        >>> before = tensor_bytes()
        >>> x = torch.zeros(250, 4)
        >>> y = x.t()
        >>> tensor_bytes() - before
        4000
    """
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)  # a DTensor's own tensor is another one of these
    found = [thing for thing in gc.get_objects() if type(thing) in plain]
    found += [t.grad for t in found if t.is_leaf and type(t.grad) in plain]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in found
        if t.layout is torch.strided
    }
    return sum(storages.values())
