"""Fixtures of the tests that need GPUs (`make test-gpu`)."""

import pytest
import torch


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many there are; none is an error, never a skip."""
    assert torch.cuda.is_available(), (
        "make test-gpu needs an NVIDIA GPU and a CUDA build of torch (the rollout-gpu extra)"
    )
    return torch.cuda.device_count()
