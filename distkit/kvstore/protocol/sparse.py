"""Row-sparse tensors: gradients, and first values, of which only some rows are not zero.

::

    worker: ids and rows  ──►  ranges of elements of a server's part, and their values
    server: ranges        ──►  a sparse vector: the elements that change, and by how much

On a worker they are torch's sparse tensors, as ``Embedding(sparse=True)`` makes its gradients. A
server has flat parts of arrays, which may begin and end in the middle of a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distkit.errors import KVStoreError
from distkit.kvstore.protocol.placement import DTYPES, NARROW, Layout, Part, dtype_name

#: How the codec of such values begins; the dtype follows.
ROWS = "rows:"


class Rows(NamedTuple):
    """Rows of an array: their numbers, ascending, int64[n], and their values, [n, …]."""

    ids: Tensor
    values: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.ids.nbytes + self.values.nbytes


def is_sparse(tensor: Tensor) -> bool:
    """True if it is sparse in any of torch's layouts."""
    return tensor.layout is not torch.strided


def rows_of(tensors: Sequence[Tensor]) -> Rows:
    """The rows of the sum of sparse tensors of one shape, in host memory."""
    first = tensors[0]
    narrow = first.dtype in NARROW and len(tensors) > 1
    found = [_row_sparse(t.detach().to("cpu")) for t in tensors]
    ids = torch.cat([rows.ids for rows in found])
    values = torch.cat([rows.values for rows in found])
    unique, place = torch.unique(ids, return_inverse=True)
    wide = values.float() if narrow else values
    total = wide.new_zeros((len(unique), *first.shape[1:]))
    total.index_add_(0, place, wide)
    return Rows(unique, total.to(first.dtype))


def _row_sparse(tensor: Tensor) -> Rows:
    """Rows, perhaps in any order and more than once, of one tensor."""
    coo = tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse_coo()
    if coo.sparse_dim() == 1:
        return Rows(coo._indices()[0], coo._values())
    coo = coo.coalesce()
    ids, place = torch.unique(coo.indices()[0], return_inverse=True)
    rows = coo.values().new_zeros((len(ids), *coo.shape[1:]))
    rows.index_put_((place, *coo.indices()[1:]), coo.values())
    return Rows(ids, rows)


def weight(tensors: Sequence[Tensor], layout: Layout) -> Layout | Rows:
    """The part of these tensors that is sent: all, or rows; with its ``nbytes``."""
    return rows_of(tensors) if all(map(is_sparse, tensors)) else layout


def tensor_of(rows: Rows, shape: Sequence[int]) -> Tensor:
    """A sparse tensor of this shape that has these rows."""
    made: Tensor = torch.sparse_coo_tensor(
        rows.ids[None], rows.values, tuple(shape), is_coalesced=True, check_invariants=True
    )
    return made


def write(out: Tensor, rows: Rows) -> None:
    """Give a sparse tensor these rows and no others; write these rows of a dense one."""
    here = Rows(rows.ids.to(out.device), rows.values.to(out.device, out.dtype))
    if is_sparse(out):
        with torch.no_grad():  # a detached one would keep its own rows
            out.copy_(tensor_of(here, out.shape))
    else:
        out.detach()[here.ids] = here.values


def ranges_of(ids: Tensor, width: int, part: Part) -> Tensor:
    """The elements of these rows that lie in a part: from and to within it, int64[n, 2]."""
    ends = torch.stack([ids * width, (ids + 1) * width], 1).clamp(part.start, part.stop)
    return ends[ends[:, 0] < ends[:, 1]] - part.start


def pack(rows: Rows, part: Part) -> Tensor:
    """The information about these rows that a part's server needs, as bytes."""
    width = math.prod(rows.values.shape[1:])
    ranges = ranges_of(rows.ids, width, part)
    before = int((part.start - rows.ids * width).clamp(0, width).sum())
    count = int((ranges[:, 1] - ranges[:, 0]).sum())
    values = rows.values.reshape(-1)[before : before + count].contiguous()
    head = torch.tensor([part.stop - part.start, len(ranges)])
    return torch.cat([t.reshape(-1).view(torch.uint8) for t in (head, ranges.contiguous(), values)])


def codec_of(rows: Rows) -> str:
    """The packing of values, for the receiver."""
    return ROWS + dtype_name(rows.values)


def unpack(codec: str, packed: Tensor) -> Tensor:
    """A server's part as a sparse vector.

    Raises:
        KVStoreError: no such rows.
    """
    try:
        dtype = DTYPES[codec.removeprefix(ROWS)]
        size, n = packed[:16].clone().view(torch.int64).tolist()
        if size < 0 or n < 0:
            raise ValueError("negative")
        ranges = packed[16 : 16 + 16 * n].clone().view(torch.int64).view(n, 2)
        at, values = elements(ranges, size), packed[16 + 16 * n :].clone().view(dtype)
        if len(at) != len(values) or bool((at[1:] <= at[:-1]).any()):
            raise ValueError("ranges")
        return tensor_of(Rows(at, values), (size,))
    except (KeyError, ValueError, RuntimeError, IndexError, OverflowError):
        raise KVStoreError(
            f"{packed.numel()} bytes of {codec!r} are no rows. Install the same version of "
            "distkit on all nodes."
        ) from None


def elements(ranges: Tensor, size: int) -> Tensor:
    """Every element of these ranges, which end before ``size``.

    Raises:
        KVStoreError: they do not.
    """
    first, last = ranges[:, 0], ranges[:, 1]
    if len(ranges) and (int(first.min()) < 0 or int(last.max()) > size or (last < first).any()):
        raise KVStoreError(f"elements that this server's part of {size} has not.")
    lengths = last - first
    starts = (first - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
    return starts + torch.arange(len(starts))
