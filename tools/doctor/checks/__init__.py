"""The checks of the doctor: one module for each kind of source.

A check takes a source and the facts of the setup and yields findings.
"""
