"""Sparse products against dense ones, and the bytes they take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from foretell.errors import UserError
from foretell.kernels.papers.sparse_product import sparse_product


class Peak(TorchDispatchMode):
    """Bytes of storages made meanwhile, as many as were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, Tensor) and one.layout == torch.strided:
                storage = one.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.highest = max(self.highest, sum(size for _, size in self.alive.values()))
        return found


def drawn(rows: int, columns: int, share: float, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(rows, columns, dtype=torch.float64) * (torch.rand(rows, columns) < share)


@pytest.mark.parametrize("sizes", [(20, 30, 25, 0.2), (1, 50, 1, 0.5), (40, 40, 40, 0.0), (7, 3, 9, 1.0), (64, 64, 64, 0.02)])
@pytest.mark.parametrize("products", [1, 37, 1 << 20])
def test_products_are_those_of_dense_matrices(sizes: tuple[int, int, int, float], products: int) -> None:
    a, b = drawn(sizes[0], sizes[1], sizes[3]), drawn(sizes[1], sizes[2], sizes[3], 1)
    found = sparse_product(a.to_sparse_csr(), b.to_sparse_csr(), products=products)
    torch.testing.assert_close(found.to_dense(), a @ b, rtol=1e-12, atol=1e-12)
    structure = (a != 0).double() @ (b != 0).double() > 0
    assert found.values().numel() == int(structure.sum())
    columns = found.col_indices().split((found.crow_indices()[1:] - found.crow_indices()[:-1]).tolist())
    assert all(bool((one[1:] > one[:-1]).all()) for one in columns)


def test_empty_matrices() -> None:
    a, b = torch.zeros(0, 3).to_sparse_csr(), torch.zeros(3, 4).to_sparse_csr()
    assert sparse_product(a, b).shape == (0, 4)
    assert sparse_product(torch.zeros(2, 3).to_sparse_csr(), b).to_dense().tolist() == [[0.0] * 4] * 2


def test_keys_that_collide_are_told_apart() -> None:
    """A row with all of 5000 columns: half of the table is taken."""
    a, b = torch.ones(2, 1, dtype=torch.float64), drawn(1, 5000, 1.0)
    found = sparse_product(a.to_sparse_csr(), b.to_sparse_csr())
    assert torch.equal(found.to_dense(), b.expand(2, -1))


def peak(run: Callable[[], Any]) -> int:
    gc.collect()
    with Peak() as watch:
        run()
    return watch.highest


def test_the_partial_products_are_never_all_there() -> None:
    """A hub that all rows share: 40 × 400 results from 1,600,000 products, of 16 bytes each."""
    a, b = torch.ones(40, 100, dtype=torch.float64), torch.ones(100, 400, dtype=torch.float64)
    left, right = a.to_sparse_csr(), b.to_sparse_csr()
    products, result, at_once = 40 * 100 * 400, 40 * 400 * 16, 1 << 13
    taken = peak(lambda: sparse_product(left, right, products=at_once))
    assert taken < 4 * result + 250 * at_once < products * 16 / 8
    torch.testing.assert_close(sparse_product(left, right, products=at_once).to_dense(), a @ b)


def test_bad_input() -> None:
    a = torch.ones(2, 3).to_sparse_csr()
    with pytest.raises(UserError, match="layouts"):
        sparse_product(torch.ones(2, 3), a)
    with pytest.raises(UserError, match="sizes that meet"):
        sparse_product(a, a)
    with pytest.raises(UserError, match="one format"):
        sparse_product(a, torch.ones(3, 2, dtype=torch.float64).to_sparse_csr())
