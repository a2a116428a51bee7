"""Sinks: the records of metrics.jsonl, sent elsewhere while a run trains (`docs/sinks.md`)."""
