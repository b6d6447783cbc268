"""Kept answers for Cython; `kept_answers.h` has the rules."""

from libc.stdint cimport uint64_t

from lakefs.host.span cimport span, span_hash
from lakefs.stamps.stamps cimport lake_stamps

cdef extern from "lakefs/stamps/kept_answers.h" nogil:
    ctypedef struct kept_answer:
        span key
        span stamps

    ctypedef struct kept_answers:
        lake_stamps stamps
        uint64_t held_bytes
        uint64_t count

    int kept_begin(kept_answers *, span_hash, uint64_t limit_bytes, uint64_t expected_bytes)
    void kept_forget(kept_answers *)
    void kept_end(kept_answers *)
