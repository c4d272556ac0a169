"""Objects of libibverbs: closed once, children first, and never forgotten without a word."""

from __future__ import annotations

import errno
import gc
import threading
import warnings
import weakref

import pytest

from kvxfer.errors import ClosedError, VerbsError
from kvxfer.verbs.device import Context, list_devices
from kvxfer.verbs.enums import Access
from kvxfer.verbs.library import ffi
from kvxfer.verbs.queue_pair import QueuePairCapabilities
from tests.support.fake_verbs import FakeLibrary, connectx


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary(None, connectx(), name="a")


def open_first(library: FakeLibrary) -> Context:
    return list_devices(library)[0].open()


def test_closing_a_context_closes_everything_made_from_it(library: FakeLibrary) -> None:
    context = open_first(library)
    domain = context.alloc_pd()
    channel = context.create_comp_channel()
    queue = context.create_cq(16, channel)
    pair = domain.create_qp(queue, capabilities=QueuePairCapabilities(max_send_wr=4))
    memory = bytearray(8192)
    import ctypes

    region = domain.register(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 8192, Access.LOCAL_WRITE)

    context.close()

    assert all(handle.is_closed for handle in (context, domain, channel, queue, pair, region))
    assert not library.leaks


def test_second_close_does_nothing_and_later_use_says_so(library: FakeLibrary) -> None:
    context = open_first(library)
    domain = context.alloc_pd()
    domain.close()
    domain.close()

    with pytest.raises(ClosedError, match="this protection domain is closed"):
        _ = domain.pointer
    assert "closed" in repr(domain)
    context.close()


def test_an_object_that_two_threads_close_is_destroyed_once_and_waited_for(library: FakeLibrary) -> None:
    context = open_first(library)
    pair = context.alloc_pd().create_qp(context.create_cq(16), capabilities=QueuePairCapabilities(max_send_wr=4))
    destroy, calls = pair._ownership.destroy, []
    begun, may_end = threading.Event(), threading.Event()

    def destroy_slowly(pointer: object) -> int:
        calls.append(pointer)
        begun.set()
        assert may_end.wait(5.0)
        return destroy(pointer)

    pair._ownership.destroy = destroy_slowly
    session = threading.Thread(target=pair.close)
    session.start()
    assert begun.wait(5.0)
    closer = threading.Thread(target=context.close)
    closer.start()
    may_end.set()
    for thread in (session, closer):
        thread.join(5.0)

    assert len(calls) == 1
    assert context.is_closed
    assert not library.leaks


def test_object_that_is_dropped_warns_and_is_destroyed(library: FakeLibrary) -> None:
    context = open_first(library)
    domain = context.alloc_pd()
    gone = weakref.ref(domain)

    with pytest.warns(ResourceWarning, match="protection domain .* was never closed"):
        del domain  # the last reference

    assert gone() is None
    assert "pd" not in str(library.leaks)
    context.close()
    assert not library.leaks


def test_object_that_could_not_be_closed_is_destroyed_when_dropped_without_a_warning(library: FakeLibrary) -> None:
    """Its user has been told: it was not forgotten."""
    context = open_first(library)
    domain = context.alloc_pd()
    library.fail("ibv_dealloc_pd", errno.EBUSY)
    with pytest.raises(VerbsError, match="EBUSY"):
        domain.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del domain
        gc.collect()

    assert "pd" not in str(library.leaks)
    context.close()


def drop_a_cycle(library: FakeLibrary) -> None:
    """Make objects of each kind that only a cycle keeps alive, and have them collected."""
    context = open_first(library)
    domain = context.alloc_pd()
    pair = domain.create_qp(context.create_cq(16), capabilities=QueuePairCapabilities(max_send_wr=4))
    pair.attributes["itself"] = pair
    del context, domain, pair
    gc.collect()


def test_objects_dropped_in_a_cycle_are_destroyed_children_first(library: FakeLibrary) -> None:
    """The collector calls finalizers of a cycle in any order: the context's first, where it is the oldest."""
    with pytest.warns(ResourceWarning) as warned:
        drop_a_cycle(library)

    assert len(warned) == 4
    assert not library.leaks


def test_forked_child_touches_nothing_of_its_parents(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    context = open_first(library)
    domain = context.alloc_pd()
    dropped = context.alloc_pd()
    held = {**library.leaks}
    domain._ownership.closing.acquire()  # by a thread of the parent, at the fork
    monkeypatch.setattr("kvxfer.verbs.handle.os.getpid", lambda: -1)

    del dropped
    context.close()

    assert context.is_closed
    assert domain.is_closed
    assert library.leaks == held


def test_end_of_the_process_destroys_nothing(library: FakeLibrary) -> None:
    """Threads may still be in a call then, and a forked child ends as well."""
    with open_first(library) as context:
        assert not context._finalizer.atexit


def test_refusal_without_a_number_is_looked_up_in_errno(library: FakeLibrary) -> None:
    context = open_first(library)
    destroy = context._ownership.destroy

    def refuse(pointer: object) -> int:
        ffi.errno = errno.ENODEV
        return -1

    context._ownership.destroy = refuse
    with pytest.raises(VerbsError, match="ENODEV"):
        context.close()

    context._ownership.destroy = destroy
    context.close()


def test_child_keeps_its_parents_alive(library: FakeLibrary) -> None:
    domain = open_first(library).alloc_pd()
    gc.collect()

    assert not domain.context.is_closed
    domain.context.close()
    assert domain.is_closed


def test_refused_destroy_keeps_the_object_and_may_be_repeated(library: FakeLibrary) -> None:
    context = open_first(library)
    domain = context.alloc_pd()
    library.fail("ibv_dealloc_pd", errno.EBUSY, nth=1)

    with pytest.raises(VerbsError, match=r"ibv_dealloc_pd .*EBUSY") as caught:
        domain.close()
    assert caught.value.errno == errno.EBUSY
    assert not domain.is_closed

    domain.close()
    context.close()
    assert not library.leaks


def test_with_statement_closes(library: FakeLibrary) -> None:
    with open_first(library) as context, context.alloc_pd() as domain:
        assert domain in context.children

    assert context.is_closed
    assert not library.leaks
