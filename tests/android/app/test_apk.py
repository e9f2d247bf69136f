"""The APK: that it builds, is signed, and asks for what it needs."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.android.app.conftest import ANDROID, Built, build_apk, run

PERMISSIONS = {
    "INTERNET",
    "ACCESS_NETWORK_STATE",
    "FOREGROUND_SERVICE",
    "FOREGROUND_SERVICE_DATA_SYNC",
    "POST_NOTIFICATIONS",
    "WAKE_LOCK",
}


@pytest.mark.nightly
def test_signature_is_good(built: Built) -> None:
    said = run("apksigner", "verify", "--verbose", "--min-sdk-version", "24", built.apk)
    assert "Verified using v2 scheme (APK Signature Scheme v2): true" in said


@pytest.mark.nightly
def test_it_asks_for_what_it_needs_and_no_more(built: Built) -> None:
    said = run(built.tools / "aapt2", "dump", "permissions", built.apk)
    asked = re.findall(r"uses-permission: name='android\.permission\.(\w+)'", said)
    assert sorted(asked) == sorted(PERMISSIONS)
    assert said.count("permission:") == len(PERMISSIONS)


@pytest.mark.nightly
def test_manifest_is_that_of_the_issue(built: Built) -> None:
    said = run(built.tools / "aapt2", "dump", "badging", built.apk)
    assert "package: name='cleave.app'" in said
    assert "minSdkVersion:'24'" in said or "sdkVersion:'24'" in said
    assert "targetSdkVersion:'34'" in said
    tree = run(built.tools / "aapt2", "dump", "xmltree", built.apk, "--file", "AndroidManifest.xml")
    assert re.search(r"allowBackup\(0x\w+\)=false", tree)
    assert re.search(r"foregroundServiceType\(0x\w+\)=(0x0*1|1)\b", tree)
    assert 'scheme(0x01010027)="cleave"' in tree
    assert "debuggable" not in tree


@pytest.mark.nightly
def test_it_carries_the_licences_of_what_it_holds(built: Built) -> None:
    with zipfile.ZipFile(built.apk) as apk:
        text = apk.read("assets/licences.txt").decode()
    for words in ("libokhttp-java", "libokio-java", "libmsgpack-java", "Version 2.0, January 2004"):
        assert words in text


@pytest.mark.nightly
def test_same_sources_give_the_same_app_signed_with_any_key(built: Built, tmp_path: Path) -> None:
    store = tmp_path / "own.keystore"
    run("keytool", "-genkeypair", "-keystore", store, "-alias", "me", "-storepass", "secret",
        "-keyalg", "RSA", "-keysize", "2048", "-dname", "CN=Me")  # fmt: skip
    options = ("--release-keystore", store, "--key-alias", "me")
    apk = build_apk(tmp_path, *options, env={"KEYSTORE_PASSWORD": "secret"})
    assert "CN=Me" in run("apksigner", "verify", "--print-certs", apk)
    assert "CN=Cleave debug" in run("apksigner", "verify", "--print-certs", built.apk)
    unsigned = [folder / "aligned.apk" for folder in (tmp_path / "build/apk", built.folder)]
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in unsigned]
    assert digests[0] == digests[1]


def said_by_the_script(*arguments: str, path: str | None = None) -> tuple[int, str]:
    env = {**os.environ, **({"PATH": path} if path else {})}
    done = subprocess.run(
        ["/bin/bash", ANDROID / "build_apk.sh", *arguments], capture_output=True, text=True, env=env
    )
    return done.returncode, done.stderr


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    assert said_by_the_script("--outptu", "x") == (
        2, "build_apk.sh: --outptu is no option; --help lists them\n"
    )  # fmt: skip
    code, said = said_by_the_script("--release-keystore", str(tmp_path / "none"))
    assert code == 1
    assert said.count("\n") == 1
    assert "make one with keytool" in said


def test_missing_packages_are_named(tmp_path: Path) -> None:
    for name in ("dirname", "uname", "env"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    code, said = said_by_the_script(path=str(tmp_path))
    assert code == 1
    assert "run apt-get install openjdk-17-jdk-headless apksigner zipalign" in said
