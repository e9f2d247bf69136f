"""Makes a library's classes fit for Android before 10, where they were compiled for a newer Java.

Since Java 9, `ByteBuffer.flip()` and the like return a `ByteBuffer`; before, as on Android 7 to 9,
they return a `Buffer`, and are not found under the newer type. A library that was compiled with a
newer JDK, and not with `--release 8`, names the newer one. Here each such method is named as Java 8
names it, where no call in the class uses what it returns; the few others stay (a test knows them,
and that the app does not call them).

    python3 old_android.py FROM.jar TO.jar
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from pathlib import Path

_NEWER = re.compile(
    r"(java/nio/\w+Buffer)\.(?:position|limit|mark|reset|clear|flip|rewind)"
    r"(\(I?\))Ljava/nio/(?!Buffer;)\w+Buffer;"
)
_DATE = (1981, 1, 1, 1, 1, 2)
_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 18: 4}
_TEXT, _LONG, _DOUBLE, _METHOD, _NAME_AND_TYPE = 1, 5, 6, 10, 12
_POOL_STARTS = 8  # after magic and version
_INVOKE_VIRTUAL, _POP = 0xB6, 0x57


def for_java_8(content: bytes) -> bytes:
    """A class file whose calls of buffers' methods are named as in Java 8."""
    pool, end = _read_pool(content)

    def text(index: int) -> str:
        return content[slice(*pool[index][1:])][2:].decode()

    changed = bytearray(content)
    added = b""
    (count,) = struct.unpack_from(">H", content, _POOL_STARTS)
    for index, (tag, start, _) in pool.items():
        if tag != _METHOD:
            continue
        owner, pair = struct.unpack_from(">HH", content, start)
        name, kind = struct.unpack_from(">HH", content, pool[pair][1])
        called = f"{text(struct.unpack_from('>H', content, pool[owner][1])[0])}.{text(name)}"
        found = _NEWER.fullmatch(called + text(kind))
        if not found or _is_result_used(content[end:], index):
            continue
        older = f"{found[2]}Ljava/nio/Buffer;".encode()
        added += struct.pack(">BH", _TEXT, len(older)) + older
        added += struct.pack(">BHH", _NAME_AND_TYPE, name, count)
        struct.pack_into(">HH", changed, start, owner, count + 1)
        count += 2
    struct.pack_into(">H", changed, _POOL_STARTS, count)
    return bytes(changed[:end]) + added + bytes(changed[end:])


def _read_pool(content: bytes) -> tuple[dict[int, tuple[int, int, int]], int]:
    """Constants by index: tag, and where the rest starts and ends; and where all of them end."""
    (count,) = struct.unpack_from(">H", content, _POOL_STARTS)
    at, index = _POOL_STARTS + 2, 1
    pool = {}
    while index < count:
        tag = content[at]
        size = _SIZES.get(tag) or 2 + struct.unpack_from(">H", content, at + 1)[0]
        pool[index] = (tag, at + 1, at + 1 + size)
        at += 1 + size
        index += 2 if tag in (_LONG, _DOUBLE) else 1
    return pool, at


def _is_result_used(code: bytes, method: int) -> bool:
    call = re.escape(struct.pack(">BH", _INVOKE_VIRTUAL, method))
    return any(code[found.end()] != _POP for found in re.finditer(call, code, re.DOTALL))


def main(source: Path, target: Path) -> None:
    """Rewrite all classes of a jar; other files are left out."""
    with zipfile.ZipFile(source) as jar, zipfile.ZipFile(target, "w") as out:
        for name in sorted(jar.namelist()):
            if name.endswith(".class"):
                out.writestr(zipfile.ZipInfo(name, _DATE), for_java_8(jar.read(name)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
