"""Sinks of records: the real libraries read back what they were given."""
