"""What every object of libibverbs is: owned, closed once, after everything that was made from it.

A child keeps its parents alive. `close` closes the children first, newest first. An object that is dropped without
`close` warns (ResourceWarning) and is destroyed then, so that a forgotten queue pair does not live as long as the
process.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from kvxfer.errors import ClosedError, VerbsError
from kvxfer.verbs.library import errno_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from kvxfer.verbs.library import CData, VerbsLibrary

__all__ = ["Handle"]


class _Ownership:
    """What must live on when the Python object is dropped: the pointer, how it is destroyed, and its parents'."""

    __slots__ = ("children", "closing", "destroy", "label", "parents", "pointer", "verb")

    def __init__(
        self, pointer: CData, destroy: Callable[[CData], int], verb: str, parents: tuple[_Ownership, ...]
    ) -> None:
        self.pointer: CData | None = pointer
        self.destroy = destroy
        self.verb = verb
        self.parents = parents
        self.label = verb
        self.children: dict[int, weakref.ref[Handle]] = {}
        self.closing = threading.Lock()
        """Held while it is destroyed: a session may end in one thread while another closes the whole device."""


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
        self._ownership: _Ownership = _Ownership(pointer, destroy, verb, owners)
        self._ownership.label = f"{self.noun} ({verb})"
        for parent in parents:
            parent._ownership.children[id(self)] = weakref.ref(self)
        self._finalizer = weakref.finalize(self, _drop, self._ownership, id(self))

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
        alive = (child() for child in [*self._ownership.children.values()])
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
        with ownership.closing:
            if ownership.pointer is None:
                return
            for child in reversed(self.children):
                child.close()
            self._before_destroy()
            error = ownership.destroy(ownership.pointer)
            if error:
                raise VerbsError(
                    f"{ownership.verb} of {self!r} failed: {errno_text(error)}.",
                    remedy="EBUSY means that something made from it is still in use; anything else is the device's "
                    "fault.",
                    verb=ownership.verb,
                    errno=error,
                )
            ownership.pointer = None
            _leave(ownership, id(self))
            self._finalizer.detach()

    def _before_destroy(self) -> None:
        """Do what must come first; for subclasses."""

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


def _drop(ownership: _Ownership, key: int) -> None:
    """The Python object was dropped without close(): warn, and destroy what it held."""
    pointer = ownership.pointer
    if pointer is None:
        return
    ownership.pointer = None
    _leave(ownership, key)
    ownership.destroy(pointer)  # first: a warning may be an error
    warnings.warn(f"a {ownership.label} was never closed", ResourceWarning, stacklevel=2)


def _leave(ownership: _Ownership, key: int) -> None:
    for parent in ownership.parents:
        parent.children.pop(key, None)
