"""Every exception: its place in the tree, its fields, and that it survives the way to another process."""

from __future__ import annotations

import copy
import pickle

import pytest

import kvxfer
from kvxfer import errors

ALL = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_exception_survives_pickling_with_its_fields(kind: type[kvxfer.KvxferError]) -> None:  # B164
    error = kind("it failed with 7.", remedy="Do this.", rows=(1, 2), peer="127.0.0.1:1", errno=7, nbytes_done=3)

    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is kind
        assert str(again) == str(error) == "it failed with 7. Do this."
        assert (again.message, again.remedy) == ("it failed with 7.", "Do this.")
        assert (again.rows, again.peer, again.errno, again.nbytes_done) == ((1, 2), "127.0.0.1:1", 7, 3)
        assert again.retryable is kind.retryable


@pytest.mark.parametrize(
    ("kind", "parents"),
    [
        (kvxfer.ConfigError, (kvxfer.UsageError, ValueError)),
        (kvxfer.MemoryArgumentError, (kvxfer.UsageError, ValueError, TypeError)),
        (kvxfer.NotRegisteredError, (kvxfer.UsageError,)),
        (kvxfer.ForkedError, (kvxfer.UsageError,)),
        (kvxfer.AllocationError, (kvxfer.UnsupportedError,)),
        (kvxfer.RegistrationError, (kvxfer.VerbsError, OSError)),
        (kvxfer.RemoteProtocolError, (kvxfer.ProtocolError,)),
        (kvxfer.PeerRestartedError, (kvxfer.PeerError,)),
        (kvxfer.TransferTimeoutError, (kvxfer.TransferError,)),
        (kvxfer.RemoteAccessError, (kvxfer.TransferError,)),
    ],
)
def test_exception_is_caught_by_its_meaning(kind: type, parents: tuple[type, ...]) -> None:  # B164
    assert issubclass(kind, (kvxfer.KvxferError,))
    assert all(issubclass(kind, parent) for parent in parents)


def test_every_exception_is_public_and_none_is_a_plain_runtime_error() -> None:  # B164
    for kind in ALL:
        assert getattr(kvxfer, kind.__name__) is kind
        assert issubclass(kind, kvxfer.KvxferError)
        assert not issubclass(kind, RuntimeError)
