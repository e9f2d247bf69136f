#!/usr/bin/env bash
# Builds the app's APK on a plain Debian machine, without an Android SDK.
#
#   android_client/build_apk.sh [--output FILE] [--release-keystore FILE [--key-alias NAME]]
#
# Compiled with javac against stubs/, turned into DEX by D8, packed by aapt2, and signed: with the key
# in FILE (apksigner asks for its password, or takes it from $KEYSTORE_PASSWORD), or else with a debug
# key that is made once and kept, so that the next build installs over this one.
#
# $CLEAVE_CACHE/android (or ~/.cache/cleave/android) holds the build tools and the debug key.
# $BUILD_FOLDER (or android_client/build) is where it works; $PYTHON (or python3) brings pip.
set -euo pipefail
export LC_ALL=C TZ=UTC

here=$(cd "$(dirname "$0")" && pwd)
build=${BUILD_FOLDER:-$here/build}
cache=${CLEAVE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cleave}/android
python=${PYTHON:-python3}
min_sdk=24
target_sdk=34
jars=(/usr/share/java/okhttp.jar /usr/share/java/okio.jar /usr/share/java/msgpack-core.jar)
packages=(libokhttp-java libokio-java libmsgpack-java)

fail() { echo "build_apk.sh: $1" >&2; exit "${2:-1}"; }

output=$build/cleave.apk
keystore= alias=cleave
while (($#)); do
    case $1 in
        --output) output=${2:?--output needs a FILE}; shift 2 ;;
        --release-keystore) keystore=${2:?--release-keystore needs a FILE}; shift 2 ;;
        --key-alias) alias=${2:?--key-alias needs a NAME}; shift 2 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit ;;
        *) fail "$1 is no option; --help lists them" 2 ;;
    esac
done
[[ -z $keystore || -f $keystore ]] || fail "there is no keystore $keystore; make one with keytool, or leave it out"

