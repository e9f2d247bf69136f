"""The Android client, as far as it runs without a phone."""
