"""What a pickle holds, without unpickling it.

By hand, because ``pickle.Unpickler`` imports and calls what the bytes name; one whose ``find_class`` refuses that still
bounds neither the steps of a pickle nor the size of its memo. Foreign databases keep (image bytes, label) as pickles.
Here the opcodes are parsed by the standard library's ``pickletools``, which executes nothing, and a stack of plain
values is rebuilt from them: numbers, text, bytes, tuples, lists and dicts. Whatever a pickle would import or call
becomes an ``Opaque`` that only remembers its name. Two such calls are understood, because every numpy array and every
bytes object of protocols 0 to 2 needs them: ``_codecs.encode``, and numpy's array and scalar constructors, rebuilt from
their dtype name, shape and bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from typing import Any

from packfmt.sources.values import Array, Opaque

__all__ = ["PickleError", "read_pickle"]

_MAX_STEPS = 1_000_000  # opcodes of one pickle; an image with its label takes about thirty


class PickleError(ValueError):
    """The bytes are not a pickle that can be followed."""


_MARK = object()  # never leaves this module


def read_pickle(data: bytes) -> Any:
    """The value that the pickle describes, with ``Array`` and ``Opaque`` in it where code would have run.

    Nothing is imported, called or executed. Values may share parts: bound a walk over them. Thread-safe.

    Raises:
        PickleError: the bytes are cut, are not a pickle, or use the stack in a way no pickle does.
    """
    machine = _Machine()
    try:
        for step, (name, argument) in enumerate(_opcodes(data)):
            if step >= _MAX_STEPS:
                raise PickleError(f"a pickle of more than {_MAX_STEPS} steps")
            if name == "STOP":
                return _settled(machine.pop())
            machine.run(name, argument)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError, EOFError) as error:
        raise PickleError(f"a damaged pickle ({error})") from error
    raise PickleError("a pickle that is cut short")


@cache
def _known_opcodes() -> dict[str, Any]:
    import pickletools  # here: most databases hold no pickle

    return {opcode.code: opcode for opcode in pickletools.opcodes}


def _opcodes(data: bytes) -> Any:
    """(opcode name, argument) in order, as ``pickletools.genops`` gives them.

    Unlike there, a text-mode ``STRING`` may hold any byte, which Python 2 wrote for images.
    """
    stream = io.BytesIO(data)
    known = _known_opcodes()
    while True:
        code = stream.read(1)
        opcode = known.get(code.decode("latin-1"))
        if opcode is None:
            raise PickleError("a damaged pickle" if code else "a pickle that is cut short")
        if opcode.name == "STRING":
            yield opcode.name, _python2_string(stream.readline())
        else:
            yield opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)
        if opcode.name == "STOP":
            return


def _python2_string(line: bytes) -> str:
    text = line.rstrip(b"\n")
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
        raise PickleError("a string without quotes")
    # latin-1 maps every byte to the character of its number; the escapes of a Python 2 string all lie in that range
    return text[1:-1].decode("unicode_escape")


class _Machine:
    """The pickle machine's stack and memo, with every import and call replaced by an ``Opaque``."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Do one opcode."""
        if name in _PUSHED:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _MADE:
            count, make = _MADE[name]
            self.stack.append(make(*reversed([self.pop() for _ in range(count)])))
        else:
            _SPECIAL[name](self, argument)

    def pop(self) -> Any:
        """The topmost value; a mark is none."""
        value = self.stack.pop()
        if value is _MARK:
            raise PickleError("a pickle that closes what it never opened")
        return value

    def pop_mark(self) -> list[Any]:
        """All values above the last mark, which goes too."""
        values = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def extend(self, values: list[Any]) -> None:
        """Append to the list (or the like) on top."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            pass  # a set holds no image and no label that any layout reads

    def update(self, flat: list[Any]) -> None:
        """Put keys and values into the dict (or the like) on top."""
        target = self.stack[-1]
        if isinstance(target, dict):
            for key, value in zip(flat[::2], flat[1::2], strict=True):
                if isinstance(key, str | bytes | int):
                    target[key] = value

    def remember(self, slot: int) -> None:
        """Keep the topmost value under a number."""
        self.memo[slot] = self.stack[-1]


def _call(function: Any, arguments: Any) -> Any:
    name = function.name if isinstance(function, Opaque) else type(function).__name__
    if name == "_codecs encode" and isinstance(arguments, tuple) and len(arguments) == 2:
        text, encoding = arguments
        if isinstance(text, str) and encoding == "latin1":
            return text.encode("latin-1")
    if name in ("__builtin__ bytes", "builtins bytes") and arguments == ():
        return b""
    return Opaque(name, arguments)


def _build(target: Any, state: Any) -> Any:
    if isinstance(target, Opaque) and target.state is None:
        target.state = state
    return target


def _global(module: Any, name: Any) -> Opaque:
    return Opaque(f"{module} {name}")


_PUSHED = frozenset(
    name
    for line in (
        "INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT",
        "STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8",
        "UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8",
    )
    for name in line.split()
)
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
    "NEXT_BUFFER": lambda: Opaque("out-of-band buffer"),
}
_MADE: dict[str, tuple[int, Callable[..., Any]]] = {
    "TUPLE1": (1, lambda a: (a,)),
    "TUPLE2": (2, lambda a, b: (a, b)),
    "TUPLE3": (3, lambda a, b, c: (a, b, c)),
    "STACK_GLOBAL": (2, _global),
    "REDUCE": (2, _call),
    "NEWOBJ": (2, _call),
    "NEWOBJ_EX": (3, lambda function, arguments, _named: _call(function, arguments)),
    "BUILD": (2, _build),
    "BINPERSID": (1, lambda _: Opaque("persistent id")),
    "READONLY_BUFFER": (1, lambda value: value),
}
_SPECIAL: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda m, a: None,
    "FRAME": lambda m, a: None,
    "POP": lambda m, a: m.stack.pop(),
    "POP_MARK": lambda m, a: m.pop_mark(),
    "DUP": lambda m, a: m.stack.append(m.stack[-1]),
    "APPEND": lambda m, a: m.extend([m.pop()]),
    "APPENDS": lambda m, a: m.extend(m.pop_mark()),
    "ADDITEMS": lambda m, a: m.extend(m.pop_mark()),
    "SETITEM": lambda m, a: m.update([m.pop(), m.pop()][::-1]),
    "SETITEMS": lambda m, a: m.update(m.pop_mark()),
    "LIST": lambda m, a: m.stack.append(m.pop_mark()),
    "TUPLE": lambda m, a: m.stack.append(tuple(m.pop_mark())),
    "FROZENSET": lambda m, a: m.stack.append(tuple(m.pop_mark())),
    "DICT": lambda m, a: _dict(m),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda m, a: m.remember(a)),
    "MEMOIZE": lambda m, a: m.remember(len(m.memo)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, a: m.stack.append(m.memo[a])),
    "GLOBAL": lambda m, a: m.stack.append(Opaque(a)),
    "INST": lambda m, a: m.stack.append(Opaque(a, tuple(m.pop_mark()))),
    "OBJ": lambda m, a: _object(m),
    "PERSID": lambda m, a: m.stack.append(Opaque("persistent id")),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), lambda m, a: m.stack.append(Opaque("registered extension"))),
}


def _dict(machine: _Machine) -> None:
    flat = machine.pop_mark()
    machine.stack.append({})
    machine.update(flat)


def _object(machine: _Machine) -> None:
    function, *arguments = machine.pop_mark()
    machine.stack.append(_call(function, tuple(arguments)))


def _settled(value: Any, depth: int = 8, budget: list[int] | None = None) -> Any:
    """The value with numpy's constructors replaced by ``Array``, as far as a layout may nest one."""
    budget = [10_000] if budget is None else budget
    budget[0] -= 1
    if depth == 0 or budget[0] < 0:
        return Opaque("deeper than any image layout")
    if isinstance(value, Opaque):
        return _array(value) or value
    if isinstance(value, list | tuple):
        return type(value)(_settled(part, depth - 1, budget) for part in value)
    if isinstance(value, dict):
        return {key: _settled(part, depth - 1, budget) for key, part in value.items()}
    return value