missing=()
command -v javac keytool >/dev/null || missing+=(openjdk-17-jdk-headless)
command -v apksigner >/dev/null || missing+=(apksigner)
command -v zipalign >/dev/null || missing+=(zipalign)
for i in "${!jars[@]}"; do [[ -f ${jars[i]} ]] || missing+=("${packages[i]}"); done
"$python" -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
((${#missing[@]} == 0)) || fail "something is missing; run apt-get install ${missing[*]}"
[[ $(uname -sm) == "Linux x86_64" ]] \
    || fail "the aapt2 that it fetches is for Linux on x86_64, this is $(uname -sm); build with Gradle instead"

# --- Build tools: fetched once, by hash, and checked again each time.
tools=$cache/tools-1
wanted="2d4ad908faea64047c1cc9cb747e6aa667c6ab192e09607bd16b67246a8cd6ae  bundletool.jar
df312db814c018019b2b79a993b041b738d7b76f4a8f28da25bc874a026368cc  aapt2
5dd984016ed5a5eb0eef866e2c6e8cd352e1427828ec23adb18005cf5648f3d7  framework.apk"
good() { (cd "$1" 2>/dev/null && sha256sum --check --strict --status <<<"$wanted"); }

if ! good "$tools"; then
    echo "fetching the build tools (about 100 MB)" >&2
    mkdir -p "$cache"
    fetched=$(mktemp -d "$cache/fetching.XXXXXX")
    trap 'rm -rf "$fetched"' EXIT
    "$python" -m pip download --quiet --disable-pip-version-check --no-cache-dir --no-deps \
        --only-binary=:all: --python-version 3.13 --require-hashes -r "$here/tools.txt" -d "$fetched" \
        || fail "pip could not fetch what tools.txt names; see above, and run it again"
    "$python" - "$fetched" <<'PYTHON'
import io, sys, zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("mobsf-*.whl")
with zipfile.ZipFile(wheel) as archive:
    inside = "mobsf/StaticAnalyzer/tools/"
    (folder / "bundletool.jar").write_bytes(archive.read(inside + "bundletool-all-1.17.2.jar"))
    apktool = zipfile.ZipFile(io.BytesIO(archive.read(inside + "apktool_3.0.3.jar")))
(folder / "aapt2").write_bytes(apktool.read("prebuilt/linux/aapt2"))
(folder / "aapt2").chmod(0o755)
(folder / "framework.apk").write_bytes(apktool.read("prebuilt/android-framework.jar"))
(stubs,) = folder.glob("chaquopy_stubs_android-*.whl")
stubs.rename(folder / "android-pyi.zip")
wheel.unlink()
PYTHON
    good "$fetched" || fail "the fetched build tools are not those expected; do not use them, and report it"
    rm -rf "$tools"
    mv "$fetched" "$tools"
    chmod 755 "$tools"
fi

# --- Compile.
quick=(-XX:+UseSerialGC -XX:TieredStopAtLevel=1) # runs of seconds: less compiling, half the time
sources() { find "$@" -name '*.java' | sort; }
java_8=(javac "${quick[@]/#/-J}" --release 8 -encoding UTF-8 -Xlint:all,-options -Werror -g:source,lines)
class_path=$(IFS=:; echo "${jars[*]}")
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/../cleave/__init__.py")
[[ $version =~ ^([0-9]+)\.([0-9]+)\.([0-9]+) ]] || fail "cleave/__init__.py has no version like 1.2.3, but '$version'"
version_code=$((BASH_REMATCH[1] * 1000000 + BASH_REMATCH[2] * 1000 + BASH_REMATCH[3] + 1))

work=$build/apk
rm -rf "$work"
mkdir -p "$work"/{stubs,onnxruntime,classes,libraries,dex,generated,assets} "$(dirname "$output")"
mapfile -t stub_files < <(sources "$here/stubs")
"${java_8[@]}" -d "$work/stubs" "${stub_files[@]}"
# ONNX Runtime is no package of Debian's, so this app runs no graphs: it looks for the library and finds none.
mapfile -t stub_files < <(sources "$here/app/src/stubs/java")
"${java_8[@]}" -cp "$work/stubs" -d "$work/onnxruntime" "${stub_files[@]}"

# --- Resources and manifest: the package's name is in the Gradle project, for both ways to build.
package=$(sed -n "s/^ *namespace *= *'\(.*\)'$/\1/p" "$here/app/build.gradle")
sed "s/<manifest /<manifest package=\"$package\" /" "$here/app/src/main/AndroidManifest.xml" >"$work/AndroidManifest.xml"
"$here/licences.sh" "${packages[@]}" >"$work/assets/licences.txt"
"$tools/aapt2" compile --dir "$here/app/src/main/res" -o "$work/resources.zip"
"$tools/aapt2" link -I "$tools/framework.apk" --manifest "$work/AndroidManifest.xml" \
    --min-sdk-version $min_sdk --target-sdk-version $target_sdk \
    --version-code "$version_code" --version-name "$version" \
    -A "$work/assets" --java "$work/generated" -o "$work/base.apk" "$work/resources.zip"

mapfile -t java_files < <(sources "$here"/{core,gpu,app}/src/main/java "$work/generated")
"${java_8[@]}" -cp "$work/stubs:$work/onnxruntime:$class_path" -d "$work/classes" "${java_files[@]}"

for jar in "${jars[@]}"; do "$python" "$here/old_android.py" "$jar" "$work/libraries/$(basename "$jar")"; done

# --- DEX. D8 looks up Android's classes in the stubs and Java's in the JDK, to find what it must rewrite.
# For one API level less than the app's: then interfaces have no code in them, and tests can turn this very
# DEX back into class files for a JVM.
java_home=$(dirname "$(dirname "$(readlink -f "$(command -v javac)")")")
mapfile -t class_files < <(find "$work/classes" -name '*.class' | sort)
java "${quick[@]}" -cp "$tools/bundletool.jar" com.android.tools.r8.D8 --release --min-api $((min_sdk - 1)) \
    --lib "$work/stubs" --lib "$work/onnxruntime" --lib "$java_home" --output "$work/dex" "${class_files[@]}" "$work"/libraries/*.jar

# --- Pack, align, sign. Every entry has the same date, so that the same sources give the same APK.
"$python" - "$work/base.apk" "$work"/dex/*.dex "$work/unaligned.apk" <<'PYTHON'
import sys, zipfile
from pathlib import Path

base, *dexes, packed = map(Path, sys.argv[1:])
entries = {}
with zipfile.ZipFile(base) as archive:
    for entry in archive.infolist():
        entries[entry.filename] = (entry.compress_type, archive.read(entry))
for dex in dexes:
    entries[dex.name] = (zipfile.ZIP_DEFLATED, dex.read_bytes())
with zipfile.ZipFile(packed, "w") as archive:
    for name, (compression, content) in sorted(entries.items()):
        entry = zipfile.ZipInfo(name, date_time=(1981, 1, 1, 1, 1, 2))
        entry.compress_type = compression
        entry.external_attr = 0o644 << 16
        archive.writestr(entry, content)
PYTHON
zipalign -f -p 4 "$work/unaligned.apk" "$work/aligned.apk"

if [[ -z $keystore ]]; then
    key=(--ks "$cache/debug.keystore" --ks-key-alias debug --ks-pass pass:android)
    [[ -f $cache/debug.keystore ]] || keytool -genkeypair -keystore "$cache/debug.keystore" -alias debug \
        -storepass android -keyalg RSA -keysize 2048 -validity 10000 -dname "CN=Cleave debug" >/dev/null 2>&1
else
    key=(--ks "$keystore" --ks-key-alias "$alias")
    [[ -z ${KEYSTORE_PASSWORD:-} ]] || key+=(--ks-pass env:KEYSTORE_PASSWORD)
fi
apksigner sign "${key[@]}" --min-sdk-version $min_sdk --v4-signing-enabled false \
    --out "$output" "$work/aligned.apk" || fail "apksigner could not sign; see above"
apksigner verify --min-sdk-version $min_sdk "$output" || fail "the signature of $output is not good; see above"
echo "$output"
