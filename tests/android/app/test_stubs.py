"""The stubs that the app is compiled against are what Android is."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.android.app.android_levels import AndroidLevels
from tests.android.app.android_pyi import INEXACT, AndroidClasses
from tests.android.app.class_files import (
    ACC_INTERFACE,
    ClassFile,
    Use,
    parameters_of,
    read_class,
)
from tests.android.app.conftest import Built, compile_java

MIN_SDK = 24
NEWER = {
    ("android/Manifest$permission", "POST_NOTIFICATIONS"): 33,
    ("android/app/Notification$Builder", "<init>"): 26,
    ("android/app/NotificationChannel", ""): 26,
    ("android/app/NotificationChannel", "<init>"): 26,
    ("android/app/NotificationChannel", "setDescription"): 26,
    ("android/app/NotificationChannel", "setShowBadge"): 26,
    ("android/app/NotificationManager", "createNotificationChannel"): 26,
    ("android/app/Service", "startForeground"): 29,
    ("android/content/Context", "startForegroundService"): 26,
    ("android/content/pm/ServiceInfo", "FOREGROUND_SERVICE_TYPE_DATA_SYNC"): 29,
    ("android/os/Build", "SOC_MANUFACTURER"): 31,
    ("android/os/Build", "SOC_MODEL"): 31,
    ("android/os/PowerManager", "getCurrentThermalStatus"): 29,
}
"""Members that older systems do not have: the app asks for the system's version first."""

WITHOUT_LEVEL = {"java/lang/Object"}
"""Not in D8's database, as everybody has it."""

NOT_CALLED = {
    ("org/msgpack/core/MessageUnpacker", "unpackString"),
    ("org/msgpack/core/MessageUnpacker", "unpackValue"),
    ("org/msgpack/core/MessageUnpacker", "unpackTimestamp"),
    ("org/msgpack/core/MessagePacker", "packTimestamp"),
}
"""Methods of libraries that need later systems."""

REWRITTEN = "java/lang/invoke/"
"""What lambdas are made of in class files, and not in DEX."""


@pytest.fixture(scope="module")
def android(built: Built) -> AndroidClasses:
    return AndroidClasses(built.tools / "android-pyi.zip")


def problems(stub: ClassFile, android: AndroidClasses) -> Iterator[str]:
    """What a stub says that Android does not."""
    found = android.with_bases(stub.name)
    if not found:
        yield f"there is no {stub.name}"
        return
    inherited = {base.name for base in found[1:]} | {"java/lang/Object"}
    for base in stub.bases:
        if base not in inherited:
            yield f"{stub.name} is no {base}"
    if stub.access & ACC_INTERFACE and "<init>" in found[0].methods:
        yield f"{stub.name} is no interface"
    for member in stub.fields:
        kind, static = found[0].fields.get(member.name, ("", False))
        if not member.visible:
            continue
        if static != member.static or member.descriptor not in INEXACT.get(kind, {kind}):
            yield f"{stub.name}.{member.name} is no {member.descriptor}"
        if member.constant:
            yield f"{stub.name}.{member.name} has a value, which would be copied into the app"
    for member in stub.methods:
        parameters, result = parameters_of(member.descriptor)
        overloads = [
            method
            for level in (found[:1] if member.name == "<init>" else found)
            for method in level.methods.get(member.name, [])
            if method.parameters == parameters and method.static == member.static
        ]
        if member.visible and not any(
            result in INEXACT.get(method.result, {method.result}) for method in overloads
        ):
            yield f"there is no {stub.name}.{member.name}{member.descriptor}"


def stubs(folder: Path) -> list[ClassFile]:
    """All but what the stubs themselves share."""
    return [
        read_class(file.read_bytes())
        for file in sorted(folder.rglob("*.class"))
        if file.parent.name != "stub"
    ]


@pytest.mark.nightly
def test_stubs_say_what_android_says(built: Built, android: AndroidClasses) -> None:
    found = stubs(built.folder / "stubs")
    assert len(found) > 50
    assert [problem for stub in found for problem in problems(stub, android)] == []


