"""Tests of alarms about steps."""
