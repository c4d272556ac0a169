"""The C declarations of libibverbs that kvxfer uses, and the generator of `abi.py`.

`python -m kvxfer.verbs.cdef` writes `abi.py` anew: a pure-Python module that cffi loads in 2 ms. Nothing is compiled,
so nothing but tests checks what is written here: tests/house/test_verbs_layout.py compares every struct and number
with golden offsets and, where a C compiler and <infiniband/verbs.h> are at hand, with what the compiler says.

Structs that the library allocates and kvxfer only reads are declared as far as they are the same on every 64-bit
platform and release from rdma-core 28 on; their names say so: `struct ibv_qp` ends before its mutex. Structs that
kvxfer allocates are declared whole. Read next: `library.py`, which opens the library.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

# <infiniband/verbs.h>: plain structs, allocated by kvxfer or laid over by numpy: whole.
VALUES = """
union ibv_gid {
    uint8_t raw[16];
    struct { uint64_t subnet_prefix; uint64_t interface_id; } global;
};
struct ibv_gid_entry {
    union ibv_gid gid; uint32_t gid_index; uint32_t port_num; uint32_t gid_type; uint32_t ndev_ifindex;
};
struct ibv_device_attr {
    char fw_ver[64];
    uint64_t node_guid; uint64_t sys_image_guid; uint64_t max_mr_size; uint64_t page_size_cap;
    uint32_t vendor_id; uint32_t vendor_part_id; uint32_t hw_ver;
    int max_qp; int max_qp_wr; unsigned int device_cap_flags; int max_sge; int max_sge_rd; int max_cq; int max_cqe;
    int max_mr; int max_pd; int max_qp_rd_atom; int max_ee_rd_atom; int max_res_rd_atom; int max_qp_init_rd_atom;
    int max_ee_init_rd_atom; int atomic_cap; int max_ee; int max_rdd; int max_mw; int max_raw_ipv6_qp;
    int max_raw_ethy_qp; int max_mcast_grp; int max_mcast_qp_attach; int max_total_mcast_qp_attach; int max_ah;
    int max_fmr; int max_map_per_fmr; int max_srq; int max_srq_wr; int max_srq_sge;
    uint16_t max_pkeys; uint8_t local_ca_ack_delay; uint8_t phys_port_cnt;
};
struct ibv_port_attr {
    int state; int max_mtu; int active_mtu; int gid_tbl_len;
    uint32_t port_cap_flags; uint32_t max_msg_sz; uint32_t bad_pkey_cntr; uint32_t qkey_viol_cntr;
    uint16_t pkey_tbl_len; uint16_t lid; uint16_t sm_lid;
    uint8_t lmc; uint8_t max_vl_num; uint8_t sm_sl; uint8_t subnet_timeout; uint8_t init_type_reply;
    uint8_t active_width; uint8_t active_speed; uint8_t phys_state; uint8_t link_layer; uint8_t flags;
    uint16_t port_cap_flags2; uint32_t active_speed_ex;
};
struct ibv_global_route {
    union ibv_gid dgid; uint32_t flow_label; uint8_t sgid_index; uint8_t hop_limit; uint8_t traffic_class;
};
struct ibv_ah_attr {
    struct ibv_global_route grh; uint16_t dlid;
    uint8_t sl; uint8_t src_path_bits; uint8_t static_rate; uint8_t is_global; uint8_t port_num;
};
struct ibv_qp_cap {
    uint32_t max_send_wr; uint32_t max_recv_wr; uint32_t max_send_sge; uint32_t max_recv_sge; uint32_t max_inline_data;
};
struct ibv_qp_init_attr {
    void *qp_context; struct ibv_cq *send_cq; struct ibv_cq *recv_cq; void *srq;
    struct ibv_qp_cap cap; int qp_type; int sq_sig_all;
};
struct ibv_qp_attr {
    int qp_state; int cur_qp_state; int path_mtu; int path_mig_state;
    uint32_t qkey; uint32_t rq_psn; uint32_t sq_psn; uint32_t dest_qp_num; unsigned int qp_access_flags;
    struct ibv_qp_cap cap; struct ibv_ah_attr ah_attr; struct ibv_ah_attr alt_ah_attr;
    uint16_t pkey_index; uint16_t alt_pkey_index;
    uint8_t en_sqd_async_notify; uint8_t sq_draining; uint8_t max_rd_atomic; uint8_t max_dest_rd_atomic;
    uint8_t min_rnr_timer; uint8_t port_num; uint8_t timeout; uint8_t retry_cnt; uint8_t rnr_retry;
    uint8_t alt_port_num; uint8_t alt_timeout; uint32_t rate_limit;
};
struct ibv_sge { uint64_t addr; uint32_t length; uint32_t lkey; };
struct ibv_send_wr {
    uint64_t wr_id; struct ibv_send_wr *next; struct ibv_sge *sg_list; int num_sge; int opcode;
    unsigned int send_flags; uint32_t imm_data;
    union {
        struct { uint64_t remote_addr; uint32_t rkey; } rdma;
        struct { uint64_t remote_addr; uint64_t compare_add; uint64_t swap; uint32_t rkey; } atomic;
        struct { void *ah; uint32_t remote_qpn; uint32_t remote_qkey; } ud;
    } wr;
    union { struct { uint32_t remote_srqn; } xrc; } qp_type;
    union {
        struct { void *mw; uint32_t rkey; uint64_t bind_info[4]; } bind_mw;
        struct { void *hdr; uint16_t hdr_sz; uint16_t mss; } tso;
    };
};
struct ibv_recv_wr { uint64_t wr_id; struct ibv_recv_wr *next; struct ibv_sge *sg_list; int num_sge; };
struct ibv_wc {
    uint64_t wr_id; int status; int opcode; uint32_t vendor_err; uint32_t byte_len; uint32_t imm_data;
    uint32_t qp_num; uint32_t src_qp; unsigned int wc_flags; uint16_t pkey_index; uint16_t slid;
    uint8_t sl; uint8_t dlid_path_bits;
};
struct ibv_async_event {
    union { struct ibv_cq *cq; struct ibv_qp *qp; void *srq; void *wq; int port_num; } element;
    int event_type;
};
"""

# Objects of the library, as far as they are the same everywhere: what follows is a mutex or grows.
OBJECTS = """
struct ibv_device {
    void *_ops[2]; int node_type; int transport_type;
    char name[64]; char dev_name[64]; char dev_path[256]; char ibdev_path[256];
};
struct ibv_context_ops {
    void *_before_poll[11];
    int (*poll_cq)(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc);
    int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);
    void *_before_post_srq[7];
    void *post_srq_recv;
    void *_before_post[4];
    int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr);
    int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr);
    void *_after_post[5];
};
struct ibv_context {
    struct ibv_device *device; struct ibv_context_ops ops; int cmd_fd; int async_fd; int num_comp_vectors;
};
struct ibv_pd { struct ibv_context *context; uint32_t handle; };
struct ibv_mr {
    struct ibv_context *context; struct ibv_pd *pd; void *addr; size_t length;
    uint32_t handle; uint32_t lkey; uint32_t rkey;
};
struct ibv_comp_channel { struct ibv_context *context; int fd; int refcnt; };
struct ibv_cq {
    struct ibv_context *context; struct ibv_comp_channel *channel; void *cq_context; uint32_t handle; int cqe;
};
struct ibv_qp {
    struct ibv_context *context; void *qp_context; struct ibv_pd *pd; struct ibv_cq *send_cq; struct ibv_cq *recv_cq;
    void *srq; uint32_t handle; uint32_t qp_num; int state; int qp_type;
};
struct ibv_ah { struct ibv_context *context; struct ibv_pd *pd; uint32_t handle; };
"""

# Exported functions; a library may lack those of OPTIONAL_SYMBOLS in library.py.
FUNCTIONS = """
struct ibv_device **ibv_get_device_list(int *num_devices);
void ibv_free_device_list(struct ibv_device **list);
const char *ibv_get_device_name(struct ibv_device *device);
uint64_t ibv_get_device_guid(struct ibv_device *device);
int ibv_get_device_index(struct ibv_device *device);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *device_attr);
int ibv_query_port(struct ibv_context *context, uint8_t port_num, struct ibv_port_attr *port_attr);
int ibv_query_gid(struct ibv_context *context, uint8_t port_num, int index, union ibv_gid *gid);
ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max_entries,
                             uint32_t flags, size_t entry_size);
int ibv_query_pkey(struct ibv_context *context, uint8_t port_num, int index, uint16_t *pkey);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, uintptr_t addr, size_t length, int access);
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, uintptr_t addr, size_t length, uint64_t iova, unsigned int access);
struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context, struct ibv_comp_channel *channel,
                             int comp_vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int nevents);
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *qp_init_attr);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask);
int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int attr_mask, struct ibv_qp_init_attr *init_attr);
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event);
void ibv_ack_async_event(struct ibv_async_event *event);
int ibv_fork_init(void);
int ibv_is_fork_initialized(void);
"""

SOURCE = VALUES + OBJECTS + FUNCTIONS


def generate() -> str:
    """Return the text of `abi.py` for `SOURCE`."""
    from cffi import FFI

    builder = FFI()
    builder.set_source("kvxfer.verbs.abi", None)
    builder.cdef(SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "abi.py"
        builder.emit_python_code(str(path))
        return path.read_text()


if __name__ == "__main__":
    Path(__file__).with_name("abi.py").write_text(generate())
