import gc
import weakref

import pytest

from mindspeed.features.tools.gc_freeze import wrap_get_forward_backward_func


class Node:
    """Something that can be part of a cycle."""


def cycle():
    node = Node()
    node.me = node
    return weakref.ref(node)


@pytest.fixture(autouse=True)
def thaw():
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


def test_freezes_once_and_leaves_no_garbage_frozen():
    get = wrap_get_forward_backward_func(lambda name: name.upper())
    dead = cycle()
    before = gc.get_freeze_count()
    assert get("schedule") == "SCHEDULE"
    frozen = gc.get_freeze_count()
    assert frozen > before + 1000
    assert dead() is None
    later = cycle()
    get("schedule")
    assert gc.get_freeze_count() <= frozen
    gc.collect()
    assert later() is None
