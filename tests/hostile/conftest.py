from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.hostile.governors import frozen_heap


@pytest.fixture(scope="package", autouse=True)
def quiet_heap() -> Iterator[None]:
    with frozen_heap():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
