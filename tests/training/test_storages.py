"""Counting live tensor storage."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from sweep.training.storages import BLOCK_BYTES, LiveStorages


def test_this_version_of_torch_was_tried():  # TorchDispatchMode is not a stable interface
    assert torch.__version__.startswith(("2.11.", "2.13."))


def test_a_storage_counts_once_rounded_up_until_it_is_freed():
    with LiveStorages() as storages:
        a = torch.zeros(100)  # 400 bytes
        b = a.view(10, 10)
        assert storages.live_bytes == BLOCK_BYTES
        c = a + 1
        del a
        assert storages.live_bytes == 2 * BLOCK_BYTES
        del b, c
        assert storages.live_bytes == 0
    assert storages.peak_bytes == 2 * BLOCK_BYTES


def test_only_this_process_part_of_a_tensor_on_several_devices_counts():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        with LiveStorages() as storages:
            parts = DTensor.from_local(torch.zeros(1024), mesh, [Shard(0)])
            assert parts.nbytes == 4 * 4096 and storages.live_bytes == 4096
            moments = torch.zeros_like(parts)
            assert storages.live_bytes == 2 * 4096
            del parts, moments
        assert storages.live_bytes == 0
    finally:
        dist.destroy_process_group()


def test_a_storage_that_was_emptied_in_place_does_not_count():
    with LiveStorages(limit_bytes=10_000) as storages:
        gathered = torch.zeros(2000)
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(2000)
        assert storages.live_bytes == 8192
        gathered.untyped_storage().resize_(8000)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            gathered.view(2, 1000)
        del other


def test_tensors_that_autograd_keeps_are_live_until_backward():
    with LiveStorages() as storages:
        weight = torch.ones(1000, requires_grad=True)
        product = (weight * 2).exp()
        loss = product.sum()
        del product
        kept = storages.live_bytes
        loss.backward()
        del loss
    assert kept >= 2 * 4096  # the weight, and the result that exp keeps
    assert storages.live_bytes == 2 * 4096  # the weight and its gradient


def test_categories_add_up():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1000, bias=False))
    with LiveStorages(vocabulary=1000) as storages:
        for layer in model:  # the model was built before
            layer.weight = nn.Parameter(layer.weight.detach() * 1)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        storages.watch(model, optimizer)
        for _ in range(2):
            storages.forget_peak()
            loss = model(torch.randn(32, 64)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    weights = 4 * (64 * 64 + 64 * 1000)
    assert storages.peak["weights"] == storages.live["weights"] == weights
    assert storages.live["optimizer"] == 2 * weights + 2 * BLOCK_BYTES  # and two step counts
    assert storages.peak["logits"] >= 4 * 32 * 1000
    assert sum(storages.peak.values()) == storages.peak_bytes
    assert storages.live["gradients"] == storages.live["activations"] == 0
