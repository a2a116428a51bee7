"""Verification of a step of any trainer against the number that should have come out (`docs/verify.md`)."""
