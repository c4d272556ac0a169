"""What every object of libibverbs is: owned, closed once, after everything that was made from it.

A child keeps its parents alive. `close` closes the children first, newest first. An object that is dropped without
`close` warns (ResourceWarning) and is destroyed then, its children first, so that a forgotten queue pair does not live
as long as the process. When the process ends the kernel takes back what is left. A forked child has copies of objects
that are its parent's: there `close` forgets them and calls nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import ClosedError, VerbsError
from kvxfer.verbs.library import errno_of, errno_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvxfer.verbs.library import CData, VerbsLibrary

__all__ = ["Handle"]


class _Ownership:
    """What must live on when the Python object is dropped: the pointer, how it is destroyed, its parents and children.

    before_destroy: what must come first, with the pointer. pid: of the process whose object it is.
    """

    __slots__ = (
        "before_destroy",
        "children",
        "closing",
        "destroy",
        "handle",
        "is_told",
        "label",
        "parents",
        "pid",
        "pointer",
        "verb",
    )

    def __init__(
        self,
        handle: Handle,
        pointer: CData,
        destroy: Callable[[CData], int],
        verb: str,
        parents: tuple[_Ownership, ...],
    ) -> None:
        self.handle = weakref.ref(handle)
        self.pointer: CData | None = pointer
        self.destroy = destroy
        self.before_destroy: Callable[[CData], None] = _do_nothing
        self.verb = verb
        self.parents = parents
        self.label = f"{handle.noun} ({verb})"
        self.pid = os.getpid()
        self.is_told = False
        """Whether `close` has raised: whoever drops it then has not forgotten it."""
        self.children: dict[int, _Ownership] = {}
        """By their own id, oldest first."""
        self.closing = threading.Lock()
        """Held while it is destroyed: a session may end in one thread while another closes the whole device."""

    def leave(self) -> None:
        """It is no more: its parents may be destroyed."""
        self.pointer = None
        for parent in self.parents:
            parent.children.pop(id(self), None)


class Handle:
    """One object of libibverbs and the duty to destroy it."""

    noun: ClassVar[str] = "object"

    def __init__(
        self,
        library: VerbsLibrary,
        pointer: CData,
        destroy: Callable[[CData], int],
        verb: str,
        *parents: Handle,
    ) -> None:
        self.library = library
        owners = tuple(parent._ownership for parent in parents)
        self._ownership: _Ownership = _Ownership(self, pointer, destroy, verb, owners)
        for owner in owners:
            owner.children[id(self._ownership)] = self._ownership
        self._finalizer = weakref.finalize(self, _drop, self._ownership)
        self._finalizer.atexit = False  # threads may still use it then, and the kernel takes it back in a moment

    @property
    def pointer(self) -> CData:
        """The C pointer; raises ClosedError after `close`."""
        pointer = self._ownership.pointer
        if pointer is None:
            raise ClosedError(f"this {self.noun} is closed.", remedy="Make a new one; a closed one is gone for good.")
        return pointer

    @property
    def children(self) -> list[Handle]:
        """What was made from it and is not closed, oldest first."""
        alive = (child.handle() for child in [*self._ownership.children.values()])
        return [child for child in alive if child is not None]

    @property
    def is_closed(self) -> bool:
        """Whether it was destroyed."""
        return self._ownership.pointer is None

    def close(self) -> None:
        """Destroy it, after everything that was made from it; a second call does nothing, and when it returns that is
        done, whichever thread does it.

        Raises VerbsError where the library refuses; the object then stays, and may be closed again.
        """
        ownership = self._ownership
        if ownership.pid != os.getpid():  # no lock here: a thread of the parent may have held it at the fork
            for child in self.children:
                child.close()
            ownership.leave()
            return
        with ownership.closing:
            if ownership.pointer is None:
                return
            for child in reversed(self.children):
                child.close()
            for dropped in reversed([*ownership.children.values()]):  # dropped a moment ago, its finalizer still to run
                _destroy_dropped(dropped)
            self._destroy()
            ownership.leave()
            self._finalizer.detach()

    def _destroy(self) -> None:
        ownership = self._ownership
        ownership.before_destroy(ownership.pointer)
        error = errno_of(ownership.destroy(ownership.pointer))
        if error:
            ownership.is_told = True
            raise VerbsError(
                f"{ownership.verb} of {self!r} failed: {errno_text(error)}.",
                remedy="Something made from it is still in use, by another thread perhaps: close it again later."
                if error == errno.EBUSY
                else "The device is gone or its driver is at fault; the kernel's log says more (dmesg).",
                verb=ownership.verb,
                errno=error,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.is_closed else ""
        facts = "".join(f" {name}={value}" for name, value in self._facts().items())
        return f"<{type(self).__name__}{facts}{state}>"

    def _facts(self) -> dict[str, Any]:
        """What `repr` tells."""
        return {}


def _drop(ownership: _Ownership) -> None:
    """The Python object was dropped without close(): destroy what it held, and warn."""
    labels = _destroy_dropped(ownership)  # first: a warning may be an error
    for label in labels:
        warnings.warn(f"a {label} was never closed", ResourceWarning, stacklevel=2)


def _destroy_dropped(ownership: _Ownership) -> list[str]:
    """Destroy it, after its children: objects of a cycle are dropped in any order, and children keep their parents
    alive, so they are nobody's any more either. Return what of them was forgotten."""
    pointer = ownership.pointer
    if pointer is None or ownership.pid != os.getpid():
        return []
    labels = [label for child in reversed([*ownership.children.values()]) for label in _destroy_dropped(child)]
    ownership.leave()
    ownership.before_destroy(pointer)
    ownership.destroy(pointer)
    return labels if ownership.is_told else [*labels, ownership.label]


def _do_nothing(pointer: CData) -> None:
    """Most objects need nothing first."""
