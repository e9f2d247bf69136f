"""Admit devices and operators by join codes, credentials and operator tokens."""