def _array(value: Opaque) -> Array | None:
    """The array or scalar that numpy would make of it, or None."""
    module, _, name = value.name.partition(" ")
    if not module.startswith(("numpy.", "_numpy")) or not isinstance(value.arguments, tuple):
        return None
    dtype: Any
    if name == "_reconstruct" and isinstance(value.state, tuple) and len(value.state) == 5:
        _, shape, dtype, fortran, data = value.state
        return None if fortran is not False and _more_than_a_row(shape) else _made(dtype, shape, data)
    if name == "scalar" and len(value.arguments) == 2:
        return _made(value.arguments[0], (), value.arguments[1])
    if name == "_frombuffer" and len(value.arguments) == 4:
        data, dtype, shape, order = value.arguments
        return None if order != "C" and _more_than_a_row(shape) else _made(dtype, shape, data)
    return None


def _more_than_a_row(shape: Any) -> bool:
    return not (isinstance(shape, tuple) and len(shape) <= 1)


def _made(dtype: Any, shape: Any, data: Any) -> Array | None:
    if isinstance(data, str):  # Python 2 kept bytes as text
        data = data.encode("latin-1")
    if not (isinstance(dtype, Opaque) and dtype.name == "numpy dtype" and isinstance(dtype.arguments, tuple)):
        return None
    name = dtype.arguments[0] if dtype.arguments else None
    whole = isinstance(shape, tuple) and all(isinstance(size, int) and 0 <= size < 1 << 63 for size in shape)
    if not (isinstance(name, str) and whole and isinstance(data, bytes | bytearray)):
        return None
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "="
    return Array((order if order in ("<", ">") else "") + name, shape, bytes(data))
