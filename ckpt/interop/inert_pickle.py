"""Reading a pickle without running it: every class and call in it becomes a plain record of its name and arguments.

DCP's ``.metadata`` is a pickle. Only its data matter, so that the opcodes are interpreted here one by one; nothing is
imported and nothing is called, whatever the file says.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass

from recovery.errors import CheckpointRejected

_MAX_OPERATIONS = 50_000_000


@dataclass(eq=False, slots=True)
class Name:
    """A class or function, by name."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """What a call of ``name`` would have made."""

    name: str
    arguments: tuple[object, ...]
    state: object = None

    def field(self, name: str) -> object:
        """Return a field of the state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


_PUSHES = {
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "BININT",
    "BININT1",
    "BININT2",
    "INT",
    "LONG",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "FLOAT",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
}
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_MARK = object()


def read_inert(content: bytes, where: str) -> object:
    """Return what a pickle describes, as dicts, lists, tuples, plain values, ``Name`` and ``Record``.

    Raises:
        CheckpointRejected: it is not a pickle, or uses something that plain metadata does not.
    """
    try:
        return _Machine().run(content)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointRejected(f"{where} is damaged or holds more than plain metadata: {error}") from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self, content: bytes) -> object:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count > _MAX_OPERATIONS:
                raise ValueError("too many operations")
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise ValueError("it has no end")

    def step(self, name: str, argument: object) -> None:
        if name in _PUSHES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in ("PROTO", "FRAME"):
            pass
        elif name in _HANDLERS:
            getattr(self, _HANDLERS[name])(name, argument)
        else:
            raise ValueError(f"the operation {name} has no place in metadata")

    def memoize(self, name: str, argument: object) -> None:
        index = len(self.memo) if name == "MEMOIZE" else argument
        assert isinstance(index, int)
        self.memo[index] = self.stack[-1]

    def get(self, name: str, argument: object) -> None:
        assert isinstance(argument, int)
        self.stack.append(self.memo[argument])

    def mark(self, name: str, argument: object) -> None:
        self.stack.append(_MARK)

    def empty(self, name: str, argument: object) -> None:
        made: object = {} if name == "EMPTY_DICT" else [] if name == "EMPTY_LIST" else ()
        self.stack.append(set() if name == "EMPTY_SET" else made)

    def tuple_of(self, name: str, argument: object) -> None:
        if name == "TUPLE":
            self.stack.append(tuple(self.to_mark()))
            return
        size = int(name[-1])
        items = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.stack.append(items)

    def append(self, name: str, argument: object) -> None:
        items = self.to_mark() if name == "APPENDS" else [self.stack.pop()]
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("something is appended to what is no list")
        target.extend(items)

    def set_items(self, name: str, argument: object) -> None:
        if name == "SETITEMS":
            items = self.to_mark()
        else:
            value, key = self.stack.pop(), self.stack.pop()
            items = [key, value]
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("an item is set in what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def add_items(self, name: str, argument: object) -> None:
        items = self.to_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise TypeError("an item is added to what is no set")
        target.update(items)

    def global_name(self, name: str, argument: object) -> None:
        if name == "GLOBAL":
            self.stack.append(Name(str(argument).replace(" ", ".")))
            return
        attribute, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Name(f"{module}.{attribute}"))

    def call(self, name: str, argument: object) -> None:
        if name == "NEWOBJ_EX":
            self.stack.pop()
        arguments, callee = self.stack.pop(), self.stack.pop()
        if not isinstance(callee, Name) or not isinstance(arguments, tuple):
            raise TypeError("something else than a name is called")
        self.stack.append(Record(callee.name, arguments))

    def build(self, name: str, argument: object) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record):
            raise TypeError("a state is set on what is no object")
        target.state = state

    def pop(self, name: str, argument: object) -> None:
        if name == "POP_MARK":
            self.to_mark()
        else:
            self.stack.pop()

    def to_mark(self) -> list[object]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


_HANDLERS = {
    "MEMOIZE": "memoize",
    "BINPUT": "memoize",
    "LONG_BINPUT": "memoize",
    "BINGET": "get",
    "LONG_BINGET": "get",
    "MARK": "mark",
    "EMPTY_DICT": "empty",
    "EMPTY_LIST": "empty",
    "EMPTY_TUPLE": "empty",
    "EMPTY_SET": "empty",
    "TUPLE": "tuple_of",
    "TUPLE1": "tuple_of",
    "TUPLE2": "tuple_of",
    "TUPLE3": "tuple_of",
    "APPEND": "append",
    "APPENDS": "append",
    "SETITEM": "set_items",
    "SETITEMS": "set_items",
    "ADDITEMS": "add_items",
    "GLOBAL": "global_name",
    "STACK_GLOBAL": "global_name",
    "REDUCE": "call",
    "NEWOBJ": "call",
    "NEWOBJ_EX": "call",
    "BUILD": "build",
    "POP": "pop",
    "POP_MARK": "pop",
}
