"""Writes keep what an attribute is, and are all done or all undone."""

from __future__ import annotations

import pytest
import torch

from kvcache.writes import Transaction, overlap
from tests.kvcache.helpers import Layer, snapshot


class ReadOnly:
    """The last of the writes goes to this and fails."""

    def __setattr__(self, name, value):
        raise RuntimeError("read only")


def commit_and_fail(transaction: Transaction) -> None:
    transaction.set(ReadOnly(), "scale", 2.0)
    with pytest.raises(RuntimeError, match="read only"):
        transaction.commit()


def test_planning_changes_nothing():
    layer = Layer(1.0)
    before = snapshot(layer)
    transaction = Transaction()
    transaction.set(layer, "_k_scale", torch.tensor(2.0))
    with pytest.raises(ValueError, match="_v_scale: is on the meta device"):
        transaction.set(Layer(1.0).to("meta"), "_v_scale", torch.tensor(2.0))
    assert snapshot(layer) == before
    transaction.commit()
    assert layer._k_scale.item() == 2.0


@pytest.mark.parametrize(
    ("attribute", "value"),
    (
        ("_k_scale", torch.tensor(2.0)),
        ("_k_scale", torch.ones(4)),
        ("_k_scale", torch.tensor(2.0, dtype=torch.float64)),
        ("_k_scale_float", 2.0),
        ("_new_float", 2.0),
        ("_new_cpu", torch.ones(4)),
    ),
)
def test_a_failing_write_takes_back_those_before_it(attribute, value):
    layer = Layer(1.0)
    before = snapshot(layer)
    transaction = Transaction()
    transaction.set(layer, attribute, value)
    transaction.set(layer, attribute, value + 1)
    commit_and_fail(transaction)
    assert snapshot(layer) == before
    assert hasattr(layer, attribute) == (not attribute.startswith("_new"))


def test_a_resized_host_tensor_is_taken_back_too():
    for fails in (False, True):
        layer = Layer(1.0)
        before, held = snapshot(layer), layer._k_scale_cpu
        transaction = Transaction()
        transaction.set(layer, "_k_scale_cpu", torch.ones(4), resize=True)
        if fails:
            commit_and_fail(transaction)
            assert snapshot(layer) == before
        else:
            transaction.commit()
            assert held is layer._k_scale_cpu and held.tolist() == [1.0] * 4


def test_a_parameter_that_wants_gradients_gets_them_back():
    layer = torch.nn.Linear(2, 2)
    transaction = Transaction()
    transaction.set(layer, "bias", torch.ones(2))
    commit_and_fail(transaction)
    assert layer.bias.requires_grad
    transaction = Transaction()
    transaction.set(layer, "bias", torch.ones(2))
    transaction.commit()
    assert layer.bias.tolist() == [1.0, 1.0] and not layer.bias.requires_grad


@pytest.mark.parametrize("attribute", ("_k_scale", "_new_cpu"))
def test_the_value_is_copied_when_planned(attribute):
    layer, value = Layer(1.0), torch.tensor(2.0)
    transaction = Transaction()
    transaction.set(layer, attribute, value)
    value.fill_(5.0)
    transaction.commit()
    assert getattr(layer, attribute).item() == 2.0
    assert not overlap(getattr(layer, attribute), value)


def test_attributes_that_share_a_tensor_get_their_own():
    one = torch.tensor(1.0)
    layer = Layer(1.0, registration="plain")
    layer._k_scale = layer._v_scale = one
    transaction = Transaction()
    transaction.set(layer, "_k_scale", torch.tensor(2.0))
    transaction.set(layer, "_v_scale", torch.tensor(3.0))
    transaction.commit()
    assert layer._k_scale is one
    assert (layer._k_scale.item(), layer._v_scale.item()) == (2.0, 3.0)


def test_neighbours_in_one_allocation_stay_there():
    together = torch.ones(2)
    layer = Layer(1.0, registration="plain")
    layer._k_scale, layer._v_scale = together[0], together[1]
    transaction = Transaction()
    transaction.set(layer, "_k_scale", torch.tensor(2.0))
    transaction.set(layer, "_v_scale", torch.tensor(3.0))
    transaction.commit()
    assert together.tolist() == [2.0, 3.0]


def test_foreign_memory_is_not_written():
    one = torch.ones(4)
    layer = Layer(1.0, registration="plain")
    layer._k_scale = one[2:3]
    transaction = Transaction([one])
    transaction.set(layer, "_k_scale", torch.tensor([2.0]))
    transaction.commit()
    assert one.tolist() == [1.0] * 4 and layer._k_scale.tolist() == [2.0]


def test_overlap():
    together = torch.ones(6)
    assert overlap(together, together[5])
    assert overlap(together[:3], together[2:])
    assert not overlap(together[1], together[2])
    assert not overlap(together, together.clone())
    assert not overlap(together, together.to("meta"))
    assert not overlap(together[:0], together)
    assert overlap(together[::5], together[3])
