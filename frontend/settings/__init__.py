"""The settings of a model: their sources and their resolution.

The folder is beside registration/, because serving/ uses resolved settings, too.
"""
