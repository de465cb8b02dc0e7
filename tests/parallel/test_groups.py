import pytest
import torch
import torch.distributed as dist

from moe_int8.parallel.groups import Group, Groups, close_groups, init_groups, local_device, world_size


def test_a_group_of_one_is_the_identity():
    group = Group()
    x = torch.tensor([[1.0, 2.0]])
    for result in (group.all_reduce(x), group.all_gather(x), group.broadcast(x)):
        assert result is x
    assert x.tolist() == [[1.0, 2.0]]
    value = {"any": ["object"]}
    assert group.broadcast_object(value) is value


def test_without_torchrun_there_is_one_rank_and_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert world_size() == 1
    assert init_groups(torch.device("cpu")) == Groups(tp=Group(0, 1), ep=Group(0, 1), dp=Group(0, 1))
    assert not dist.is_initialized()
    close_groups()  # nothing to leave


def test_a_group_that_only_describes_a_rank_cannot_communicate():
    group = Group(rank=1, size=4)
    x = torch.zeros(1)
    for collective in (group.all_reduce, group.all_gather, group.broadcast, group.broadcast_object):
        with pytest.raises(AssertionError, match="only describes a shape"):
            collective(x)


def test_groups_cannot_be_changed():
    with pytest.raises(AttributeError):
        Groups().tp = Group(1, 2)
    with pytest.raises(AttributeError):
        Group().rank = 1


def test_local_device(monkeypatch):
    assert local_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"8 ranks on this node need a GPU each,? and it has 4"):
        local_device("cuda")
