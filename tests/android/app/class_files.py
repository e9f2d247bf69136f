"""Reads what a Java class file declares, and what it uses of other classes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

ACC_PROTECTED: Final = 0x0004
ACC_PUBLIC: Final = 0x0001
ACC_STATIC: Final = 0x0008
ACC_INTERFACE: Final = 0x0200
ACC_SYNTHETIC: Final = 0x1000

_SIZES: Final = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 18: 4}
"""Bytes of a constant after its tag; 1 is a text with its length."""

_CLASS: Final = 7
_FIELD: Final = 9
_METHODS: Final = (10, 11)


@dataclass(frozen=True)
class Member:
    """A field or method that a class declares; `descriptor` as in the class file."""

    name: str
    descriptor: str
    access: int
    constant: bool

    @property
    def static(self) -> bool:
        return bool(self.access & ACC_STATIC)

    @property
    def visible(self) -> bool:
        """To others, or to subclasses."""
        plain = self.access & (ACC_PUBLIC | ACC_PROTECTED) and not self.access & ACC_SYNTHETIC
        return bool(plain)


@dataclass(frozen=True)
class Use:
    """What a class uses of another: a field or method, or the class itself if `name` is empty."""

    owner: str
    name: str
    descriptor: str


@dataclass(frozen=True)
class ClassFile:
    """Names as class files write them: `java/lang/String`."""

    name: str
    access: int
    bases: tuple[str, ...]
    fields: tuple[Member, ...]
    methods: tuple[Member, ...]
    uses: frozenset[Use]


def read_class(content: bytes) -> ClassFile:
    """Read one class file."""
    return _Reader(content).read()


def parameters_of(descriptor: str) -> tuple[tuple[str, ...], str]:
    """A method's descriptor as its parameters' types, and its result's."""
    found: list[str] = []
    at = 1
    while descriptor[at] != ")":
        start = at
        while descriptor[at] == "[":
            at += 1
        at = descriptor.index(";", at) + 1 if descriptor[at] == "L" else at + 1
        found.append(descriptor[start:at])
    return tuple(found), descriptor[at + 1 :]


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._at = 8  # after magic and version
        self._pool: dict[int, tuple[int, Any]] = {}

    def read(self) -> ClassFile:
        self._read_pool()
        access, this, base = self._unpack(">HHH")
        interfaces = [self._unpack(">H")[0] for _ in range(self._unpack(">H")[0])]
        bases = [self._class(index) for index in (base, *interfaces) if index]
        fields, methods = self._members(), self._members()
        return ClassFile(self._class(this), access, tuple(bases), fields, methods, self._uses())

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._content, self._at)
        self._at += struct.calcsize(form)
        return values

    def _read_pool(self) -> None:
        (count,) = self._unpack(">H")
        index = 1
        while index < count:
            (tag,) = self._unpack(">B")
            size = self._unpack(">H")[0] if tag == 1 else _SIZES[tag]
            self._pool[index] = (tag, self._content[self._at : self._at + size])
            self._at += size
            index += 2 if tag in (5, 6) else 1

    def _text(self, index: int) -> str:
        return str(self._pool[index][1].decode())

    def _class(self, index: int) -> str:
        return self._text(int.from_bytes(self._pool[index][1]))

    def _members(self) -> tuple[Member, ...]:
        members = []
        for _ in range(self._unpack(">H")[0]):
            access, name, descriptor, attributes = self._unpack(">HHHH")
            constant = False
            for _ in range(attributes):
                attribute, length = self._unpack(">HI")
                constant |= self._text(attribute) == "ConstantValue"
                self._at += length
            members.append(Member(self._text(name), self._text(descriptor), access, constant))
        return tuple(members)

    def _uses(self) -> frozenset[Use]:
        uses = set()
        for tag, content in self._pool.values():
            if tag == _CLASS:
                uses.add(Use(self._text(int.from_bytes(content)), "", ""))
            elif tag == _FIELD or tag in _METHODS:
                owner, pair = struct.unpack(">HH", content)
                name, descriptor = struct.unpack(">HH", self._pool[pair][1])
                uses.add(Use(self._class(owner), self._text(name), self._text(descriptor)))
        return frozenset(uses)
