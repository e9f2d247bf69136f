"""Admission of devices and operators: join codes, credentials, operators' tokens."""
