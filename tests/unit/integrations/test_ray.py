"""The Ray transport where Ray is not installed; with the real Ray: tests/interop/test_ray.py."""

from __future__ import annotations

import pytest

import kvxfer
import kvxfer.integrations.ray as integration


def test_without_ray_register_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "_missing", ImportError("No module named 'ray'"))

    with pytest.raises(kvxfer.UnsupportedError, match=r"No module named 'ray'.*pip install 'kvxfer\[ray\]'"):
        integration.register()


def test_the_transport_says_what_it_is() -> None:
    transport = integration.KvxferTensorTransport()

    assert transport.tensor_transport_backend() == integration.NAME
    assert transport.is_one_sided()
    assert transport.can_abort_transport()
    with pytest.raises(NotImplementedError):
        transport.send_multiple_tensors([], None, None)
