"""What the doctor looks for: one file for each kind of source.

Each check is a function from a source and the setup around it to findings.
"""
