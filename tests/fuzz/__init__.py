"""A fuzzer of everything that reads what strangers write: `make fuzz`, or `python -m tests.fuzz --help`."""
