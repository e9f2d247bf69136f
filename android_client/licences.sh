#!/usr/bin/env bash
# Prints the licences of the libraries that the APK holds, named as Debian packages: it carries them along.
set -euo pipefail
for package in "$@"; do
    printf '==== %s\n\n' "$package"
    cat "/usr/share/doc/$package/copyright"
    echo
done
printf '==== Apache License 2.0\n\n'
cat /usr/share/common-licenses/Apache-2.0
