"""The errors of a queue pair, with all that an operator needs to know what to change.

Each function returns an error for `queue_pair.py` to raise; none calls the device.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvxfer.errors import PostError, QueuePairStateError, VerbsError
from kvxfer.system.memlock import memlock_note
from kvxfer.verbs.enums import QueuePairState, WorkOpcode
from kvxfer.verbs.library import errno_text, ffi
from kvxfer.verbs.qp_attributes import to_plain, to_text
from kvxfer.verbs.qp_capabilities import QueuePairCapabilities, explain_refusal
from kvxfer.verbs.qp_diagnosis import Attempt, Surroundings, allowed_text, diagnose
from kvxfer.verbs.qp_states import Finding

if TYPE_CHECKING:
    from kvxfer.verbs.device import Context
    from kvxfer.verbs.library import CData
    from kvxfer.verbs.queue_pair import QueuePair
    from kvxfer.verbs.work_request import WorkRequestBatch

__all__ = ["creation_error", "find_bad", "receive_error", "send_error", "step_failure", "step_refusal"]

SUSPECTS_SHOWN = 3


def creation_error(context: Context, number: int, asked: QueuePairCapabilities) -> VerbsError:
    """ibv_create_qp gave no queue pair."""
    limits = context.limits
    finding = explain_refusal(number, asked, limits)
    return VerbsError(
        f"ibv_create_qp({context.name}) failed: {errno_text(number)}. Likely: {finding.why}. Asked: "
        f"{asked}; the device allows max_qp_wr {limits.max_qp_wr}, max_sge {limits.max_sge} and {limits.max_qp} queue "
        f"pairs{memlock_note(number)}.",
        remedy=finding.remedy,
        verb="ibv_create_qp",
        errno=number,
        device=context.name,
        capabilities=asked,
        culprit=finding.culprit,
    )


def step_refusal(
    pair: QueuePair, state: QueuePairState, attributes: Mapping[str, Any], fault: Finding
) -> QueuePairStateError:
    """A step that cannot work; the device was not asked (`called` is False)."""
    given = to_plain(attributes)
    return QueuePairStateError(
        f"{pair.label} was not brought {pair.state}->{state}: {fault.why}. Given: {to_text(given) or 'nothing'}.",
        remedy=fault.remedy,
        verb="ibv_modify_qp",
        errno=errno.EINVAL,
        device=pair.context.name,
        qp_num=pair.number,
        transition=f"{pair.state}->{state}",
        attributes=given,
        culprit=fault.culprit,
        called=False,
    )


def step_failure(pair: QueuePair, attempt: Attempt, around: Surroundings) -> QueuePairStateError:
    """A step that the device refused; `suspects` has every finding, the likeliest first."""
    likely, *others = diagnose(attempt, around)
    given = to_plain(attempt.attributes)
    also = "".join(f" Or: {finding.why}." for finding in others[: SUSPECTS_SHOWN - 1])
    return QueuePairStateError(
        f"ibv_modify_qp({pair.label}, {attempt.transition}) failed: {errno_text(attempt.error)}. "
        f"Likely: {likely.why}.{also} Given: {to_text(given) or 'nothing'}. "
        f"Allowed: {allowed_text(attempt, around)}.",
        remedy=likely.remedy,
        verb="ibv_modify_qp",
        errno=attempt.error,
        device=pair.context.name,
        qp_num=pair.number,
        transition=attempt.transition,
        attributes=given,
        culprit=likely.culprit,
        suspects=tuple(tuple(finding) for finding in (likely, *others)),
        called=True,
    )


def send_error(pair: QueuePair, number: int, batch: WorkRequestBatch, start: int, posted: int) -> PostError:
    """ibv_post_send did not take all from `start` on; `posted` is what it took, -1 where it did not say."""
    refused = "" if posted < 0 else f" ({_request_text(batch, start + posted)})"
    if number == errno.ENOMEM:
        remedy = (
            f"The send queue is full, it holds {pair.capabilities.max_send_wr}: take completions, then post from there "
            f"on. Only a completion gives slots back."
        )
    elif pair.state is not QueuePairState.RTS:
        remedy = f"The queue pair was brought to {pair.state}; sending needs RTS."
    else:
        remedy = "The device takes no such request: look at its opcode, flags, lengths and keys."
    return _post_error(pair, "ibv_post_send", number, batch.count - start, start, posted, refused, remedy)


def receive_error(pair: QueuePair, number: int, count: int, posted: int) -> PostError:
    """ibv_post_recv did not take all; `posted` as of `send_error`."""
    if number == errno.ENOMEM:
        remedy = f"The receive queue is full, it holds {pair.capabilities.max_recv_wr}: post one for each completion."
    else:
        remedy = f"The queue pair was brought to {pair.state}; receives can be posted from INIT on."
    return _post_error(pair, "ibv_post_recv", number, count, 0, posted, "", remedy)


def find_bad(first: CData, bad: CData, nbytes: int, count: int) -> int:
    """Return how many requests of a chain come before `bad`; -1 where it is none of them."""
    distance = int(ffi.cast("intptr_t", bad)) - int(ffi.cast("intptr_t", first))
    posted, rest = divmod(distance, nbytes)
    return posted if not rest and 0 <= posted < count else -1


def _post_error(
    pair: QueuePair, verb: str, number: int, count: int, start: int, posted: int, refused: str, remedy: str
) -> PostError:
    if posted < 0:
        taken = "the driver does not say how many were taken"
    else:
        taken = f"number {start + posted}{refused} was refused, the {posted} before it were taken"
    return PostError(
        f"{verb}({pair.label}, {count} work requests) failed: {errno_text(number)}; {taken}.",
        remedy=remedy,
        verb=verb,
        errno=number,
        device=pair.context.name,
        qp_num=pair.number,
        posted_count=max(posted, 0),
        bad_index=start + posted if posted >= 0 else -1,
    )


def _request_text(batch: WorkRequestBatch, row: int) -> str:
    request, element = batch.requests[row], batch.elements[row]
    nbytes = element["length"] if request["num_sge"] else 0
    return (
        f"{WorkOpcode(int(request['opcode']))}, {nbytes} bytes, local {element['addr']:#x}, "
        f"remote {request['remote_addr']:#x}, rkey {request['rkey']:#x}"
    )
