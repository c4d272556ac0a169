"""The reader of `ibv_devinfo -v`, on text that the tool printed. Runs anywhere."""

from __future__ import annotations

from tests.lab.devinfo import GidRow, as_number, parse_devinfo

PRINTED = """\
hca_id:\trxa0
\ttransport:\t\t\tInfiniBand (0)
\tfw_ver:\t\t\t\t0.0.0
\tnode_guid:\t\t\t0000:00ff:fe00:0a00
\tphys_port_cnt:\t\t\t1
\tmax_mr_size:\t\t\t0xffffffffffffffff
\tdevice_cap_flags:\t\t0x01223c76
\t\t\t\t\tBAD_PKEY_CNTR
\tatomic_cap:\t\t\tATOMIC_HCA (1)
\tgeneral_odp_caps:
\trc_odp_caps:
\t\t\t\t\tNO SUPPORT
\ttso_caps:
\t\tmax_tso:\t\t\t0
\tnum_comp_vectors:\t\t1
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_ACTIVE (4)
\t\t\tactive_mtu:\t\t1024 (3)
\t\t\tlink_layer:\t\tEthernet
\t\t\tmax_msg_sz:\t\t0x80000000
\t\t\tactive_speed:\t\t10.0 Gbps (8)
\t\t\tGID[  0]:\t\tfe80::ff:fe00:a00, RoCE v2
\t\t\tGID[ 11]:\t\t::ffff:10.10.0.1, RoCE v2

hca_id:\tib0
\tphys_port_cnt:\t\t\t2
\t\tport:\t1
\t\t\tstate:\t\t\tPORT_DOWN (1)
\t\t\tGID[  0]:\t\tfe80::1
\t\tport:\t2
\t\t\tstate:\t\t\tPORT_INIT (2)
"""


def test_facts_are_kept_as_printed() -> None:
    device = parse_devinfo(PRINTED)["rxa0"]

    assert device.facts["node_guid"] == "0000:00ff:fe00:0a00"
    assert device.facts["num_comp_vectors"] == "1"
    assert "max_tso" not in device.facts
    assert device.ports[0].facts["link_layer"] == "Ethernet"


def test_gids_are_rows_of_their_port() -> None:
    first, second = parse_devinfo(PRINTED).values()

    assert first.ports[0].gids == [GidRow(0, "fe80::ff:fe00:a00", "RoCE v2"), GidRow(11, "::ffff:10.10.0.1", "RoCE v2")]
    assert second.ports[0].gids == [GidRow(0, "fe80::1", "")]
    assert [port.number for port in second.ports] == [1, 2]
    assert second.ports[1].facts == {"state": "PORT_INIT (2)"}


def test_numbers_are_read_from_every_way_of_printing() -> None:
    assert [as_number(text) for text in ("PORT_ACTIVE (4)", "0x80000000", "10.0 Gbps (8)", "1048576")] == [
        4,
        1 << 31,
        8,
        1048576,
    ]
