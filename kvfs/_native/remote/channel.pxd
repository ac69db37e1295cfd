"""The channel of `channel.h`, and the fabric of `fabric.h`, for the seams over them: a session or a fabric comes in a
capsule, and is its taker's from then on."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_SetDestructor

cdef extern from "remote/channel.h" nogil:
    const char *KVFS_SESSION_CAPSULE

    struct kvfs_session_calls:
        pass

    struct kvfs_session:
        const kvfs_session_calls *calls
        short wants

    struct kvfs_channel:
        int fd
        kvfs_session *session

    bint kvfs_channel_is_quiet(const kvfs_channel *c)

cdef extern from "remote/fabric.h" nogil:
    const char *KVFS_FABRIC_CAPSULE

    struct kvfs_fabric_calls:
        pass

    struct kvfs_fabric:
        const kvfs_fabric_calls *calls

cdef inline kvfs_fabric *fabric_of(object capsule) except? NULL:
    if capsule is None:
        return NULL
    return <kvfs_fabric *>PyCapsule_GetPointer(capsule, KVFS_FABRIC_CAPSULE)

cdef inline kvfs_session *session_of(object capsule) except? NULL:
    if capsule is None:
        return NULL
    return <kvfs_session *>PyCapsule_GetPointer(capsule, KVFS_SESSION_CAPSULE)

cdef inline int note_taken(object capsule) except -1:
    """Leave what a capsule has to who has taken it: the capsule frees it no more."""
    if capsule is not None:
        PyCapsule_SetDestructor(capsule, NULL)
    return 0