WRONG = (
    ("Nothing", "class Nothing {}", "there is no android/os/Nothing"),
    ("IBinder", "interface IBinder { void ping(); }", "there is no android/os/IBinder.ping()V"),
    (
        "Handler",
        "class Handler { public Handler(int a) {} }",
        "there is no android/os/Handler.<init>(I)V",
    ),
    (
        "SystemClock",
        "class SystemClock { public long elapsedRealtime() { return 0; } }",
        "there is no android/os/SystemClock.elapsedRealtime()J",
    ),
    (
        "BatteryManager",
        "class BatteryManager { public static final int EXTRA_LEVEL = new Integer(1);"
        ' public static final String EXTRA_SCALE = "scale"; }',
        "android/os/BatteryManager.EXTRA_LEVEL is no I",
    ),
    (
        "BatteryManager",
        "",  # the same
        "android/os/BatteryManager.EXTRA_SCALE has a value, which would be copied into the app",
    ),
    ("Binder", "interface Binder {}", "android/os/Binder is no interface"),
    (
        "Bundle",
        "class Bundle extends Exception { private static final long serialVersionUID = 1; }",
        "android/os/Bundle is no java/lang/Exception",
    ),
)


@pytest.mark.nightly
def test_wrong_stubs_fail(android: AndroidClasses, tmp_path: Path) -> None:
    folder = tmp_path / "android/os"
    folder.mkdir(parents=True)
    for name, text, _ in WRONG:
        if text:
            (folder / f"{name}.java").write_text(f"package android.os;\npublic {text}\n")
    made = compile_java(tmp_path / "out", ".", tmp_path)
    found = {problem for stub in stubs(made) for problem in problems(stub, android)}
    assert {problem for _, _, problem in WRONG} <= found


class Levels:
    """Since when Android has what a class uses, inherited or not."""

    def __init__(self, built: Built, android: AndroidClasses) -> None:
        self._levels = AndroidLevels(built.tools / "bundletool.jar")
        self._android = android

    def of(self, use: Use) -> int | None:
        bases = self._android.with_bases(use.owner)[1:]
        owners = [use.owner, *(base.name for base in bases)]
        asked = [self._levels.of(Use(owner, use.name, use.descriptor)) for owner in owners]
        return next((found for found in asked if found is not None), None)

    def newer(self, classes: Iterable[ClassFile]) -> dict[tuple[str, str], int | None]:
        """What they use of Android and Java that is not in level 24: since when, or None for never.

        By owner and name.
        """
        found: dict[tuple[str, str], int | None] = {}
        for use in {use for read in classes for use in read.uses}:
            system = use.owner.startswith(("android/", "java/", "javax/"))
            if not system or use.owner.startswith(REWRITTEN) or _is_of_object(use):
                continue
            level = self.of(use)
            if level is None or level > MIN_SDK:
                found[use.owner, use.name] = level
        return found


@pytest.mark.nightly
def test_the_app_runs_on_android_7(built: Built, android: AndroidClasses) -> None:
    """What it uses of Android and Java is there with these very types, in API level 24 or named."""
    levels = Levels(built, android)
    assert levels.of(Use("java/util/Base64", "", "")) == 26
    assert levels.of(Use("android/os/SystemClock", "elapsedRealtime", "()I")) is None
    classes = [
        read_class(file.read_bytes()) for file in (built.folder / "classes").rglob("*.class")
    ]
    newer = levels.newer(classes)
    # The database is older than Android 13.
    newer[("android/Manifest$permission", "POST_NOTIFICATIONS")] = 33
    assert newer == NEWER
    called = {(use.owner, use.name) for read in classes for use in read.uses}
    assert not called & NOT_CALLED


@pytest.mark.nightly
def test_its_libraries_do_as_well(built: Built, android: AndroidClasses) -> None:
    """What they use of later systems is in methods that the app does not call."""
    levels = Levels(built, android)
    newer = {}
    for file in (built.folder / "libraries").glob("*.jar"):
        with zipfile.ZipFile(file) as jar:
            classes = [read_class(jar.read(name)) for name in jar.namelist()]
        newer.update(levels.newer(classes))
    owners = {owner for owner, _ in newer}
    # Times as objects, and files by path: of no use here.
    unused = {"java/time/Duration", "java/time/Instant", "java/nio/file/Files"}
    assert owners - unused == {"java/nio/CharBuffer", "java/lang/StringBuilder", "java/util/Date"}
    assert {name for owner, name in newer if owner == "java/nio/CharBuffer"} == {"flip"}
    assert {name for owner, name in newer if owner == "java/util/Date"} == {"toInstant"}
    # Inherited from a class that is not public, and so not in the database.
    assert {name for owner, name in newer if owner == "java/lang/StringBuilder"} == {"setLength"}


def _is_of_object(use: Use) -> bool:
    """What every class inherits."""
    return use.owner in WITHOUT_LEVEL or (use.name, use.descriptor) in {
        ("toString", "()Ljava/lang/String;"),
        ("equals", "(Ljava/lang/Object;)Z"),
        ("hashCode", "()I"),
    }
