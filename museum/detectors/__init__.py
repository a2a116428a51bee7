"""Detectors of silent bugs, each with a function `detect` of a case (`museum/cases.py`)."""
