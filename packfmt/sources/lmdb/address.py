"""Where a buffer lies in memory, asked without numpy: importing that takes longer than the rest of a child's start."""

from __future__ import annotations

import ctypes

__all__ = ["address_of"]


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``, whose layout is part of its stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0  # PyBUF_SIMPLE: contiguous bytes
_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(buffer: bytes | memoryview) -> int:
    """The address of the first byte. It means something only while the buffer's owner lives.

    Raises:
        BufferError: the buffer is not contiguous.
    """
    found = _Buffer()
    _get(buffer, ctypes.byref(found), _SIMPLE)
    address: int = found.buf or 0
    _release(ctypes.byref(found))
    return address
